"""What is done with models: compare, verify, measure, evaluate, inspect, check the theory, reproduce the papers."""
