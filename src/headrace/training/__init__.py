"""`headrace train`: one model, from a recipe and prepared data."""
