"""The backend of native CPU kernels (native/)."""
