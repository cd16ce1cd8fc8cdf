"""Mixers with one recurrence per channel: state-space models and RWKV-4."""
