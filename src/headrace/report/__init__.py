"""What pages share: their template, the style of pictures, numbers as text, statistics, and the table of mixers."""
