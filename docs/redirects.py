"""A Sphinx extension: the address of a page that moved leads to its new place."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

LAB_BOOK = "https://github.com/headrace/headrace/blob/main/docs/log.md"
# {old page: new page and section}. Addresses are those of the site, without ".html" for the old ones.
MOVED = {
    "all": "guide.html",
    "books": "appendix.html#eleven-books-on-two-cores",
    "changes": "project.html#versions",
    "cheatsheet": "mixers.html",
    "citing": "project.html#citing",
    "competition": "appendix.html#studies-of-gates-over-heads",
    "contributing": "project.html#contributing",
    "data": "training.html#prepare-text",
    "defaults": "appendix.html#defaults-of-compare",
    "efficiency": "appendix.html#cost-of-competition",
    "evaluation": "appendix.html#evaluations-of-small-models",
    "export": "serving.html#onnx",
    "gallery": "theory.html",
    "gguf": "serving.html#llama-cpp",
    "integrations": "coming-from.html#tested-with",
    "launch": "training.html#launch-a-run",
    "log": LAB_BOOK,
    "parallel": "training.html#several-processes",
    "recipes": "appendix.html#parameters-of-every-recipe",
    "reference/cli": "guide.html#commands",
    "reference/layers": "reference.html#layers",
    "reference/models": "reference.html#models",
    "reference/op": "reference.html#op",
    "reference/recipes": "settings.html#recipes",
    "reference/specs": "reference.html#specs",
    "reference/tasks": "settings.html#tasks",
    "reproduction": "appendix.html#reproductions-at-laptop-scale",
    "results": "benchmarks.html#measurements",
    "taylor": "appendix.html#softmax-attention-as-recurrent-networks",
    "vllm": "serving.html#vllm",
    "zoo": "mixers.html",
}
# A link to a section of the old page keeps its section, where scripts run.
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Moved</title>
<script>location.replace("{page}" + (location.hash || "{section}"));</script>
<meta http-equiv="refresh" content="0; url={page}{section}">
<link rel="canonical" href="{page}{section}">
</head>
<body><p>This page has moved to <a href="{page}{section}">{page}{section}</a>.</p></body>
</html>
"""


def address(old: str) -> str:
    """Returns the address of a moved page's new place, as seen from the old one."""
    new = MOVED[old]
    return new if "://" in new else "../" * old.count("/") + new


def write(app: "Sphinx", error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        for old in MOVED:
            page, mark, section = address(old).partition("#")
            path = Path(app.outdir, f"{old}.html")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(PAGE.format(page=page, section=mark + section), "utf-8")


def setup(app: "Sphinx") -> dict[str, Any]:
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
