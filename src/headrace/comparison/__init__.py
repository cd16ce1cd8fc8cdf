"""Matched comparisons: plans, arms, worker processes."""
