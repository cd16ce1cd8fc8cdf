"""Is what a mixer computes right: our own against the recurrence, and layers of other libraries by laws."""
