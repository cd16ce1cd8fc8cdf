"""The recurrence over several processes: tokens in parts (context.py)."""
