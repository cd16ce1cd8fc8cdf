"""Mixers with a matrix memory per head that `linear_attention` does not express."""
