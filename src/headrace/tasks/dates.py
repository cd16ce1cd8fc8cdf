"""Translating written dates to ISO 8601, character by character.

    source   Tuesday, the 3rd of March 1998
    target   1998-03-03

Dates are from 1950 to 2049, so that two digits determine a year, in seven formats, such as 3 Mar 98 and 3/3/98 (month
first). A date that is held out is in no training row, in whatever format.
"""

import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from typing import ClassVar

import torch
from torch import Tensor

from ..utils.errors import InputError
from .base import Batch
from .sequences import Sequences

# Python's names of months and days depend on the locale.
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
          "December")  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
SUFFIXES = {1: "st", 2: "nd", 3: "rd", 21: "st", 22: "nd", 23: "rd", 31: "st"}
FIRST_DAY, LAST_DAY = date(1950, 1, 1).toordinal(), date(2049, 12, 31).toordinal()

# Functions of a date d, the name m of its month and the name w of its weekday.
FORMS: tuple[Callable[[date, str, str], str], ...] = (
    lambda d, m, w: f"{w}, the {d.day}{SUFFIXES.get(d.day, 'th')} of {m} {d.year}",
    lambda d, m, w: f"{m} {d.day}, {d.year}",
    lambda d, m, w: f"{d.day} {m} {d.year}",
    lambda d, m, w: f"{w[:3]} {d.day:02} {m[:3]} {d.year}",
    lambda d, m, w: f"{d.day} {m[:3]} {d.year % 100:02}",
    lambda d, m, w: f"{d.day:02}.{d.month:02}.{d.year}",
    lambda d, m, w: f"{d.month}/{d.day}/{d.year % 100:02}",
)


@dataclass(frozen=True)
class Dates(Sequences):
    """Translating dates to ISO 8601."""

    name: ClassVar[str] = "dates"
    alphabet = string.digits + string.ascii_letters + " ,./-"
    length = len("Wednesday, the 23rd of September 1998")
    written = len("1998-03-03")

    def resized(self, length: int) -> "Dates":
        raise InputError(f"length={length}: the length of the task dates is fixed; expected no length")

    def pairs(self, generator: torch.Generator, rows: int) -> Iterator[tuple[str, str]]:
        days = torch.randint(FIRST_DAY, LAST_DAY + 1, (rows,), generator=generator)
        forms = torch.randint(len(FORMS), (rows,), generator=generator)
        for day, form in zip(map(date.fromordinal, days.tolist()), forms.tolist(), strict=True):
            yield FORMS[form](day, MONTHS[day.month - 1], DAYS[day.weekday()]), day.isoformat()

    def content(self, drawn: Batch) -> Tensor:
        """The date: its target."""
        return drawn["shift_labels"]
