"""The recurrence over several processes: whether tokens are in parts (context.py)."""
