"""The backend "fla": the Triton kernels of the package fla-core, for GPUs."""
