"""The recurrence over several processes: tokens (context.py) and heads (tensor.py) in parts."""
