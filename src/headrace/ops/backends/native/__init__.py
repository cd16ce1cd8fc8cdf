"""The backend with native CPU kernels (native/)."""
