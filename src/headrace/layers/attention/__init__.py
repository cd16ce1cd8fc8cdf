"""Softmax attention and its variants."""
