"""What commands share: locks and new folders, runs that continue, processes, threads, the version that made a file, and
held-out text."""
