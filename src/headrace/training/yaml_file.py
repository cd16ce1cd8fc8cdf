"""YAML files of settings: recipes, experiments and plans of studies."""

import math
import re
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from ..utils.errors import InputError

LARGEST = 10_000  # nodes of a file with every alias written out
# YAML 1.2 reads these as numbers; PyYAML follows YAML 1.1, where an exponent needs a dot before it and a sign.
NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+\Z")
DATE, MERGE, FLOAT = (f"tag:yaml.org,2002:{kind}" for kind in ("timestamp", "merge", "float"))


class Loader(yaml.SafeLoader):
    """Reads 1e-3 as a number and a date as a string, and refuses a key that is given twice."""

    def construct_document(self, node: yaml.Node) -> Any:
        if _expanded_nodes(node, {}) > LARGEST:
            raise yaml.constructor.ConstructorError(problem=f"aliases repeat more than {LARGEST:,} values")
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        own = [key for key, _ in node.value if key.tag != MERGE]
        mapping = super().construct_mapping(node, deep)
        seen: set[Any] = set()
        for key in own:
            if (name := self.construct_object(key, deep=True)) in seen:
                raise yaml.constructor.ConstructorError(problem=f"duplicate key {name}", problem_mark=key.start_mark)
            seen.add(name)
        return mapping

    def construct_scalar(self, node: yaml.Node) -> Any:
        if field := re.search(r"\$\{.*?\}", str(node.value)):
            raise InputError(
                f"{self.name!r}, line {node.start_mark.line + 1}: {field[0]} no longer stands for the value of another "
                "field; write the value itself"
            )
        return super().construct_scalar(node)


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

    Raises InputError for a file that is not a YAML mapping, gives a key twice, or has ${FIELD}."""
    try:
        with path.open("rb") as file:
            data = yaml.load(file, Loader)
    except InputError:
        raise
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


def _expanded_nodes(node: yaml.Node, counts: dict[yaml.Node, float]) -> float:
    """Returns the number of nodes with every alias written out; infinity for an alias of a value that contains it."""
    if node not in counts:
        counts[node] = math.inf
        parts = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        inner = () if isinstance(node, yaml.ScalarNode) else parts
        counts[node] = 1 + sum(_expanded_nodes(part, counts) for part in inner)
    return counts[node]
