"""The fields of a foreign config.json, and which of them a conversion has read."""

import inspect
import re
import sys
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import transformers
from transformers import GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..files.checks import misfit
from ..hf.config import TRANSFORMERS
from ..ops.checks import require
from ..spec.record import LARGEST
from ..utils.errors import InputError, reading
from ..utils.integrity import short

Config = dict[str, Any]
IDS = {"bos_token_id", "eos_token_id", "pad_token_id"}  # which HeadraceConfig checks
# Fields that do not affect the logits in any format: fields of transformers, of generation and of initialization.
COMMON = TRANSFORMERS | GenerationConfig().to_dict().keys() | {"initializer_range", "use_cache", "attention_dropout"}
COMMON -= {*IDS, "quantization_config"}
# How the names of sizes end, none of which exceeds the number of elements of the largest tensor.
SIZES = ("_size", "_dim", "_heads", "_head", "_rank", "_groups", "_width", "_embd", "expand")
COUNTS = ("_layers", "_layer", "_experts")  # how the names of numbers of layers and experts end
COUNTED = 2**16  # the most of them, as each takes memory before a tensor is read
# Files of transformers that read fields of every model, whether its class has them or not.
GENERIC = ("masking_utils.py", "cache_utils.py", "quantizers/auto.py")
# Names of the fields of specs, as sentences have them -> fields that set them.
MEANT = {
    "rope.": "rope_parameters", "pattern=": "sliding_window", "kv_heads=": "num_key_value_heads",
    "num_heads=": "num_attention_heads", "experts.balance=": "router_aux_loss_coef",
}  # fmt: skip
# A field that code reads, and its value where it is absent: config.NAME, getattr(config, "NAME", VALUE) or
# kwargs.pop("NAME", VALUE).
READ = re.compile(r"""(?:config(?:\.|, ["'])|kwargs\.\w+\(["'])(\w+)(?:["'], (\w+))?""")


class Fields:
    """The fields of a config.json by name, with the defaults of its library. A field counts as known once it has been
    read; of the others, `refuse_unknown` raises for those that may change what the model computes.

    Args:
        described: the content of config.json.
        defaults: the fields' defaults; None: those of transformers' class for the model_type, which also knows the
            names that earlier versions gave to fields.

    Raises:
        InputError: a value of another type or size, or one that transformers refuses.
    """

    def __init__(self, described: Config, defaults: Config | None = None, types: Config | None = None):
        if defaults is None:
            values = _as_transformers_reads(described)
        else:
            described = _with_numbers(described)
            _check_types(described, defaults, types or {})
            values = defaults | described
        self._values: Config = values
        self._described, self._defaults = described, defaults
        self.names = {name for name in values if name not in COMMON}
        self.read: set[str] = set()  # fields whose values the converted model has
        self.fixed: set[str] = set()  # fields of which some values are refused
        self.ignored: set[str] = set()  # fields that do not affect the logits of this model
        self.meant = {**MEANT}  # and those of the model's experts
        self.passed: Config = {}  # fields of config.json that transformers does not read, or at their defaults

    def __getitem__(self, name: str) -> Any:
        """Returns the value of a field, which the converted model has."""
        self.read.add(name)
        return self._values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value of a field, or `default` where config.json and its class lack the field."""
        self.read |= {name} & self._values.keys()
        return self._values.get(name, default)

    def count(self, name: str, least: int = 0) -> int:
        """Returns the value of a field. InputError unless it is an integer of at least `least`."""
        value = self[name]
        if type(value) is not int or value < least:
            self.refuse(name, f"{'' if type(value) is int else 'an integer of '}at least {least}")
        return value

    def of_class(self, *names: str) -> Any:
        """Returns the value of the one of these fields that the class has, whatever config.json has beside, or None."""
        known = _names_of_class(self._described["model_type"]) if self._defaults is None else self._defaults
        return next((self[name] for name in names if name in known and name in self._values), None)

    def mentions(self, name: str, function: Callable[..., Any] | None) -> bool:
        """Whether transformers' code of the family, or of the function, has the name of an entry of a field."""
        code = _code(self._described["model_type"]) + ("" if function is None else inspect.getsource(function))
        return f'"{name}"' in code

    def only(self, name: str, *convertible: Any) -> None:
        """Raises InputError unless the field has one of these values, or is absent."""
        self.fixed.add(name)
        value = self._values.get(name, convertible[0])
        if value not in convertible:
            self.refuse(name, " or ".join(repr(each) for each in convertible))

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raises InputError, which names the field, its value and the values that can be converted."""
        value = _brief(self._values.get(name))
        raise InputError(f"config.json has {name}={value}; expected {expected}: nothing else can be converted")

    def explained(self, reason: InputError) -> InputError:
        """Returns an error of a spec with the fields that it means."""
        text = str(reason)
        if text.startswith("config.json"):
            return reason
        fields = [name for ours, name in self.meant.items() if ours in text.lower() and name in self.read]
        listed = ", ".join(f"{name}={_brief(self._values[name])}" for name in fields)
        return InputError(f"config.json {f'has {listed}: ' if listed else 'describes a model whose '}{text}")

    def ignore(self, *names: str) -> None:
        """Marks fields that do not affect the logits."""
        self.ignored |= {*names}

    def refuse_unknown(self) -> None:
        """Raises InputError for a field that has been neither read nor ignored and may change what the model
        computes."""
        for name in sorted(self.names - self.read - self.fixed - self.ignored):
            if not self._changes_nothing(name):
                raise InputError(
                    f"config.json has {name}={_brief(self._values[name])}, which may change what the model computes; "
                    f"expected only fields known to the conversion; --ignore {name} converts as if it were absent"
                )
            if name in self._described:
                self.passed[name] = self._described[name]

    def note(self) -> str:
        """Returns a line that names the fields in `passed`."""
        named = ", ".join(f"{name}={_brief(value)}" for name, value in self.passed.items())
        reason = f"which change nothing that transformers {transformers.__version__} computes"
        return f"passed by in config.json, {reason}: {named}"

    def _changes_nothing(self, name: str) -> bool:
        """Whether transformers computes the same without the field: it has the default of its class, or neither the
        class nor other code of transformers reads it."""
        if self._defaults is not None:
            return False
        kind, value = self._described["model_type"], self._values[name]
        if name in _names_of_class(kind):
            return value == getattr(CONFIG_MAPPING[kind], name, None)
        return str(value) in _read_anyway(kind).get(name, {str(value)})


@cache
def _names_of_class(kind: str) -> set[str]:
    own = CONFIG_MAPPING[kind]
    return {*dir(own), *own.__dataclass_fields__, *own.attribute_map, *own.attribute_map.values()}


@cache
def _code(kind: str) -> str:
    """What transformers executes of a family, and of all models."""
    family = Path(inspect.getfile(CONFIG_MAPPING[kind])).parent
    files = (*family.glob("*.py"), *(family.parents[1] / name for name in GENERIC))
    return "\n".join(file.read_text("utf-8") for file in files)


@cache
def _read_anyway(kind: str) -> dict[str, set[str]]:
    """The fields that this code reads by name -> the values, as text, that it takes where they are absent."""
    found = dict[str, set[str]]()
    for name, absent in READ.findall(_code(kind)):
        found.setdefault(name, set()).add(absent or "None")
    return found


def without(described: Config, names: Collection[str]) -> Config:
    """Returns a config.json without some of its fields. InputError for a field that it does not have."""
    for name in names:
        if name not in described or name == "model_type":
            raise InputError(f"--ignore {name!r}; expected a field of config.json other than model_type")
    return {name: value for name, value in described.items() if name not in names}


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:119]}…"


def _as_transformers_reads(described: Config) -> Config:
    kind = described["model_type"]
    version = transformers.__version__
    require(kind in CONFIG_MAPPING, f"transformers {version} has no model_type={kind!r}; expected a newer version")
    with reading("config.json is refused by transformers"):
        config: Any = CONFIG_MAPPING[kind].from_dict(_with_numbers(described))
        if getattr(config, "rope_parameters", None):
            config.standardize_rope_params()  # as the model does
        values: Config = config.to_dict()
    if "partial_rotary_factor" in (values.get("rope_parameters") or {}):
        values.pop("partial_rotary_factor", None)  # earlier versions also keep the copy that their code no longer reads
    return values


def _with_numbers(value: Any) -> Any:
    """Returns a JSON value with numbers in place of {"__float__": "Infinity"}, which transformers writes for them."""
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"}:
        return float(value["__float__"])
    return {name: _with_numbers(item) for name, item in value.items()}


def _check_types(described: Config, defaults: Config, types: Config) -> None:
    for name in sorted(described.keys() & defaults.keys() - IDS):
        value, default = described[name], defaults[name]
        wrong = None if value == default else misfit(value, types.get(name, type(default)), name)
        require(wrong is None, f"config.json has a value of another type: {wrong}")


def check_sizes(described: Config, largest: int) -> None:
    """Raises InputError for a number that no model has, and for a size that is negative or larger than the largest
    tensor has elements, before a class or a model of that size is made."""
    for name in sorted(described.keys() - COMMON - IDS):
        value = described[name]
        if type(value) in (int, float):
            is_float = type(value) is float or name == "rope_theta"  # of Falcon-H1, 1e11, which JavaScript writes out
            other = sys.float_info.max if is_float else LARGEST
            is_size = name.endswith(SIZES) and not name.endswith("window_size")  # a window may exceed any tensor
            most = COUNTED if name.endswith(COUNTS) else largest if is_size else other
            require(abs(value) <= most, f"config.json has {name}={short(value)}; expected at most {most}")
            if type(value) is int and name.endswith((*COUNTS, *SIZES)) and not name.startswith("mtp_"):
                least = int(name.endswith(("_heads", "_head", "hidden_size", "hidden_layers", "n_layer")))
                require(value >= least, f"config.json has {name}={value}; expected at least {least}")
