"""The parameters of a headrace model by the names that formats give places to."""

from typing import Any

from torch import Tensor

from ..extra.latent import LatentAttention
from ..layers.base import Mixer
from ..layers.blocks.moe import MixtureOfExperts
from ..layers.linear.decays import SoftplusRateDecay
from ..layers.linear.mixer import LinearMixer
from ..layers.linear.token_shift import TokenShift


def slots(model: Any) -> dict[str, Tensor]:
    """Name -> detached view of each parameter. Parameters that combine several tensors are split into parts. Writing to
    a view changes the model."""
    by_name = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        if isinstance(module, Mixer):
            for name, sizes in module.stacks.items():
                if (whole := by_name.pop(f"{path}.{name}", None)) is not None:
                    pieces = zip(sizes, whole.split(list(sizes.values())), strict=True)
                    name = name.replace("in_proj.weight", "in_proj")
                    by_name |= {f"{path}.{name}.{part}": x for part, x in pieces if len(x)}
            if isinstance(module, LinearMixer):
                by_name |= _step_and_rate(path, module, by_name) | _turned(path, module, by_name)
                by_name |= _shifted(path, module, by_name) | _by_step(path, module, by_name)
        elif isinstance(module, LatentAttention):
            by_name |= _latent(path, module, by_name)
        elif isinstance(module, MixtureOfExperts):
            if module.choice_bias is not None:
                by_name[f"{path}.choice_bias"] = module.choice_bias
            by_name |= _experts(path, by_name.pop(f"{path}.up"), by_name.pop(f"{path}.down"), module.gated)
    return by_name


def _latent(path: str, module: LatentAttention, by_name: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows of queries, head by head, and of the shared key: the halves of those that rotate, and the others."""
    half = module.rotary_dim // 2
    parts = _halves("q_proj", by_name.pop(f"{path}.q_proj.weight"), module.head_dim, half)
    own, first, second = by_name.pop(f"{path}.kv_a_proj.weight").split([module.kv_a_norm.weight.numel(), half, half])
    parts |= {"kv_a_proj.0.first": first, "kv_a_proj.0.second": second, "kv_a_proj.0.own": own}
    return {f"{path}.{name}": rows for name, rows in parts.items()}


def _halves(name: str, rows: Tensor, each: int, half: int) -> dict[str, Tensor]:
    """The rows of heads of `each` rows: the halves of those that rotate, and the others."""
    kinds = {"first": half, "second": half, "own": each - 2 * half}
    return {
        f"{name}.{h}.{kind}": part for h, head in enumerate(rows.split(each))
        for kind, part in zip(kinds, head.split([*kinds.values()]), strict=True) if len(part)
    }  # fmt: skip


def _step_and_rate(path: str, mixer: LinearMixer, by_name: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows of Mamba-3's step sizes and of its rates, which alternate."""
    rows: dict[str, Tensor] = {}
    if isinstance(mixer.decay, SoftplusRateDecay):
        rows = {name: by_name.pop(name) for name in _projected(path, "decay", by_name)}
    return {f"{name}.{kind}": x[i::2] for name, x in rows.items() for i, kind in enumerate(("step", "rate"))}


def _turned(path: str, mixer: LinearMixer, by_name: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of q and k that turn by angles of the token: the rows of each head, and the channels of their norm."""
    rows: dict[str, Tensor] = {}
    if mixer.spec.inputs.turns:
        rows = {name: by_name.pop(name) for part in "qk" for name in _projected(path, part, by_name)}
        for kind in ("weight", "bias"):
            both = by_name.pop(f"{path}.qk_norm.{kind}", ())
            rows |= {f"{path}.qk_norm.{kind}.{part}": x.transpose(0, -1) for part, x in zip("qk", both, strict=False)}
    half, parts = mixer.spec.angles(mixer.K), dict[str, Tensor]()
    for name, x in rows.items():
        parts |= _halves(name, x, mixer.K, half)
    return parts


def _shifted(path: str, mixer: LinearMixer, by_name: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parts of RWKV-6's token shift for each of its streams, matrices with a row for each of their rank."""
    if not isinstance(mixer.shift, TokenShift):
        return {}
    offset, down, up = (by_name.pop(f"{path}.shift.{name}") for name in ("offset", "down", "up"))
    parts = {"offset": offset.split(1), "down": down.T.chunk(len(offset)), "up": up}
    streams = mixer.shift.STREAMS
    return {f"{path}.shift.{name}.{each}": x for name, xs in parts.items() for each, x in zip(streams, xs, strict=True)}


def _by_step(path: str, mixer: LinearMixer, by_name: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows of each step of each head, of a mixer with several steps per token."""
    n, parts = mixer.spec.write.steps, dict[str, Tensor]()
    if n == 1:
        return parts
    for part, heads in (("k", mixer.Hq), ("v", mixer.H), ("beta", mixer.H)):
        for name in (*_projected(path, part, by_name), f"{path}.conv.weight.{part}"):
            if (rows := by_name.pop(name, None)) is not None:
                pieces = enumerate(rows.chunk(heads * n))
                parts |= {f"{name}.{i // n}.{i % n}": piece for i, piece in pieces}
    return parts


def _projected(path: str, part: str, by_name: dict[str, Tensor]) -> list[str]:
    """The names of a part of the input projection and of its bias."""
    return [name for name in (f"{path}.in_proj.{part}", f"{path}.in_proj.bias.{part}") if name in by_name]


def _experts(path: str, up: Tensor, down: Tensor, gated: bool) -> dict[str, Tensor]:
    """The matrices of each expert."""
    parts = {"gate": up[:, : up.shape[1] // 2], "up": up[:, up.shape[1] // 2 :]} if gated else {"up": up}
    parts["down"] = down
    return {f"{path}.{e}.{part}": x[e] for part, x in parts.items() for e in range(len(x))}
