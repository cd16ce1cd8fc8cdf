"""The named mixers and models. Each is a spec; an entry added to a table makes the name available to the models, the
command line, the tests and the documentation.

Every linear mixer `X` also has a version `softmax-X`, in which its heads compete (`compete`). The models of
arXiv 2602.01744 as published are `PUBLISHED`.
"""

import difflib
from collections import ChainMap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..spec.attention import AttentionSpec
from ..spec.expression import expression, literal, split
from ..spec.linear import Competition, MixerSpec
from ..spec.mixer import ModelSpec, Spec
from ..spec.serialize import change_all, from_json, to_json
from ..spec.stack import BlockStyle, Decoder, Layer, as_layers
from ..utils import plugins
from ..utils.errors import InputError, require, require_each
from ..utils.tables import Table
from . import mixers
from .mixers import Entry

RECURRENT = "recurrent-"  # before the name of a mixer that has another form: the linear mixer that equals it

# The specs by name: of each kind, and of the kinds that are not listed here. A spec put into a table at run time is a
# mixer like any other, without a paper.
LINEAR: Table[MixerSpec] = Table("linear")
SCANS: Table[Spec] = Table("scans")
MATRICES: Table[Spec] = Table("matrices")
ATTENTION: Table[AttentionSpec] = Table("attention")
OTHERS: Table[Spec] = Table("others")
TABLES: dict[str, Table[Any]] = {table.name: table for table in (LINEAR, SCANS, MATRICES, ATTENTION, OTHERS)}
MODELS: Table[ModelSpec | Decoder] = Table("models")
PUBLISHED: dict[str, MixerSpec] = {name: entry.spec for name, entry in mixers.PUBLISHED.items()}
PAPERS = {name: entry.paper for name, entry in mixers.PUBLISHED.items()}
SENTENCES = {name: entry.about for name, entry in mixers.PUBLISHED.items()}  # what each mixer is
SIGMOID = Competition(activation="sigmoid")  # as far and as steep as a softmax, without its competition
COMPETITIONS = {"paper": mixers.PAPER, "sigmoid": SIGMOID, "default": Competition(), "none": None}


def compete(spec: MixerSpec, competition: Competition | None = None) -> MixerSpec:
    """Returns the Softmax version of a linear mixer, whose heads compete for writes and reads (arXiv 2602.01744).
    A competition of None has the defaults of `Competition`."""
    require_each(lambda x: hasattr(x, "competition"), "the spec of a linear mixer, such as get('gla')", spec=spec)
    return replace(spec, competition=competition or Competition())


def plain(spec):
    """Returns the spec with the competition removed from all its mixers: the spec that X and softmax-X share."""
    return each_mixer(spec, lambda mixer: replace(mixer, competition=None))


def each_mixer(spec, change: Callable[[MixerSpec], MixerSpec]):
    """Returns the spec with `change` applied to every linear mixer, including those in hybrids and whole models."""
    if isinstance(spec, Decoder):
        return replace(spec, layers=tuple(each_mixer(layer, change) for layer in spec.layers))
    if isinstance(spec, Layer):
        return replace(spec, mixer=each_mixer(spec.mixer, change), parallel=each_mixer(spec.parallel, change))
    if isinstance(spec, ModelSpec) and hasattr(spec, "mixer"):
        return replace(spec, mixer=each_mixer(spec.mixer, change))  # type: ignore[call-arg]
    return change(spec) if isinstance(spec, MixerSpec) else spec


def names() -> list[str]:
    """Returns the names of all mixers, with and without competition. Whole models are in `MODELS`."""
    others = (name for table in TABLES.values() if table is not LINEAR for name in table)
    return [*LINEAR, *(f"softmax-{name}" for name in LINEAR), *PUBLISHED, *others]


def get(mixer):
    """Returns the spec of a mixer or model given as a name, an expression, a dict (`to_json`) or a spec.

    An expression sets fields of a named spec: `softmax-gla(competition.source=hidden, heads.count=8)`.
    `competition=paper` selects the equations of arXiv 2602.01744 as published, `competition=none` removes the gates,
    and `competition=sigmoid` gives each head a gate of its own, a sigmoid with the range and slope of the softmax;
    `softmax-gla(competition.activation=sigmoid)` is the same mixer as `gla(competition=sigmoid)`.
    `bert(mixer=softmax-gla)` replaces the mixer of a whole model. `a+b` is a decoder whose layers alternate a and b.
    `recurrent-softmax-rnn-norm(numerator=relu, order=2)` is the linear mixer that computes what the softmax RNN of this
    expression does (the method `recurrent` of its spec).

    Raises:
        InputError: for an unknown name or field, for a value that a field does not accept, and for a softmax RNN
            without a recurrent form.
    """
    if isinstance(mixer, dict):
        return from_json(mixer)
    if isinstance(mixer, Spec | Layer | Decoder | ModelSpec):
        return mixer
    require_each(lambda x: isinstance(x, str), "a name of the zoo, a spec or its JSON", mixer=mixer)
    if len(parts := split(mixer, "+")) > 1:
        specs = [get(part) for part in parts]
        styled = any(isinstance(spec, Decoder) and spec.style != BlockStyle() for spec in specs)
        require(not styled, f"mixer {mixer!r} names a model whose blocks have a style of their own; expected mixers")
        return Decoder(tuple(layer for spec in specs for layer in as_layers(spec)))
    name, settings = expression(mixer, "mixer")
    changes: dict[str, object] = {}
    for path, text in settings.items():
        changes[path] = literal(text)
        if path == "competition" and text in COMPETITIONS:
            changes[path] = to_json(COMPETITIONS[text])
        if path == "mixer":  # the mixer of a whole model
            changes[path] = to_json(get(text))
    if not name.startswith(RECURRENT):
        return change_all(_named(name), changes)
    spec = known().get(name.removeprefix(RECURRENT))
    if not hasattr(spec, "recurrent"):
        able = [known for known, spec in known().items() if hasattr(spec, "recurrent")]
        raise InputError(f"mixer {name!r} is unknown; expected {RECURRENT} before one of {', '.join(able)}")
    return change_all(spec, changes).recurrent()


def name_of(spec: Spec) -> str:
    """Returns the name of a spec, or else the name of its class."""
    return next((name for name in names() if get(name) == spec), type(spec).__name__)


def several(text: str) -> tuple[str, ...]:
    """Returns the items of a comma-separated list; "all" stands for the names of all mixers.

    Raises InputError for an empty list, and for an item that is there twice."""
    listed = tuple(names()) if text.strip() == "all" else split(text)
    require(len(listed) > 0, f"--mixers={text!r} names none; expected at least one")
    require(len(set(listed)) == len(listed), f"--mixers={text!r} names one twice; expected each mixer once")
    return listed


def mixer(name):
    """Returns the spec of a mixer or decoder, like `get`. Raises InputError for an encoder-decoder or BERT."""
    if isinstance(spec := get(name), ModelSpec):
        whole = f"mixer {name!r} is a whole model, not a layer's mixer"
        raise InputError(f"{whole}; expected a mixer, or {spec.builder} for it")
    return spec


def known() -> ChainMap[str, Any]:
    """Returns name -> spec of the mixers and models of all tables, without the softmax-X of linear mixers X."""
    return ChainMap(*TABLES.values(), PUBLISHED, MODELS)


def taken(name: str) -> bool:
    """Whether a row has the name, or a module offers one that is not imported yet."""
    return name in PUBLISHED or not all(table.lacks(name) for table in (*TABLES.values(), MODELS))


def register(name: str, entry: Entry) -> None:
    """Adds a mixer or model to the tables. InputError for a name that is there."""
    spec = entry.spec
    table = TABLES[spec.table] if isinstance(spec, Spec) else MODELS
    require(not taken(name), f"{name!r} is a mixer or model already; expected another name")
    table[name] = spec
    PAPERS[name], SENTENCES[name] = entry.paper, entry.about


def _named(name: str):
    base, specs = name.removeprefix("softmax-"), known()
    if name not in specs and base not in LINEAR:
        plugins.load()
    if name in specs:
        return specs[name]
    if base in LINEAR:
        return compete(LINEAR[base])
    if base not in PUBLISHED and isinstance(spec := specs.get(base), Spec):
        expected = f"{base!r}, or softmax- before one of {', '.join(LINEAR)}"
        raise InputError(f"mixer {name!r} does not exist, because {base} {spec.uncompeting}; expected {expected}")
    near = difflib.get_close_matches(name, [*names(), *MODELS], 3, cutoff=0)
    raise InputError(f"mixer {name!r} is unknown; the nearest names are {', '.join(near)} (--plugin adds others)")


for _name, _entry in mixers.MIXERS.items():
    register(_name, _entry)
for _table in (*TABLES.values(), MODELS):
    _table.own = tuple(_table.rows)  # listed before those of plug-ins
