"""What a verification says: a table, JSON, and a program without headrace for each law that breaks."""

import inspect
import pprint
import re
from collections.abc import Iterable
from typing import Any

import torch

from ...files.environment import command, environment
from .. import errors as shared
from . import adapters, laws
from .check import LAWS, Verdict
from .targets import Target

HEAD = """\
# {target}: {law}
{about}
# Prints the relative error and ends with exit code 1 if the law is broken.
import copy
import inspect
import io
import re
import sys
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

"""
HEADER = ("law", "verdict", "error", "tolerance", "smallest", "note")  # of `table`
HELPERS = (laws.in_dtype, laws.prepared, laws.inputs, laws.padding, laws.read, laws.derivatives, laws.tensors_of)


def snippet(target: Target, verdict: Verdict, seed: int, device: str, dtype: torch.dtype) -> str:
    """Returns a Python program that shows a broken law at its smallest case, without headrace."""
    check, case = LAWS[verdict.law].check, verdict.case
    assert case is not None
    about = "\n".join(f"# {line.strip()}" for line in inspect.cleandoc(check.__doc__ or "").splitlines())
    parts = [shared.relative, *(helper for helper in HELPERS if _used(helper, check)), check]
    if target.file is None:
        values = ", ".join(pprint.pformat(value, width=100, sort_dicts=False) for value in target.arguments)
        functions: list[Any] = [] if target.function is adapters.fla_layer else [*adapters.HELPERS, adapters.causal_lm]
        functions += [target.function] * (target.function not in functions)
        parts, made = [*functions, *parts], f"def adapter():\n    return {target.function.__name__}({values})"
    else:
        function = target.name.rpartition(":")[2]
        made = f"from runpy import run_path\n\nadapter = run_path({target.file!r})[{function!r}]"
    source = "\n\n".join(inspect.getsource(part) for part in parts)
    return (
        HEAD.format(target=target.name, law=verdict.law, about=about)
        + f"{source}\n\n{made}\n\n\n"
        + f"subject = prepared(adapter, {seed}, {device!r}, {dtype})\n"
        + "with torch.no_grad():\n"
        + f"    error = {check.__name__}(subject, inputs(subject, B={case.B}, T={case.T}, seed={seed}), at={case.at})\n"
        + f'print("relative error", error, "where at most {verdict.tolerance:.0e} is expected")\n'
        + f"sys.exit(not (error[0] if isinstance(error, tuple) else error) <= {verdict.tolerance!r})\n"
    )


def _used(helper: Any, check: Any) -> bool:
    """Whether a program of this law needs a function: every one needs the first three."""
    named = re.search(rf"\b{helper.__name__}\b", inspect.getsource(check))
    return helper in HELPERS[:3] or named is not None


def table(verdicts: Iterable[Verdict]) -> list[tuple[str, ...]]:
    """Returns rows under HEADER; "smallest" is the smallest broken case."""
    return [
        (
            v.law,
            v.verdict,
            "" if v.error is None else f"{v.error:.0e}",
            "" if v.tolerance is None else f"{v.tolerance:.0e}",
            "" if v.case is None else "B={} T={} at={}".format(*v.case),
            v.note,
        )
        for v in verdicts
    ]


def as_json(target: Target, verdicts: Iterable[Verdict], seed: int, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the record of a verification: verdicts, with a program for each broken law, versions and the machine."""
    rows = []
    for v in verdicts:
        row = {**v._asdict(), "case": None if v.case is None else v.case._asdict()}
        if v.error == float("inf"):
            row["error"] = "inf"  # which JSON has not
        if v.verdict == "breaks":
            row["snippet"] = snippet(target, v, seed, device, dtype)
        rows.append(row)
    named = {"target": target.name, "command": command(), "seed": seed, "device": device}
    return named | {"dtype": str(dtype).removeprefix("torch."), "laws": rows, "environment": environment(device)}
