"""The mixers and models that a plug-in or a program adds, known from then on like those of headrace."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .. import zoo
from ..spec.mixer import ModelSpec, Spec
from ..spec.serialize import TYPES, from_json, to_json
from ..spec.stack import Decoder
from ..utils import plugins
from ..utils.errors import InputError, reading
from ..zoo.mixers import Entry
from .module import module_spec

NAME = re.compile(r"(?!softmax-|recurrent-|all$)[a-z0-9]+([._-][a-z0-9]+)*")


def register_mixer(name: str, mixer: Any, *, paper: str = "", about: str = "") -> None:
    """Adds a mixer to the zoo.

    Args:
        name: its name. For a MixerSpec, softmax-NAME is then known too, in which the heads compete.
        mixer: a MixerSpec or another spec of a mixer, an expression such as "gla(heads.count=2)", or a class of
            `nn.Module` with the protocol of `headrace.extra.module`. A spec may be of a class of your own, whose
            `facts.layer` names the class of its layer.
        paper, about: the address of its paper and a sentence, for tables.

    Raises:
        InputError: for a name that exists already or is not a valid name, and for a value that is not a mixer.
    """
    check_name("mixer", name, zoo.taken)
    if isinstance(mixer, type) and issubclass(mixer, nn.Module):
        with reading(f"mixer {name!r} cannot be registered"):
            spec: Any = module_spec(name, mixer, plugins.of(mixer))
    elif not isinstance(spec := zoo.get(mixer), Spec):
        raise InputError(f"mixer {name!r} is a whole model; expected a mixer, or register_model for it")
    if type(spec) not in TYPES.rows.values():
        TYPES[plugins.PREFIX + name] = type(spec)
    zoo.register(name, Entry(about, paper, spec))
    plugins.note_registration(*_rows(name))


def register_model(name: str, model: Any, *, paper: str = "", about: str = "") -> None:
    """Adds a whole model to the zoo.

    Args:
        name: its name.
        model: a Decoder or another spec of a whole model, or an expression such as "gla+gla+transformer", a decoder
            whose layers alternate.
        paper, about: as in `register_mixer`.

    Raises:
        InputError: for a name that exists already or is not a valid name, for a value that is not a whole model, and
            for a model with a mixer of a class that is not registered.
    """
    check_name("model", name, zoo.taken)
    if not isinstance(spec := zoo.get(model), Decoder | ModelSpec):
        raise InputError(f"model {name!r} is the mixer of one layer; expected a whole model, or register_mixer for it")
    own = {} if type(spec) in TYPES.rows.values() else {plugins.PREFIX + name: type(spec)}
    TYPES.update(own)
    try:
        with reading(f"model {name!r} cannot be registered"):
            from_json(to_json(spec))
    except InputError:
        for key in own:
            del TYPES[key]
        raise
    zoo.register(name, Entry(about, paper, spec))
    plugins.note_registration(*_rows(name))


def _rows(name: str) -> Iterator[tuple[Any, str]]:
    """The places that a mixer or model may have in tables."""
    yield TYPES, plugins.PREFIX + name
    yield from ((table, name) for table in (*zoo.TABLES.values(), zoo.MODELS))


def check_name(kind: str, name: Any, taken: Callable[[str], bool]) -> None:
    """Raises InputError for a name that an expression could not have, and for one that exists."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InputError(
            f"{kind} {name!r} has no name for expressions; expected small letters and digits, in parts joined by -, _ "
            "or ., another beginning than softmax- and recurrent-, and not all"
        )
    if known := next((each for each in (name, f"softmax-{name}") if taken(each)), None):
        raise InputError(f"{kind} {known!r} exists already; expected another name")
