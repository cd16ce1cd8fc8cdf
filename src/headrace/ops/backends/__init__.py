"""The backends of the recurrence, one folder each; ops/dispatch.py lists them."""
