"""What a release states about itself."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import headrace

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_version_is_the_same_everywhere():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))["version"] == headrace.__version__
    assert f"version = {{{headrace.__version__}}}" in (ROOT / "docs" / "index.md").read_text("utf-8")
    newest = re.search(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest and newest[1] == headrace.__version__


def test_pypi_readme_has_absolute_links():
    """The substitutions of pyproject.toml, applied as hatch-fancy-pypi-readme applies them."""
    settings = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = (ROOT / "README.md").read_text("utf-8")
    for substitution in settings["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    links = re.findall(r"\]\((.*?)\)", text)
    assert links and [link for link in links if not link.startswith("https://")] == []
    assert text.count("raw.githubusercontent.com") == text.count("![") > 0


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_existing_targets(path):
    workflow = yaml.safe_load(path.read_text("utf-8"))
    commands = [step["run"] for job in workflow["jobs"].values() for step in job.get("steps", ()) if "run" in step]
    for folder, target in re.findall(r"^make (?:-C (\w+) )?([\w-]+)", "\n".join(commands), re.MULTILINE):
        makefile = (ROOT / folder / "Makefile").read_text("utf-8")
        assert re.search(rf"^{target}( .*)?:", makefile, re.MULTILINE), target
    for job in workflow["jobs"].values():
        needed = job.get("needs", [])
        assert {*([needed] if isinstance(needed, str) else needed)} <= set(workflow["jobs"])


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_sanitize_works_in_a_folder_with_a_space(tmp_path):
    """Of the targets the one that names an absolute path."""
    (folder := tmp_path / "my clone").mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "python").write_text('#!/bin/sh\nprintf "%s\\n" "library=$HEADRACE_LIBRARY" "$@"\n')
    (folder / "python").chmod(0o755)
    words = ["make", "-o", ".venv/.dev", "BIN=.", "SANITIZERS=", "sanitize"]
    done = subprocess.run(words, cwd=folder, capture_output=True, encoding="utf-8", timeout=600, check=True)
    target = f"{folder}/build/sanitized"
    assert {target, f"library={target}/headrace/libheadrace.so"} <= {*done.stdout.splitlines()}


def test_windows_is_installed_without_cmake():
    """Which fails where neither Visual Studio nor Ninja is, before it could say that there is no compiler."""
    without, required = PROJECT["tool"]["scikit-build"]["overrides"]
    assert re.search(without["if"]["any"]["platform-system"], "win32") and not without["wheel"]["cmake"]
    assert not any(re.search(without["if"]["any"]["platform-system"], system) for system in ("linux", "darwin"))
    assert required["if"]["env"] == {"HEADRACE_NATIVE": "^required$"} and required["wheel"]["cmake"]
