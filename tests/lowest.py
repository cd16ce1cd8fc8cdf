"""Prints the lowest version that pyproject.toml accepts of every package of some extras, as constraints for pip:

python tests/lowest.py studies train > lowest.txt
pip install --constraint lowest.txt -e ".[studies,train]"
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,]+)\])?(?:>=([\w.]+))?")


def lowest(requirements: list[str]) -> Iterator[tuple[str, str | None]]:
    """(package, lowest version) of every requirement; None: it declares none."""
    for name, extras, version in (REQUIREMENT.match(each).groups() for each in requirements):  # type: ignore[union-attr]
        if name == PROJECT["name"]:
            for extra in extras.split(","):
                yield from lowest(PROJECT["optional-dependencies"][extra])
        else:
            yield name, version


if __name__ == "__main__":
    everything = PROJECT["dependencies"] + [f"{PROJECT['name']}[{','.join(sys.argv[1:])}]"]
    print("\n".join(sorted({f"{name}=={version}" for name, version in lowest(everything)})))
