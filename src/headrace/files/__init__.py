"""What commands read and keep: locks and new folders, the version that made a file, text, and its held-out part."""
