"""What all parts share: errors, devices, processes, files."""
