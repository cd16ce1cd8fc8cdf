"""The recurrence: `linear_attention` and `step`, the loop that defines them, and the backends that compute them."""
