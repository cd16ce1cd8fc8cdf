"""The backend in PyTorch, for any device."""
