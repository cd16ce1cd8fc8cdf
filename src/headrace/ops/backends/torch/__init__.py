"""The backend in PyTorch, for all devices."""
