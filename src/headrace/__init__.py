"""headrace: linear-time sequence models whose heads compete by a softmax for what is written and what is read."""

__version__ = "0.1.0"
