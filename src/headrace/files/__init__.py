"""What commands share: locks and new folders, checks of files, states as files, runs that continue, processes, threads,
devices, and the version that made a file."""
