"""From results to tables, pictures and words."""
