"""Mixers with a matrix memory per head outside the algebra of linear mixers."""
