"""The reading order is the order of imports, and what the README shows runs."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import zoo

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "headrace"
# Each part may import those before it.
ORDER = [
    "errors",
    "records",
    "device",
    "processes",
    "integrity",
    "literal",
    "attention_spec",
    "scan_spec",
    "softmax_rnn_spec",
    "matrix_spec",
    "model_spec",
    "spec",
    "stack_spec",
    "zoo",
    "checks",
    "backends",
    "dispatch",
    "recurrence",
    "packing",
    "gates",
    "loss",
    "mixers",
    "moe",
    "model",
    "laws",
    "account",
    "cache",
    "config",
    "hf",
    "auto",
    "quantized",
    "models",
    "retrofit",
    "convert",
    "generate",
    "serving",
    "data",
    "recipes",
    "tasks",
    "train",
    "report",
    "pretraining",
    "lab",
    "bench",
    "evaluate",
    "reproduce",
    "console",
    "inspection",
    "cli_train",
    "cli_eval",
    "cli",
]


def parts_imported(path: Path) -> set[str]:
    """Names of headrace's parts that a file imports, whether at its top or inside a function."""
    package = ["headrace", *path.relative_to(SOURCE).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            names = [alias.name for alias in node.names] if base[-1] == "" else [base[1]]
            found |= {name for name in names if (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file()}
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if part == "__init__":
        return
    later = ORDER[ORDER.index(part) + 1 :]
    assert not parts_imported(path) & set(later)


def test_the_literal_equation_imports_torch_alone_and_backends_only_errors():
    assert "import torch" in (SOURCE / "literal.py").read_text("utf-8")
    assert not parts_imported(SOURCE / "literal.py")
    for path in (SOURCE / "backends").glob("*.py"):
        assert parts_imported(path) <= {"backends", "errors"}


def test_importing_headrace_does_not_import_transformers():
    check = "import sys, headrace; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_no_module_hides_a_function_of_its_name_nor_a_function_a_module():
    check = """
import headrace.backends.native as native, headrace.backends.torch_op, headrace.laws
from headrace import backends
assert headrace.backends.native is native and backends.torch_op
assert headrace.backends() == backends() and headrace.backends()["torch"] is None
headrace.verify(["gla"])
"""
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


README = (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_the_readme_runs(code, monkeypatch):
    monkeypatch.setattr(zoo, "LINEAR", dict(zoo.LINEAR))
    exec(compile(code, "README.md", "exec"), {})


def test_the_readme_names_every_mixer_and_every_part():
    assert set(re.findall(r"^\| `([^`]+)`", README, re.MULTILINE)) == {
        *zoo.LINEAR, *zoo.SCANS, *zoo.MATRICES, *zoo.ATTENTION, *zoo.SOFTMAX_RNNS, *zoo.MODELS,
    }  # fmt: skip
    tree = re.search(r"^src/headrace/\n(.*?)^tests/", README, re.DOTALL | re.MULTILINE)
    assert tree is not None
    listed = set(re.findall(r"[a-z_]+(?=\.py|/)", tree[1]))
    assert set(ORDER) - {"errors", "checks"} == listed
