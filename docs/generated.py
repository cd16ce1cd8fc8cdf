"""What the manual takes from the code: the Markdown that a function NAME of this module returns.

A page that is also read on GitHub, and the README, keep it in parts (parts.py), where `python docs/generated.py` writes
it and docs/tests/test_site.py compares it. The reference, which Sphinx takes from docstrings, has the directive
`{generated} NAME ARGUMENT ...`. As a Sphinx extension, this module also turns docstrings into reStructuredText.
"""

import dataclasses
import inspect
import re
import shlex
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from textwrap import dedent
from typing import Any

import parts
import torch
import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from typer.cli import get_docs_for_click

from headrace import HeadraceConfig, HeadraceForCausalLM, InputError, zoo
from headrace.cli.app import GROUPS, app
from headrace.comparison.defaults import DEFAULTS
from headrace.convert import FORMATS
from headrace.convert.describe import DESCRIPTIONS
from headrace.export.onnx import check_exportable
from headrace.extra.growing import GrowingSpec
from headrace.extra.late_norm import LateNormSpec
from headrace.extra.log_linear import LogLinearSpec
from headrace.extra.specs.latent import LatentSpec
from headrace.extra.specs.scan import ScanSpec
from headrace.ops.dispatch import BACKENDS
from headrace.report import catalog
from headrace.spec import AttentionSpec
from headrace.spec.linear import MixerSpec
from headrace.spec.record import Kind
from headrace.spec.record import fields as accepted
from headrace.tasks import TASKS
from headrace.tasks.check import text as text_of
from headrace.training import recipes as shipped

DOCS = Path(__file__).parent
CODE = re.compile(r"^```(python|sh)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    cells = [["" if cell is None else str(cell).replace("|", r"\|") for cell in row] for row in rows]
    head = list(head)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells)) + "\n"


def merged(rows: Iterable[Iterable[Any]]) -> list[list[str]]:
    """Rows that differ in their first cell alone, as one row with these cells joined."""
    firsts: dict[tuple[str, ...], list[str]] = {}
    for first, *rest in rows:
        firsts.setdefault(tuple(rest), []).append(first)
    return [[", ".join(cells), *rest] for rest, cells in firsts.items()]


def mixers(*names: str) -> str:
    """One row for each of some mixers: its update, decay, state, and what computes it."""
    rows = []
    for name in names:
        row, spec = catalog.describe(name), zoo.get(name)
        rule = spec.write.rule if isinstance(spec, MixerSpec) else _rule(row)
        decay = "none" if row["retention"] == "all" else row["retention"]
        rows.append((f"[`{name}`]({row['paper']})", rule, decay, row["state"], ", ".join(computed_by(name))))
    decay, state = "decay (α: computed from the token)", "state (heads × keys × values + inputs of a convolution)"
    return table(("mixer", "rule", decay, state, "backends"), rows)


def plain() -> list[str]:
    """The names of all mixers without head competition."""
    return [name for name in zoo.names() if zoo.plain(zoo.get(name)) == zoo.get(name)]


def _rule(row: dict[str, Any]) -> str:
    return "append" if row["A_t"] == "append" else "delta" if row["overwrites"] else "add"


def computed_by(name: str) -> list[str]:
    """The backends that a mixer's recurrence or attention has; PyTorch's operations compute every one."""
    spec = zoo.get(name)
    chosen = [backend for backend in BACKENDS if backend != "onnx"] if isinstance(spec, MixerSpec) else ["torch"]
    if isinstance(spec, ScanSpec) and spec.kind == "mamba":  # extra/native_scan.py
        chosen = ["native", "torch"]
    with torch.device("meta"):
        model = HeadraceForCausalLM(HeadraceConfig(mixer=name, vocab_size=8, hidden_size=64, num_hidden_layers=1))
    try:
        check_exportable(model)
    except InputError:
        return chosen
    return [*chosen, "onnx"]


def costs() -> str:
    """The state of each mixer, the operations of a token, and whether ONNX has a node for it."""
    columns = "numbers", "decoding"
    rows = []
    for name in plain():
        row = catalog.describe(name)
        cells = (catalog.cell(row[column]) for column in columns)
        rows.append((f"`{name}`", row["state"], *cells, catalog.cell("onnx" in computed_by(name))))
    return table(("mixer", "state", *columns, "onnx"), merged(rows)) + f"\n{catalog.COUNTED}\n"


def commands() -> str:
    """All commands with their options, as Typer writes them."""
    group: Any = typer.main.get_command(app)
    top, text = typer.Context(group, info_name="headrace"), []
    for name, command in ((name, command) for names in GROUPS.values() for name, command in names.items()):
        one = group.commands[name]
        one.epilog = None
        examples = "\n".join(f"headrace {name} {example}".strip() for example in command.examples)
        page = get_docs_for_click(obj=one, ctx=top, indent=2, name=name, call_prefix="headrace")
        page = re.sub(r"(`[^`]*`)|(--[a-z-]+)|<", lambda x: x[1] or (f"`{x[2]}`" if x[2] else "&lt;"), page)
        text.append(f"{page}\n```sh\n{examples}\n```\n")
    return "\n".join(text)


def fields(*paths: str) -> str:
    """A section per dataclass: its docstring, and the type, default and comment of each field."""
    classes = (getattr(import_module(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in paths)
    return "\n".join(f"### {cls.__name__}\n\n{_about(cls)}\n\n{field_table(cls)}" for cls in classes)


def field_table(cls: type, elsewhere: tuple[str, Any] | None = None) -> str:
    """elsewhere: the head of one more column, and an object of the class that has its values."""
    comments = {name: comment for part in reversed(cls.__mro__[:-1]) for name, comment in _comments(part).items()}
    types = {name: ", ".join(map(_type, kinds)) for name, kinds in accepted(cls).items()}
    head = "field", "value", "default", *([] if elsewhere is None else [elsewhere[0]]), "meaning"
    rows = []
    for f in dataclasses.fields(cls):
        others = [] if elsewhere is None else [f"`{getattr(elsewhere[1], f.name)!r}`"]
        rows.append((f"`{f.name}`", types[f.name], _default(f), *others, comments.get(f.name)))
    return table(head, rows)


def _about(cls: type) -> str:
    return inspect.cleandoc(cls.__doc__ or "").partition("\n\nRaises:")[0]


def _type(kind: Kind) -> str:
    if kind.among:
        return ", ".join(f"`{value!r}`" for value in kind.among)
    name = f"tuple of {', '.join(map(_type, kind.items))}" if kind.items else f"`{kind.type.__name__}`"
    return f"{name} {kind.range.text}" if kind.range else name.replace("NoneType", "None")


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    made = field.default_factory
    return "required" if made is dataclasses.MISSING else f"`{getattr(made, '__name__', made)}()`"


def _comments(cls: type) -> dict[str, str]:
    """The comments of a dataclass's fields: before a field, on its line, or inside its brackets."""
    try:
        source = inspect.getsource(cls)
    except OSError:
        return {}
    commented = re.findall(r"((?:^    # .*\n)*)^    (\w+): ((?:.*(?:\n     .*|\n    \).*)*))", source, re.MULTILINE)
    return {name: " ".join(re.findall(r"# (?!type:|fmt:|noqa)(.*)", above + rest)) for above, name, rest in commented}


# fields without a default that makes a model
UNSET = {
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16}, "hgrn2": {"use_lower_bound": False},
    "linear_attn": {"feature_map": "elu"}, "deepseek_v2": {"num_experts_per_tok": 6}, "glm4_moe": {"head_dim": 128},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
}  # fmt: skip


def released() -> str:
    """The layers that the default config of each format has in headrace."""
    rows = []
    for kind, form in FORMATS.items():
        described = {"model_type": kind} | UNSET.get(kind, {})
        if form.defaults is None:
            described = CONFIG_MAPPING[kind](**UNSET.get(kind, {})).to_dict()
        model, _ = form.model(form.of_text(described))
        layers = ", ".join(dict.fromkeys(map(_layer, HeadraceConfig(**model.arguments).stack.layers)))
        rows.append((f"`{kind}`", layers))
    open_ = ", ".join(f"`{kind}`" for kind in FORMATS if kind in DESCRIPTIONS)
    return (
        table(("model_type", "layers by default"), merged(rows))
        + f"\n`--to` writes a converted model back in its format, and any model that fits in one of: {open_}.\n"
    )


def _layer(layer: Any) -> str:
    """The mixers of a layer in words, and whether it has experts."""
    mixers = " beside ".join(map(_mixer, layer.mixers))
    return f"{mixers}{' with experts' * (layer.mlp == 'experts')}{' with a shared block' * layer.shared}"


def _mixer(spec: Any) -> str:
    if isinstance(spec, MixerSpec):
        return f"linear ({spec.decay.kind}, {spec.write.rule}{', levels' * isinstance(spec, LogLinearSpec)})"
    if isinstance(spec, LatentSpec):
        return "latent"
    if not isinstance(spec, AttentionSpec):
        return f"{getattr(spec, 'kind', '')} {type(spec).__name__.removesuffix('Spec').lower()}".strip()
    parts = {
        "gate": spec.gate != "none", "norms of q and k": spec.qk_norm != "none", "window": bool(spec.pattern),
        "partial rotation": spec.rotary and spec.rope.dims is not None, "sinks": spec.null == "learned",
        "forget gate": spec.forget, "bounded logits": hasattr(spec, "cap"),
        "late norms of q and k": isinstance(spec, LateNormSpec), "growing logits": isinstance(spec, GrowingSpec),
    }  # fmt: skip
    shown = ", ".join(part for part, present in parts.items() if present)
    return f"softmax{shown and f' ({shown})'}"


def tasks() -> str:
    """A section per task: its description with an example row, and its fields with both of their defaults."""
    text = []
    for name, task in TASKS.items():
        about = re.sub(r"(^    .*\n)+", lambda rows: f"```text\n{dedent(rows[0])}```\n", text_of(task), flags=re.M)
        text.append(f"### {name}\n\n{about}\n\n{field_table(task, ('in `compare`', DEFAULTS[name].task))}")
    return "\n".join(text)


def recipes() -> str:
    rows = []
    for name in shipped.names():
        one, about = shipped.load(name)
        sizes = one.hidden_size, one.layers, one.heads, one.length, f"{one.tokens / 1e6:,.0f} M"
        rows.append((f"`{name}`", *sizes, f"{one.lr:g}", about.source))
    return table(("recipe", "width", "layers", "heads", "length", "tokens", "lr", "source"), rows)


def speed(brief: str = "") -> str:
    """The fastest peer of each measurement; brief: of those of the README."""
    return import_module("tables").speed(brief)


def beside_vllm() -> str:
    return import_module("tables").beside_vllm()


def choice() -> str:
    """One row per mixer of the leaderboard: its costs, what small models of it solve, and its speed in training."""
    board, steps = import_module("leaderboard"), import_module("gpu_tables").models()
    kept = board.published(board.rows.read(board.KEPT))
    trained = {row["model"]: row for row in steps if "ms" in row}
    columns = {name: board.medians(kept, name, times) for name, times in CHOICE.items()}
    rows = []
    for mixer in columns["mqar"]:
        row, step = catalog.describe(mixer), trained.get(f"headrace:{mixer}")
        solved = (_reached(name, columns[name].get(mixer)) for name in CHOICE)
        speed = "" if step is None else f"{step['tokens_per_second']:,.0f}"
        rows.append((f"`{mixer}`", catalog.cell(row["numbers"]), catalog.cell(row["decoding"]), *solved, speed))
    head = (f"{name}, {times}×" if times > 1 else name for name, times in CHOICE.items())
    return table(("mixer", "numbers in a layer's state", "FLOPs a token", *head, "tokens/s in training"), rows)


CHOICE = {"mqar": 4, "selective-copy": 4, "parity": 4, "text": 1}  # tasks, and the multiple of the training length


def _reached(name: str, score: float | None) -> str:
    if score is None:
        return ""
    return f"{score:.2f}" if name == "text" else f"{100 * score:.0f} %"


def output(text: str, space: dict[str, Any]) -> str:
    """What the Python and the commands of a text print or are refused with. space: the names of the Python so far."""
    with redirect_stdout(StringIO()) as said:
        for language, code in CODE.findall(text):
            for call in [code] if language == "python" else code.splitlines():
                try:
                    if language == "python":
                        exec(call, space)
                    else:
                        app(shlex.split(call)[1:], prog_name="headrace", standalone_mode=False)
                except InputError as error:
                    print(f"{'InputError' if language == 'python' else 'headrace'}: {error}")
    return f"```text\n{said.getvalue()}```\n"


def filled(page: str) -> str:
    """The text of a page with its parts as they should be."""
    space: dict[str, Any] = {}
    return parts.filled(
        page,
        "generated",
        lambda name, arguments, before: output(before, space) if name == "output" else globals()[name](*arguments),
    )


def pages() -> list[Path]:
    """The README and the pages with parts of this program."""
    return parts.pages("generated", ["docs"])


class Generated(SphinxDirective):
    required_arguments, optional_arguments, final_argument_whitespace = 1, 1, True

    def run(self) -> list[nodes.Node]:
        name, *arguments = " ".join(self.arguments).split()
        return self.parse_text_to_nodes(globals()[name](*arguments), allow_section_headings=True)


def docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Makes indented equations literal blocks, and text in single backticks code; `_`, `*` and `|` are no markup. What
    follows `::` is a literal block already."""
    text = re.sub(r"([_*|\\])", r"\\\1", "\n".join(lines))
    text = re.sub(r"`[^`\n]+`", lambda code: f"`{code[0]}`".replace("\\", ""), text)
    blocks = re.split(r"\n\n", text)
    for i, block in enumerate(blocks):
        if block.startswith("    ") and blocks[i - 1].endswith("::"):
            blocks[i] = block.replace("\\", "")
        elif block.startswith("    ") and not blocks[i - 1].strip().endswith("Args:"):
            blocks[i] = ".. code-block:: text\n\n" + block.replace("\\", "")
    lines[:] = "\n\n".join(blocks).split("\n")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("generated", Generated)
    app.connect("autodoc-process-docstring", docstring, priority=100)  # before napoleon, which has 500
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    sys.path[:0] = [str(DOCS.parent), str(DOCS.parent / "benchmarks")]
    for path in pages():
        path.write_text(filled(path.read_text("utf-8")), "utf-8")
