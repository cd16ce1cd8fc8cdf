"""Training recipes as data: a recipe is a short YAML file with the fields that differ from the defaults.

Shipped recipes are in the folder of this module; the field `base` of a recipe names another one to start from.
"""

import dataclasses
import difflib
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from ... import zoo
from ...spec.linear import MixerSpec
from ...utils.errors import InputError

FOLDER = Path(__file__).parent
POSITIVE = {
    "hidden_size", "layers", "heads", "intermediate_size", "vocab_size", "tokens", "batch_tokens", "length", "lr",
    "micro_batch", "evaluate_every", "evaluate_rows", "save_every", "eps",
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """A model and its training. Token counts are over all devices; a step is one update of the weights.

    Raises:
        InputError: a value is out of range, or two fields contradict each other.
    """

    # the model
    mixer: str = "softmax-gla"
    hidden_size: int = 1024
    layers: int = 24
    heads: int = 4
    intermediate_size: int | None = None  # MLP width; None: 8/3 of hidden_size, rounded up
    vocab_size: int = 32000
    tie: bool = True  # one matrix for the embedding and the output
    weights: str | None = None  # checkpoint of the initial weights; None: random weights
    # the data
    length: int = 4096
    tokens: float = 15e9
    batch_tokens: int = 524288  # tokens per step
    apart: bool = False  # keep documents in a row separate: no attention, state or label crosses their boundary
    # the optimiser: AdamW
    lr: float = 1e-3
    min_lr: float = 0.1  # final learning rate as a fraction of lr
    schedule: Literal["cosine", "linear"] = "cosine"
    warmup_tokens: float = 0.0
    weight_decay: float = 0.1  # not applied to norms, biases and gates
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float | None = 1.0  # largest norm of the gradient; None: no clipping
    clip_when: Literal["always", "gated"] = "always"  # gated: only for mixers with an output gate or head competition
    gate_lr: float = 1.0  # learning rate of the competition's weights as a multiple of lr
    gate_std: float = 0.0  # standard deviation of the competition's initial weights
    gate_init: Literal["normal", "orthogonal"] = "normal"
    # the run
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    micro_batch: int = 8  # rows per device and forward pass; gradients are accumulated over a step
    recompute: bool = False  # recompute activations in the backward
    compile: bool = False
    seed: int = 0
    evaluate_every: int = 500  # steps
    evaluate_rows: int = 256  # held-out rows per evaluation; the final evaluation uses all of them
    save_every: int = 500

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise InputError(f"{field.name}={value}; expected a finite number")
            if field.name in POSITIVE and not (value is None or value > 0):
                raise InputError(f"{field.name}={value}; expected more than 0")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed={self.seed}; expected 0 to {2**32 - 1}")
        if self.warmup_tokens < 0:
            raise InputError(f"warmup_tokens={self.warmup_tokens}; expected at least 0")
        if self.batch_tokens % self.length:
            raise InputError(f"batch_tokens={self.batch_tokens}; expected a multiple of length={self.length}")
        if self.schedule == "linear" and self.min_lr:
            raise InputError(f"min_lr={self.min_lr} with schedule='linear', which ends at 0; expected min_lr=0")
        if self.warmup_tokens >= self.tokens:
            raise InputError(
                f"warmup_tokens={self.warmup_tokens:g}; expected fewer than tokens={self.tokens:g}; add "
                f"warmup_tokens={self.tokens / 20:g}, a twentieth of them"
            )
        if round(self.tokens / self.batch_tokens) < 1:
            raise InputError(
                f"tokens={self.tokens:g}; expected at least half of a step, which is batch_tokens={self.batch_tokens}"
            )
        zoo.get(self.mixer).head_dims(self.hidden_size, self.heads)

    @property
    def steps(self) -> int:
        return round(self.tokens / self.batch_tokens)

    @property
    def warmup_steps(self) -> int:
        return round(self.warmup_tokens / self.batch_tokens)

    @property
    def rows(self) -> int:
        """Number of rows per step."""
        return self.batch_tokens // self.length

    @property
    def clips(self) -> float | None:
        """The largest norm of the gradient after `clip` and `clip_when`; None: no clipping."""
        spec = zoo.get(self.mixer)
        gated = isinstance(spec, MixerSpec) and (spec.competition is not None or spec.read.gate != "none")
        return self.clip if gated or self.clip_when == "always" else None


@dataclass(frozen=True)
class About:
    """The source of a recipe and its data; `assumed` lists the fields that the source does not state."""

    source: str = ""
    data: str = ""
    assumed: tuple[str, ...] = ()


def names() -> list[str]:
    """Names of the shipped recipes that can be trained."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml") if "-" in path.stem)


def load(name: str, changes: dict[str, Any] | None = None) -> tuple[Recipe, About]:
    """The recipe with a shipped name or in a YAML file, with new values of some fields.

    Raises:
        InputError: the recipe does not exist or is not YAML, or a field is unknown or has an invalid value.
    """
    data = _merged(name) | (changes or {})
    about = About(data.pop("source", ""), data.pop("data", ""), tuple(data.pop("assumed", ())))
    hints = get_type_hints(Recipe)
    unknown = next((str(field) for field in (*data, *about.assumed) if field not in hints), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, hints, 1)
        raise InputError(f"recipe {name!r} has no field {unknown!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return Recipe(**{field: _value(field, value, hints[field]) for field, value in data.items()}), about


def _merged(name: str, heirs: tuple[str, ...] = ()) -> dict[str, Any]:
    if name in heirs:
        raise InputError(f"recipe {name!r} is its own base")
    data = _read(name)
    base = data.pop("base", None)
    if base is None:
        return data
    inherited = _merged(str(base), (*heirs, name))
    assumed = [*inherited.get("assumed", []), *data.get("assumed", [])]
    return inherited | data | {"assumed": list(dict.fromkeys(assumed))}


def _read(name: str) -> dict[str, Any]:
    shipped = FOLDER / f"{name}.yaml"
    path = shipped if shipped.is_file() else Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(name, names(), 1) or names()
        raise InputError(f"recipe {name!r} is neither a file nor a shipped recipe; the nearest are {', '.join(near)}")
    try:
        data = read_yaml(path)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"recipe {str(path)!r} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise InputError(f"recipe {str(path)!r} is not a YAML mapping; expected lines of the form `field: value`")
    return data


class _EachFieldOnce(yaml.SafeLoader):
    """A YAML loader that refuses a repeated field, of which SafeLoader would take the last."""

    def construct_mapping(self, node, deep=False):
        names = [name.value for name, _ in node.value]
        if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
            raise yaml.YAMLError(f"field {twice!r} is given twice")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """The content of a YAML file. yaml.YAMLError for invalid YAML or a repeated field."""
    return yaml.load(path.read_text(encoding="utf-8"), _EachFieldOnce)


def _value(name: str, value: Any, hint: Any) -> Any:
    """Converts a value to the type of its field: YAML reads 1e-3 as a string, and command-line values are strings."""
    options = get_args(hint) or (hint,)
    if get_origin(hint) is Literal and value in options:
        return value
    if get_origin(hint) is tuple:
        parts = value.split(",") if isinstance(value, str) else value
        if isinstance(parts, list | tuple) and len(parts) == len(options):
            return tuple(_value(name, part, option) for part, option in zip(parts, options, strict=True))
        raise InputError(f"{name}={value!r}; expected {len(options)} numbers")
    if type(None) in options and value in (None, "none"):
        return None
    for option in options:
        if (found := _converted(value, option)) is not None:
            return found
    words = {float: "a finite number"}
    wanted = " or ".join(
        repr(o) if isinstance(o, str) else words.get(o, getattr(o, "__name__", str(o))) for o in options
    )
    raise InputError(f"{name}={value!r}; expected {wanted}")


def _converted(value: Any, kind: Any) -> Any:
    if kind is bool:
        return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).lower())
    if isinstance(value, bool) or kind not in (int, float, str):
        return None
    try:
        number = float(value) if kind is not str else None
    except (TypeError, ValueError):
        return None
    if number is not None and not math.isfinite(number):
        return None
    if kind is int:
        return int(number) if number is not None and number.is_integer() else None
    return str(value) if kind is str else number


def changes(settings: list[str]) -> dict[str, str]:
    """["lr=1e-4", …] -> {"lr": "1e-4", …}"""
    found: dict[str, str] = {}
    for setting in settings:
        name, equals, value = (part.strip() for part in setting.partition("="))
        if not equals:
            raise InputError(f"{setting!r} is not of the form FIELD=VALUE")
        if name in found:
            raise InputError(f"{name!r} is set twice, to {found[name]!r} and to {value!r}; expected each field once")
        found[name] = value
    return found


def to_yaml(recipe: Recipe, about: About) -> str:
    """All fields as YAML, so that the recipe of a run does not depend on later defaults."""
    data = {f.name: getattr(recipe, f.name) for f in fields(recipe)} | dataclasses.asdict(about)
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in data.items()}
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
