"""What is done with models: compare, verify, measure, evaluate, inspect."""
