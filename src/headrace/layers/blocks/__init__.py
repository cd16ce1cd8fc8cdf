"""Blocks and stacks of blocks: a mixer and an MLP with norms and a residual stream."""
