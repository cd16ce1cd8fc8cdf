"""Damage to files, for tests."""

import re
from pathlib import Path


def flip(path: Path) -> None:
    """Changes a bit of the byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change_digit(path: Path) -> None:
    """Changes a digit of the first number with decimals, so that the file is still JSON."""
    text = path.read_text("utf-8")
    at = re.search(r"\d\.(\d)", text).start(1)
    path.write_text(f"{text[:at]}{(int(text[at]) + 1) % 10}{text[at + 1 :]}", "utf-8")
