"""What commands share: locks and new folders, processes, threads, the version that made a file, and held-out text."""
