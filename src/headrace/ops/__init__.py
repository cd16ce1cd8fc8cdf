"""The recurrence: `linear_attention` and `step`, their reference implementation, and the backends."""
