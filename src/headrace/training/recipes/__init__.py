"""Training recipes as data: a recipe is a short YAML file with the fields that differ from the defaults.

Shipped recipes are in the folder of this module. Besides the fields of Recipe and About, a file can have `base`,
another recipe to start from, and `from_data`, fields whose values are those of the data where there are data.
"""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from ... import zoo
from ...files.checks import Form, misfit
from ...files.processes import MOST
from ...spec.record import PositiveFloat, PositiveInt, Range
from ...spec.serialize import admitted
from ...utils.errors import InputError, did_you_mean, require
from ..optimization import Optimization, Seed

FOLDER = Path(__file__).parent
FROM_DATA = ("length", "vocab_size")  # fields that prepared data state too
# Names of fields of transformers' TrainingArguments and configurations -> the field of Recipe with that meaning.
ELSEWHERE = {
    "learning_rate": "lr", "max_steps": "tokens", "num_train_epochs": "tokens", "max_grad_norm": "clip",
    "per_device_train_batch_size": "micro_batch", "bf16": "precision", "dtype": "precision",
    "gradient_checkpointing": "recompute", "torch_compile": "compile", "num_hidden_layers": "layers",
    "tie_word_embeddings": "tie", "d_model": "hidden_size", "warmup_ratio": "warmup", "warmup_steps": "warmup",
    "warmup_tokens": "warmup",
}  # fmt: skip

ABOUT: Form = {"source?": str, "data?": str, "assumed?": [str], "from_data?": [str]}  # of a file, beside a Recipe's
CHECKPOINT = "checkpoint"  # the mixer of a recipe whose model is that of its weights
# Fields of a config -> the recipe's names of them.
SIZES = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_hidden_layers": "layers", "num_heads": "heads",
    "intermediate_size": "intermediate_size", "tie_word_embeddings": "tie",
}  # fmt: skip


@dataclass(frozen=True)
class Recipe(Optimization):
    """A model and its training. Token counts are over all devices; a step is one update of the weights.

    Raises:
        InputError: a value is out of range, or two fields contradict each other.
    """

    # the model

    mixer: str = "softmax-gla"  # name or expression of the zoo; "checkpoint": the layers and the sizes of `weights`
    hidden_size: PositiveInt = 1024
    layers: PositiveInt = 24
    heads: PositiveInt = 4  # of every mixer that does not set its own
    intermediate_size: PositiveInt | None = None  # MLP width; None: 8/3 of hidden_size, rounded up
    vocab_size: PositiveInt = 32000
    tie: bool = True  # one matrix for the embedding and the output
    weights: str | None = None  # checkpoint of the initial weights; None: random weights
    teacher: str | None = None  # checkpoint whose distribution of the next token the model learns too
    kl: PositiveFloat = 1.0  # weight of the divergence from the teacher, beside 1 of the cross-entropy

    # the data

    length: PositiveInt = 4096  # tokens per row
    tokens: PositiveFloat = 15e9  # training tokens in all
    batch_tokens: PositiveInt = 524288  # tokens per step
    # keep documents in a row separate: no attention, state or label crosses their boundary
    separate_documents: bool = False

    # the optimizer, with the fields of Optimization

    clip_when: Literal["always", "gated"] = "always"  # gated: only for a mixer with a gate, as `Spec.gated` says

    # the run

    precision: Literal["bfloat16", "float32"] = "bfloat16"  # bfloat16: autocast; weights and moments are float32
    micro_batch: PositiveInt = 8  # rows per device and forward pass; gradients are accumulated over a step
    context_parallel: PositiveInt = 1  # processes of torchrun that share the tokens of a row
    shard: PositiveInt = 1  # processes of torchrun that share the weights, the gradients and the optimizer's moments
    recompute: bool = False  # recompute activations in the backward
    # torch.compile of each block; None: on a CUDA GPU, unless processes share rows or weights, or a mixer needs the
    # lengths of sequences on the host
    compile: bool | None = None
    # threads of PyTorch on a CPU; None: the fastest of 1, half and all, measured in the first steps
    threads: Annotated[int, Range(f"1 to {MOST}", lambda n: 1 <= n <= MOST)] | None = None
    seed: Seed = 0
    evaluate_every: PositiveInt = 500  # steps between evaluations
    evaluate_rows: PositiveInt = 256  # held-out rows per evaluation; the final evaluation uses all of them
    save_every: PositiveInt = 500  # steps between checkpoints

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mixer != CHECKPOINT:
            zoo.get(self.mixer).head_dims(self.hidden_size, self.heads)

    def _objections(self) -> Iterator[tuple[bool, str]]:
        yield from super()._objections()
        lacking = self.mixer == CHECKPOINT and self.weights is None
        yield lacking, f"mixer={self.mixer!r} without weights; expected weights=FOLDER, whose layers the model has"
        alone = self.kl != Recipe.kl and self.teacher is None
        yield alone, f"kl={self.kl:g} without a teacher; expected teacher=FOLDER"
        loaded = self.gate_std > 0 and self.weights is not None
        yield loaded, f"gate_std={self.gate_std:g} with weights, which have those of the gates; expected gate_std=0"
        yield (
            self.batch_tokens % self.length > 0,
            f"batch_tokens={self.batch_tokens}; expected a multiple of length={self.length}; set "
            f"batch_tokens={self.even(max(1, round(self.batch_tokens / self.length))) * self.length}",
        )
        uneven = self.length % self.context_parallel > 0
        yield uneven, f"context_parallel={self.context_parallel}; expected a divisor of length={self.length}"
        for name, each in {"shard": self.shard, "context_parallel": self.context_parallel}.items():
            yield bool(self.compile) and each > 1, f"{name}={each} with compile=True; expected one of them"
        few = f"tokens={self.tokens:g}; expected more than half of a step, which is batch_tokens={self.batch_tokens}"
        yield self.steps < 1, few

    @property
    def steps(self) -> int:
        return round(self.tokens / self.batch_tokens)

    @property
    def trained_tokens(self) -> int:
        """`tokens` in whole steps."""
        return self.steps * self.batch_tokens

    @property
    def warmup_steps(self) -> int:
        return round(self.warmup * self.tokens / self.batch_tokens)

    @property
    def rows(self) -> int:
        """Number of rows per step."""
        return self.batch_tokens // self.length

    def even(self, rows: int) -> int:
        """The most of these rows that one process can read in equal passes of a step."""
        return rows - rows % min(rows, self.micro_batch)

    def share(self, processes: int) -> tuple[int, int]:
        """Returns the rows of a forward pass of a process, and the passes of a step. Raises InputError if the processes
        cannot share the rows of a step evenly."""
        groups, left = divmod(processes, self.context_parallel)
        each, rest = divmod(self.rows, max(groups, 1))
        micro = min(self.micro_batch, each)
        if left or rest or each % max(micro, 1):
            shared = f" and context_parallel={self.context_parallel}" if self.context_parallel > 1 else ""
            needed = f"{self.context_parallel} processes" if left else f"{groups * self.micro_batch} rows"
            raise InputError(
                f"a step has {self.rows} rows (batch_tokens / length), which cannot be shared evenly: processes="
                f"{processes} and micro_batch={self.micro_batch}{shared}; expected a multiple of {needed}"
            )
        return micro, each // micro

    @property
    def clips(self) -> float | None:
        """The largest norm of the gradient after `clip` and `clip_when`; None: no clipping."""
        return self.clip if self.clip_when == "always" or self.spec.gated else None

    @property
    def spec(self) -> Any:
        """The spec of the mixer, or the Decoder of all layers. InputError if it is that of a checkpoint that is not
        there."""
        return zoo.get(self.mixer) if self.mixer != CHECKPOINT else _config(self.weights).stack


@dataclass(frozen=True)
class About:
    """The source of a recipe and its data; `assumed` lists the fields that the source does not state."""

    source: str = ""
    data: str = ""
    assumed: tuple[str, ...] = ()


def names() -> list[str]:
    """Names of the shipped recipes that can be trained."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml") if "-" in path.stem)


def load(
    name: str, changes: dict[str, Any] | None = None, manifest: dict[str, Any] | None = None
) -> tuple[Recipe, About]:
    """The recipe with a shipped name or in a YAML file, with new values of some fields.

    Args:
        changes: values, or their texts on the command line: a list has commas between its items.
        manifest: the manifest of prepared data. Fields of FROM_DATA have its values if the recipe does not set them or
            lists them in `from_data`, and `changes` do not set them.

    Raises:
        InputError: the recipe does not exist or is not YAML, or a field is unknown or has an invalid value.
    """
    given = _merged(name)
    about = About(given.pop("source", ""), given.pop("data", ""), tuple(given.pop("assumed", ())))
    free = [*given.pop("from_data", []), *(field for field in FROM_DATA if field not in given)]
    stated = {field: manifest[field] for field in FROM_DATA if manifest and field in free}
    changed = {field: x if field in ("weights", "teacher") else _parsed(x) for field, x in (changes or {}).items()}
    data = given | stated | changed
    if data.get("mixer") == CHECKPOINT and isinstance(data.get("weights"), str):
        config = _config(data["weights"])
        data |= {field: getattr(config, name) for name, field in SIZES.items()} | changed
    known = [field.name for field in fields(Recipe)]
    if unknown := next((str(field) for field in (*data, *about.assumed, *free) if field not in known), None):
        meant = did_you_mean(ELSEWHERE.get(unknown, unknown), known)
        raise InputError(f"recipe {name!r} has no field {unknown!r}{meant}")
    if other := next((field for field in free if field not in FROM_DATA), None):
        raise InputError(f"recipe {name!r} has from_data: {other}; expected some of {', '.join(FROM_DATA)}")
    whole = {field: int(value) for field, value in data.items() if isinstance(value, float) and value.is_integer()}
    return Recipe(**admitted(Recipe, data | whole, "recipe")), about  # 4e6 counts as an integer


def _config(path: Any) -> Any:
    from ...convert.checkpoint import read_config  # which imports transformers

    return read_config(path)


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    items = [zoo.literal(item) for item in zoo.split(value)]
    return items[0] if len(items) == 1 else items


def _merged(name: str, heirs: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a recipe and of its bases."""
    require(name not in heirs, f"recipe {name!r} is its own base")
    data = read_yaml(_path(name))
    if wrong := misfit(data, ABOUT):
        raise InputError(f"recipe {name!r}: {wrong}")
    if (base := data.pop("base", None)) is None:
        return data
    inherited = _merged(str(base), (*heirs, name))
    assumed = [*inherited.get("assumed", []), *data.get("assumed", [])]
    free = [*(field for field in inherited.get("from_data", []) if field not in data), *data.get("from_data", [])]
    return inherited | data | {"assumed": list(dict.fromkeys(assumed)), "from_data": free}


def _path(name: str) -> Path:
    shipped = FOLDER / f"{name}.yaml"
    path = shipped if shipped.is_file() else Path(name)
    if not path.is_file():
        meant = did_you_mean(name, names()) or f"; expected one of {', '.join(names())}"
        raise InputError(f"recipe {name!r} is neither a file nor a shipped recipe{meant}")
    return path


def to_yaml(recipe: Recipe, about: About) -> str:
    """All fields as YAML, so that the recipe of a run does not depend on later defaults."""
    data = asdict(recipe) | asdict(about)
    return yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True)  # a tuple becomes a list


def assignments(settings: list[str]) -> dict[str, str]:
    """Settings of the command line, ["lr=1e-4", …] -> {"lr": "1e-4", …}. InputError for one without "=" or a field that
    is set twice."""
    values: dict[str, str] = {}
    for setting in settings:
        name, equals, value = (part.strip() for part in setting.partition("="))
        require(equals, f"{setting!r} is not of the form FIELD=VALUE")
        if name in values:
            raise InputError(f"{name!r} is set twice, to {values[name]!r} and to {value!r}; expected each field once")
        values[name] = value
    return values


# --- YAML ------------------------------------------------------------------------------------------------------------

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
        text = " ".join(str(error).split())
        wrong = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else f"is not YAML: {text}"
        raise InputError(f"{str(path)!r} {wrong}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise InputError(f"{str(path)!r} is not a YAML mapping; expected lines of the form `field: value`")
    return data
