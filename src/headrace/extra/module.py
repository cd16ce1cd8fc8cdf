"""Mixers whose layer is an `nn.Module` of a user, with the arguments of its constructor as fields of the spec.

The module's protocol: `__init__(hidden_size, ...)`, which may also take `num_heads`, `layer_idx`, `num_layers`,
`norm_eps` and `rope_theta`, and settings with defaults; and `forward(x, state=None) -> (y, state)`:

- x and y [N, T, hidden_size], with T ≥ 1 tokens of N sequences;
- state: a tensor, or a NamedTuple of tensors, each [N, ...] of one size whatever T; or always None;
- x in two calls, the second with the state of the first, gives the y of one call; zeros are the state before the first
  token; and a sequence does not depend on the others.

Padding and packing are removed before the module is called, unless its `forward` takes `cu_seqlens`, the bounds of
packed sequences [N + 1]. Initial weights are those that the constructor makes.
"""

import inspect
import typing
import warnings
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from types import NoneType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..layers.base import Mixer, check_state
from ..ops.checks import require
from ..ops.sequences import Sequences
from ..spec.mixer import Facts, Shapes, Spec
from ..spec.record import Kind, alternatives, require_positive
from ..spec.serialize import TYPES, from_json, to_json
from ..utils.errors import InputError, PluginWarning, reading
from ..utils.plugins import PREFIX, Plugin

ORIGIN = {"plugin": "name", "sha256": "sha256"}  # fields of a spec, from those of Plugin
GIVEN = {"layer_idx": 0, "num_layers": 1, "norm_eps": 1e-6, "rope_theta": 10000.0}
PLAIN = (bool, int, float, str, NoneType)  # types of settings, and tuples of these
TOLERANCE = 1e-4  # relative, in float32, for modules whose sums may have another order in another call


class ModuleState(NamedTuple):
    """The state of a module that returns a tensor."""

    state: Tensor  # [N, ...]


@dataclass(frozen=True)
class ModuleSpec(Spec):
    """Base of the specs of modules: `module_spec` makes a class for each module, with its settings as further fields.

    plugin, sha256: the file that defines the module, and its digest when the spec was made. Specs that differ in these
        alone are equal."""

    plugin: str = field(default="", compare=False)
    sha256: str = field(default="", compare=False)

    label: ClassVar[str]  # name of the mixer
    module: ClassVar[type[nn.Module]]
    facts = Facts("headrace.extra.module.ModuleMixer")
    uncompeting = "is a module, whose heads headrace does not know"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sha256 != (now := type(self).sha256):
            stored, current = Plugin(self.plugin, self.sha256), Plugin(type(self).plugin, now)
            warnings.warn(f"mixer {self.label!r} is of {stored}, and now runs {current}", PluginWarning, stacklevel=2)

    def __reduce__(self) -> Any:
        return from_json, (to_json(self),)  # another process makes the class anew

    def __deepcopy__(self, memo: Any) -> "ModuleSpec":
        return self  # also if its name is now of another class

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of the constructor besides sizes and depth."""
        names = [f.name for f in fields(self) if f.name not in ORIGIN]
        return {name: getattr(self, name) for name in names}

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        """Returns (1, hidden_size). Raises InputError for a module that breaks the protocol at these sizes."""
        require_positive(hidden_size=hidden_size, num_heads=num_heads)
        examined(self, hidden_size, num_heads)
        return 1, hidden_size

    def state_shapes(self, hidden_size: int, num_heads: int, tokens: int = 1) -> Shapes:
        """Returns the shapes of the state of one sequence, without the batch dimension."""
        return dict(examined(self, hidden_size, num_heads)[1])


def module_spec(name: str, module: type[nn.Module], plugin: Plugin) -> ModuleSpec:
    """Returns the spec of a module with its default settings, and makes its type known to JSON. Raises InputError for a
    constructor or a `forward` with other arguments than those of the protocol."""
    hints = typing.get_type_hints(module.__init__, include_extras=True)
    parameters = list(inspect.signature(module).parameters.values())
    forward = list(inspect.signature(module.forward).parameters)
    if "hidden_size" not in (p.name for p in parameters) or len(forward) < 3:
        raise InputError(
            f"{module.__name__} has __init__{inspect.signature(module)} and "
            f"forward({', '.join(forward[1:])}); expected __init__(hidden_size, ...) and forward(x, state=None)"
        )
    settings: list[Any] = [(f, str, field(default=getattr(plugin, p), compare=False)) for f, p in ORIGIN.items()]
    for p in parameters:
        if p.name in ("hidden_size", "num_heads", *GIVEN) or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            continue
        hint = hints.get(p.name, type(p.default))
        reserved = {"type", *ModuleSpec.__annotations__}  # "type" is the key in JSON
        taken = hasattr(ModuleSpec, p.name) or p.name in reserved
        if p.default is p.empty or not all(map(_is_plain, alternatives(hint))) or taken:
            raise InputError(
                f"the argument {str(p)!r} of {module.__name__} cannot be a setting; expected a "
                "default, a type of bool, int, float, str, Literal or a tuple of these, and a name that no spec has"
            )
        settings.append((p.name, hint, field(default=p.default)))
    space = {"label": name, "module": module, "__doc__": inspect.getdoc(module) or name}
    kind: Any = make_dataclass("ModuleSpec", settings, bases=(ModuleSpec,), namespace=space, frozen=True)
    spec = kind()
    TYPES[PREFIX + name] = kind
    return spec


def _is_plain(kind: Kind) -> bool:
    return bool(kind.items and all(map(_is_plain, kind.items))) if kind.type is tuple else kind.type in PLAIN


def create(spec: ModuleSpec, **sizes: Any) -> nn.Module:
    """Returns a new module. Raises InputError for an error of its constructor."""
    accepted = inspect.signature(spec.module).parameters
    arguments = {name: value for name, value in sizes.items() if name in accepted} | spec.settings
    listed = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    with reading(f"mixer {spec.label!r} cannot be built: {spec.module.__name__}({listed}) fails"):
        return spec.module(**arguments)


def called(module: nn.Module, x: Tensor, state: Any, **where: Any) -> tuple[Tensor, Any]:
    """Calls a module with the state of a mixer, a NamedTuple or None, and returns the next one."""
    y, after = module(x, state.state if isinstance(state, ModuleState) else state, **where)
    return y, ModuleState(after) if isinstance(after, Tensor) else after


def takes_packs(spec: ModuleSpec) -> bool:
    return "cu_seqlens" in inspect.signature(spec.module.forward).parameters


class ModuleMixer(Mixer):
    """A mixer that calls a user's module."""

    def __init__(self, spec: ModuleSpec, *, hidden_size: int, num_heads: int = 4, **depth: Any):
        super().__init__()
        self.spec, self.arguments = spec, {"hidden_size": hidden_size, "num_heads": num_heads, **depth}
        self.state_kind, self.state_shapes = examined(spec, hidden_size, num_heads)
        self.module = create(spec, **self.arguments)
        # Without a tensor of its own, transformers takes this module for initialized when it loads a checkpoint, and
        # buffers of `module` that a checkpoint does not have would have no values.
        self.register_buffer("own", torch.empty(0), persistent=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Copies parameters and buffers of a new module, but for those that transformers has loaded."""
        tensors = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        with torch.device("meta" if any(x.is_meta for x in tensors.values()) else "cpu"):
            new = create(self.spec, **self.arguments)
        for name, x in (dict(new.named_parameters()) | dict(new.named_buffers())).items():
            if not getattr(tensors[name], "_is_hf_initialized", False):
                tensors[name].copy_(x)

    def checked(self, x: Tensor, state: Any, sequences: Sequences) -> Any:
        """Checks a state, whose names say nothing, and whose precision is the one in which the module returned it."""
        if state is not None:
            require(self.state_kind is not None, "state is given to a module that has none; expected state=None")
            check_state(state, self.state_kind, self.state_shapes, x, sequences.count, integers=())
        return state

    def run(self, x: Tensor, state: Any, sequences: Sequences) -> tuple[Tensor, Any]:
        if not sequences.packed:
            return called(self.module, x, state)
        if takes_packs(self.spec):
            return called(self.module, x, state, cu_seqlens=sequences.cu_seqlens)
        return self._apart(x, state, sequences.counts(), sequences.ends)

    def _apart(self, x: Tensor, state: Any, counts: list[int], ends: list[int]) -> tuple[Tensor, Any]:
        """Computes packed sequences, those of one length in one call."""
        groups = [[i for i, n in enumerate(counts) if n == length] for length in sorted(set(counts), reverse=True)]
        places, outputs, states = [], [], []
        for members in groups:
            at = torch.tensor([list(range(ends[i], ends[i + 1])) for i in members], dtype=torch.long).to(x.device)
            before = None if state is None else type(state)(*(part[members] for part in state))
            if at.shape[1]:
                y, after = called(self.module, x[0, at], before)
            elif before is None and after is not None:  # sequences without a token yet
                y, after = x[0, at], type(after)(*(p.new_zeros(len(members), *p.shape[1:]) for p in after))
            else:
                y, after = x[0, at], before
            places.append(at.flatten())
            outputs.append(y.flatten(0, 1))
            states.append(after)
        y = torch.cat(outputs)[torch.cat(places).argsort()][None]
        if states[0] is None:
            return y, None
        order = torch.tensor([i for members in groups for i in members], device=x.device).argsort()
        return y, type(states[0])(*(torch.cat(parts)[order] for parts in zip(*states, strict=True)))


@cache
def examined(spec: ModuleSpec, hidden_size: int, num_heads: int) -> tuple[Any, Shapes]:
    """Runs a module of these sizes on small inputs in float32, and returns the class of its state and the shapes of its
    tensors without the dimension N.

    Raises InputError for a module that breaks the protocol."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)  # torch.manual_seed would also seed GPUs, which are not forked
        module = create(spec, hidden_size=hidden_size, num_heads=num_heads, **GIVEN).float().eval()
        x = torch.randn(3, 7, hidden_size, dtype=torch.float32)
        given = x.clone()
        with reading(f"mixer {spec.label!r} cannot run on x {list(x.shape)}"):
            wrong = _unlike(module(x, None), x) or _unlike(module(x[:1], None), x[:1])
        if not torch.equal(x, given):
            wrong = "writes to x, which is needed after it; expected a new tensor"
        if not wrong:
            with reading(f"mixer {spec.label!r} cannot go on from its state"):
                wrong = next(_broken(spec, module, x), None)
        if wrong:
            raise InputError(f"mixer {spec.label!r} {wrong}")
        state = called(module, x, None)[1]
    if state is None:
        return None, {}
    return type(state), {name: tuple(part.shape[1:]) for name, part in state._asdict().items()}


def _unlike(returned: Any, x: Tensor) -> str | None:
    """Returns a sentence about what is no (y, state) of x, or None."""
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], Tensor)):
        return f"returns a {type(returned).__name__}; expected a tuple (y, state)"
    y, state = returned
    if y.shape != x.shape:
        return f"returns y of shape {list(y.shape)} for x of shape {list(x.shape)}; expected the shape of x"
    if y.dtype != x.dtype:
        return f"returns y in {y.dtype} for x in {x.dtype}; expected the dtype of x"
    parts = [] if state is None else [state] if isinstance(state, Tensor) else state
    if state is not None and not isinstance(state, Tensor) and not hasattr(state, "_fields"):
        return f"returns a {type(state).__name__} as its state; expected a tensor, a NamedTuple of tensors, or None"
    for part in parts:
        if not isinstance(part, Tensor) or part.dim() < 1 or len(part) != len(x) or not part.is_floating_point():
            about = f"{part.dtype} of shape {list(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
            return f"has a state with {about} for N = {len(x)} sequences; expected floating-point tensors [N, ...]"
    return None


def _broken(spec: ModuleSpec, module: nn.Module, x: Tensor) -> typing.Iterator[str]:
    """Yields a sentence for each law that does not hold on x."""
    y, state = called(module, x, None)
    begun, middle = called(module, x[:, :4], None)
    alone, single = called(module, x[:1], None)
    shapes = [[] if s is None else [tuple(part.shape[1:]) for part in s] for s in (state, middle, single)]
    if shapes[0] != shapes[1] or shapes[0] != shapes[2]:
        yield (
            f"has a state of {shapes[0]} after 7 tokens of 3 sequences, {shapes[1]} after 4 tokens, and {shapes[2]} of "
            "1 sequence; expected tensors [N, ...] of one size"
        )
    before = None if middle is None else [part.clone() for part in middle]
    rest, _ = called(module, x[:, 4:], middle)
    if before is not None and not all(map(torch.equal, before, middle)):
        yield "writes to the state that it was given; expected a new one"
    laws = {
        "x in two calls, the second with the state of the first": torch.cat([begun, rest], 1),
        "a sequence without the others": torch.cat([alone, y[1:]]),
    }
    if state is not None:
        zeros = type(state)(*map(torch.zeros_like, state))
        laws["x after a state of zeros, which is that before the first token,"] = called(module, x, zeros)[0]
    if takes_packs(spec):
        pack, bounds = x[:2, :4].flatten(0, 1)[None], torch.tensor([0, 4, 8])
        packed, after = called(module, pack, None, cu_seqlens=bounds)
        both = torch.cat([packed.unflatten(1, (2, 4))[0], called(module, x[:2, 4:], after)[0]], 1)
        laws["packed sequences, and tokens after them,"] = torch.cat([both, y[2:]])
    for law, other in laws.items():
        if not (error := ((other - y).norm() / y.norm().clamp_min(1e-30)).item()) <= TOLERANCE:
            yield f"gives another y for {law} than for x at once, by {error:.1e}; expected at most {TOLERANCE:.0e}"
