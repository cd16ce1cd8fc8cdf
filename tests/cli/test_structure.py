"""The reading order is the order of imports, and what the README shows runs."""

import ast
import re
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest

import fresh
from headrace import zoo
from headrace.spec.serialize import TYPES
from headrace.utils.plugins import PREFIX

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "headrace"
# Each part may import those before it.
ORDER = [
    "utils", "spec", "zoo", "ops", "layers", "hf", "files", "extra", "history", "convert", "export", "serving", "data",
    "tasks", "training", "report", "verification", "inspection", "comparison", "benchmarking", "evaluation", "cli",
]  # fmt: skip
CORE = ["utils", "spec", "zoo", "ops", "layers", "hf"]  # which knows nothing of the parts behind it


def parts_imported(path: Path) -> set[str]:
    """Names of headrace's parts that a file imports, whether at its top or inside a function."""
    package = ["headrace", *path.relative_to(SOURCE).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            names = [alias.name for alias in node.names] if base == ["headrace", ""] else [base[1]]
            found |= {name for name in names if (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file()}
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if part.startswith("__"):
        return
    later = ORDER[ORDER.index(part) + 1 :]
    assert not parts_imported(path) & set(later)


def test_the_core_does_not_name_what_stands_on_it():
    """Not even as a text: what it does not import, it could load by its name."""
    others = "|".join(part for part in ORDER if part not in CORE)
    named = [path for path in core() if re.search(rf"\bheadrace\.({others})\b", path.read_text("utf-8"))]
    assert [str(path.relative_to(SOURCE)) for path in named] == []


FOLDERS = sorted({path.parent for path in SOURCE.rglob("__init__.py")} - {SOURCE})


@pytest.mark.parametrize("folder", sorted({path.parent for path in FOLDERS}), ids=lambda p: p.name)
def test_packages_of_a_folder_do_not_import_each_other_in_a_circle(folder):
    needed = {
        package: {
            other
            for path in package.rglob("*.py") for imported in modules_imported(path) for other in imported.parents
            if other.parent == folder and other != package
        }
        for package in FOLDERS if package.parent == folder
    }  # fmt: skip
    assert [package.name for package in circles(needed)] == []


def circles(needed):
    """Those that cannot be imported after what they need."""
    left = dict(needed)
    while free := [one for one, others in left.items() if not others & left.keys()]:
        for one in free:
            del left[one]
    return left


def core():
    return (path for part in CORE for path in (SOURCE / part).rglob("*.py"))


def lines(paths):
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def test_the_core_does_not_grow():
    """A mixer enters as a plug-in. Whoever makes the core smaller lowers the bound."""
    assert lines(core()) <= 13_728


def test_the_rooms_around_the_core_do_not_grow():
    """Without plug-ins and formats of checkpoints, which may."""
    apart = {*CORE, "extra", "history", "convert"}
    assert lines(p for p in SOURCE.rglob("*.py") if p.relative_to(SOURCE).parts[0] not in apart) <= 20_332


def test_parts_are_in_import_order():
    entries = {
        path.name.removesuffix(".py") for path in SOURCE.iterdir() if not path.name.startswith(("_", "lib", "."))
    }
    assert entries - {"py.typed"} == set(ORDER)
    assert len(ORDER) <= 22


def test_the_reference_imports_torch_alone():
    lines = (SOURCE / "ops" / "reference.py").read_text("utf-8").splitlines()
    assert [line for line in lines if line.startswith(("import", "from"))] == ["import torch"]


def test_importing_headrace_does_not_import_transformers():
    fresh.output("import sys, headrace; sys.exit('transformers' in sys.modules)")


def test_public_names_are_documented():
    check = """
import headrace
from headrace import HeadraceConfig, InputError, Mixer, backends, linear_attention, load, quantize, step, verify, zoo
from headrace.hf import HeadraceForCausalLM
from headrace.spec import MixerSpec
assert backends()["torch"]["linear_attention"] is None and callable(verify)
assert set(headrace.__all__) <= set(dir(headrace)) and all(hasattr(headrace, name) for name in headrace.__all__)
"""
    fresh.output(check, before=None)


PAGES = ("README.md", "docs/index.md", "docs/mixers.md")
README, INDEX, MIXERS = ((ROOT / path).read_text("utf-8") for path in PAGES)


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README + INDEX, re.DOTALL))
def test_first_examples_run(code):
    with patch.dict(zoo.LINEAR):  # to which an example adds a mixer
        exec(compile(code, "README.md", "exec"), {})


def test_readme_is_read_in_one_sitting():
    assert len(README.splitlines()) <= 150


def test_every_mixer_is_listed():
    assert set(re.findall(r"^\| `([^`]+)`", MIXERS, re.MULTILINE)) == {
        *(name for table in zoo.TABLES.values() for name in table), *zoo.PUBLISHED, *zoo.MODELS,
    }  # fmt: skip


def test_every_mixer_has_its_equation():
    table = MIXERS.partition("## Equations")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    assert sorted(named) == sorted((*(name for table in zoo.TABLES.values() for name in table), *zoo.PUBLISHED))


def test_reference_has_the_fields_of_every_spec():
    page = (ROOT / "docs" / "reference.md").read_text("utf-8")
    listed = re.findall(r"^```\{generated\} fields (.*)$", page, re.MULTILINE)
    own = {f"{spec.__module__}.{spec.__name__}" for name, spec in TYPES.items() if not name.startswith(PREFIX)}
    assert own <= {*" ".join(listed).split()}


REPOSITORY = "https://github.com/headrace/headrace/blob/main/"


def test_links_to_files_of_the_repository_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("research/**/*.md")]:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8")):
            address = target.removeprefix(REPOSITORY)  # of the other book; the site's build follows those of its own
            path, _, heading = address.partition("#")
            if address != target:
                assert not heading or heading in headings(ROOT / path), f"{page.name}: {target}"
            elif "://" not in target:
                assert (page.parent / path).exists(), f"{page.name}: {target}"


def headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    lines = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("name", ["quick", "commands"])
def test_listed_tests_exist(name, collected):
    listed = (ROOT / "tests" / f"{name}.txt").read_text("utf-8").split("\n")
    known = collected | {each.partition("[")[0] for each in collected} | {each.partition("::")[0] for each in collected}
    assert {each for each in listed if each} - known == set()


def test_contributing_lists_every_part():
    tree = re.search(
        r"^src/headrace/\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    assert tree is not None
    assert re.findall(r"^  ([a-z]+)(?=\.py|/)", tree[1], re.MULTILINE) == ORDER


def test_no_modules_import_each_other_in_a_circle():
    """Whether at their top or inside a function."""
    left = circles({path: modules_imported(path) for path in SOURCE.rglob("*.py")})
    assert [str(path.relative_to(SOURCE)) for path in left] == []


@cache
def modules_imported(path: Path) -> set[Path]:
    """The files of headrace that a file imports. A package's __init__ counts where it is named, or a name of it."""
    package, files = [SOURCE, *path.relative_to(SOURCE).parent.parts], set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = Path(*package[: len(package) - node.level + 1], *(node.module or "").split("."))
            for alias in node.names:
                options = base / f"{alias.name}.py", base / alias.name / "__init__.py", base.with_suffix(".py")
                files.add(next((option for option in options if option.is_file()), base / "__init__.py"))
    return files - {path}
