"""Tables and figures of papers: the commands that reproduce them, and the published numbers, as data."""
