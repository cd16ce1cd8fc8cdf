"""YAML files of settings: recipes, experiments and plans of studies."""

import re
from pathlib import Path
from typing import Any

import yaml

from ..utils.errors import InputError

# YAML 1.2 reads these as numbers; PyYAML follows YAML 1.1, where an exponent needs a dot before it and a sign.
NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+\Z")
DATE, MERGE, FLOAT = (f"tag:yaml.org,2002:{kind}" for kind in ("timestamp", "merge", "float"))


class Loader(yaml.SafeLoader):
    """Reads 1e-3 as a number and a date as a string, and refuses a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        own = [key for key, _ in node.value if key.tag != MERGE]
        mapping = super().construct_mapping(node, deep)
        seen: set[Any] = set()
        for key in own:
            if (name := self.construct_object(key, deep=True)) in seen:
                raise yaml.constructor.ConstructorError(problem=f"duplicate key {name}", problem_mark=key.start_mark)
            seen.add(name)
        return mapping


class Dumper(yaml.SafeDumper):
    """Quotes a string that Loader would read as a number."""


for kind in (Loader, Dumper):
    kind.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in patterns if tag != DATE]
        for first, patterns in kind.yaml_implicit_resolvers.items()
    }
    kind.add_implicit_resolver(FLOAT, NUMBER, list("-+.0123456789"))


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file, {} for an empty one.

    Raises InputError for a file that is not a YAML mapping, or gives a key twice."""
    try:
        with path.open("rb") as file:
            data = yaml.load(file, Loader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise InputError(f"{str(path)!r} is not YAML: {error.problem}{line}") from None
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        raise InputError(f"{str(path)!r} is not YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise InputError(f"{str(path)!r} is not a YAML mapping; expected lines of the form `field: value`")
    return data


def to_yaml(data: dict[str, Any]) -> str:
    """Returns a mapping as YAML that `read_yaml` reads back; a tuple becomes a list."""
    return yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True)
