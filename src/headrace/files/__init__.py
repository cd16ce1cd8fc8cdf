"""What commands share: locks and new folders, processes and threads, the version that made a file, text and its held-out part."""
