"""Parts of a page that a program writes, and that a test compares with what it would write:

    <!-- generated: NAME ARGUMENT ... -->          on lines of its own, with empty lines around what is made: a block
    … holds <!-- research: NAME ARGUMENT … -->30<!-- end --> pairs      within a line: a number in a sentence

The word before the colon says which program: `generated` is docs/generated.py, `research` is research/generated.py. A
comment that begins a line would make all of this line HTML, in which Markdown is text: a number has a word before it.
"""

import re
import shlex
from collections.abc import Callable, Iterable
from itertools import zip_longest
from pathlib import Path

PART = re.compile(
    r"(?P<mark><!-- (?P<program>\w+): (?P<call>[^\n]+?) -->)(?P<gap>\n\n)?.*?(?P<end><!-- end -->)", re.DOTALL
)
ROOT = Path(__file__).parents[1]


def filled(page: str, program: str, make: Callable[[str, list[str], str], str]) -> str:
    """The page with one program's parts as they should be.

    make: the text of a part from its name, its arguments and the page's text since the part before it."""
    done, place = [], 0
    for part in PART.finditer(page):
        before = page[place : part.start()]
        place = part.end()
        if part["program"] != program:
            done += [before, part[0]]
            continue
        if not part["gap"] and (not before or before.rstrip(" ").endswith("\n")):
            raise ValueError(f"{part['mark']} begins a line; expected a word before it, or an empty line behind it")
        name, *arguments = shlex.split(part["call"])
        made = make(name, arguments, before).strip("\n")
        done += [before, part["mark"], f"\n\n{made}\n\n" if part["gap"] else made, part["end"]]
    return "".join([*done, page[place:]])


def pages(program: str, folders: Iterable[str]) -> list[Path]:
    """The README, and the pages below some folders, with parts of a program."""
    files = [ROOT / "README.md", *(path for folder in folders for path in sorted((ROOT / folder).rglob("*.md")))]
    return [path for path in files if f"<!-- {program}: " in path.read_text("utf-8")]


def outdated(path: Path, text: str) -> str | None:
    """A sentence on the first line of a page that is not that of a text; None where they are equal."""
    pairs = zip_longest(path.read_text("utf-8").splitlines(), text.splitlines())
    old = next((pair for pair in pairs if pair[0] != pair[1]), None)
    return None if old is None else f"{path.name} has {old[0]!r} where {old[1]!r} is current"
