"""Sphinx configuration of the documentation site: `make docs`."""

import json
import os
import re
import sys
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree

import torch
from jupyter_cache import get_cache
from sphinx.application import Sphinx
from sphinx.config import Config

import headrace

ROOT = Path(__file__).parent.parent
# the package research; the extensions of this folder; the tables of benchmarks
sys.path[:0] = [str(ROOT), str(Path(__file__).parent), str(ROOT / "benchmarks")]

SOURCES = ".py", ".so", ".yaml", ".cpp", ".h", ".csv"


def kept_outputs(*folders: str) -> str:
    """The folder for the outputs of pages: another one once PyTorch, or code or rows in some folders, have changed."""
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.*"))]
    text = b"".join(path.read_bytes() for path in files if path.suffix in SOURCES)
    return str(ROOT / "build" / "notebooks" / sha256(text + torch.__version__.encode()).hexdigest()[:16])


project = "headrace"
copyright = "2026, the headrace authors"
version = release = headrace.__version__
extensions = [
    "myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx_design", "sphinx_copybutton",
    "generated",
]  # fmt: skip
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types of signatures; every reference in a text is checked

html_theme = "furo"
html_title = "headrace"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "search.js")
html_copy_source = False
html_show_sourcelink = False
pygments_style, pygments_dark_style = "friendly", "github-dark"
copybutton_prompt_text = "$ "

myst_enable_extensions = ["attrs_block", "colon_fence", "dollarmath"]
myst_heading_anchors = 3  # anchors of headings as on GitHub
suppress_warnings = ["mystnb.unknown_mime_type"]

# A page of code runs on one CPU thread in a folder of its own, and an error in a cell fails the build. The outputs are
# kept for as long as neither the page nor the library changes.
nb_execution_mode = "cache"
nb_execution_cache_path = kept_outputs("src", "native")
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])  # for the pages of code
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the command headrace
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80

mathjax_path = (
    "mathjax/tex-chtml.js"  # from a pip package, copied by `copy_mathjax`: no page loads anything from outside
)


def copy_mathjax(app: Sphinx, error: Exception | None) -> None:
    """Copies MathJax's script and its fonts into the site."""
    package = find_spec("sphinx-mathjax-offline")
    if error is None and package is not None and package.origin is not None:
        source, to = Path(package.origin).parent / "static" / "mathjax", Path(app.outdir, "_static", "mathjax")
        for part in (mathjax_path.removeprefix("mathjax/"), "output/chtml/fonts/woff-v2"):
            (to / part).parent.mkdir(parents=True, exist_ok=True)
            if (source / part).is_dir():
                copytree(source / part, to / part, dirs_exist_ok=True)
            else:
                (to / part).write_bytes((source / part).read_bytes())


def write_pages(app: Sphinx, error: Exception | None) -> None:
    """Writes the texts of all pages as a script, from which the search takes its excerpts in a site that is opened from
    a folder: browsers do not let a page of a folder read the others."""
    if error is None:
        texts = {}
        for name in sorted(app.env.found_docs):
            page = Path(app.outdir, f"{name}.html").read_text("utf-8")
            (main,) = re.findall(r"<article\b.*</article>", page, re.DOTALL)
            texts[f"{name}.html"] = re.sub(r"<(svg|script|style)\b.*?</\1>", "", main, flags=re.DOTALL)
        Path(app.outdir, "_static", "pages.js").write_text(f"const PAGES = {json.dumps(texts)};\n", "utf-8")


def create_cache(app: Sphinx, config: Config) -> None:
    """Processes that read pages at the same time would each create its database."""
    _ = get_cache(config.nb_execution_cache_path).db


def setup(app: Sphinx) -> None:
    if sys.platform == "linux":  # elsewhere a process with many libraries may not be forked
        app.parallel = max(app.parallel, 4)  # each page of code, and each of its commands, imports PyTorch anew
    app.connect("config-inited", create_cache)
    app.connect("build-finished", copy_mathjax)
    app.connect("build-finished", write_pages)
