"""HTML pages and the style of pictures."""
