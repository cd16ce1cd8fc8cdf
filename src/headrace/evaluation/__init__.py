"""Checkpoints on what the papers evaluate on, by lm-evaluation-harness."""
