"""Text of users' files: UTF-8, with or without a byte order mark."""

import json

from ..utils.errors import InputError


def check_encoding(begin: bytes, name: str) -> None:
    """Raises InputError if a file begins as text in UTF-16 or UTF-32 does: by a byte order mark, or by zero bytes.

    begin: the first four bytes, or more."""
    if begin and not (encoding := json.detect_encoding(begin[:4])).startswith("utf-8"):
        raise InputError(f"{name} is {encoding.upper()}; expected UTF-8")


def decode(data: bytes, name: str) -> str:
    """Decodes UTF-8, and leaves out a byte order mark. InputError for another encoding."""
    check_encoding(data, name)
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x} ({error.reason})"
        ) from None
