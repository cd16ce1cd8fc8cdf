"""Layers of the history."""
