"""Specs of models and mixers of the history."""
