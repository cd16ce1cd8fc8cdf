"""State-space models and recurrences per channel."""
