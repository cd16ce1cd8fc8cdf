"""The parameters of a headrace model by the names that formats give places to."""

from typing import Any

from torch import Tensor

from ..extra.latent import LatentAttention
from ..extra.mamba3 import SoftplusRateDecay
from ..extra.moe import MixtureOfExperts
from ..extra.xielu import XIELU
from ..layers.base import Mixer
from ..layers.linear.mixer import LinearMixer


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
            own = [name for name in by_name if name.startswith(f"{path}.")] if isinstance(module, LinearMixer) else []
            for name in own:
                if divided := _pieces(module, name.removeprefix(f"{path}."), by_name[name]):
                    del by_name[name]
                    by_name |= {f"{name}.{piece}": x for piece, x in divided.items()}
        elif isinstance(module, LatentAttention):
            by_name |= _latent(path, module, by_name)
        elif isinstance(module, XIELU):
            by_name |= {f"{path}.{name}": buffer for name, buffer in module.named_buffers()}
        elif isinstance(module, MixtureOfExperts):
            if module.choice_bias is not None:
                by_name[f"{path}.choice_bias"] = module.choice_bias
            for kind in ("", "_bias")[: len(module.PARTS) // 2]:
                up, down = (by_name.pop(f"{path}.{part}{kind}") for part in ("up", "down"))
                by_name |= {f"{name}{kind}": x for name, x in _experts(path, up, down, module.gated).items()}
    return by_name


def _latent(path: str, module: LatentAttention, by_name: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows of queries, head by head, and of the shared key: the halves of those that rotate, and the others."""
    half = module.rotary_dim // 2
    queries = _halves(by_name.pop(f"{path}.q_proj.weight"), module.head_dim, half)
    parts = {f"q_proj.{name}": rows for name, rows in queries.items()}
    own, first, second = by_name.pop(f"{path}.kv_a_proj.weight").split([module.kv_a_norm.weight.numel(), half, half])
    parts |= {"kv_a_proj.0.first": first, "kv_a_proj.0.second": second, "kv_a_proj.0.own": own}
    return {f"{path}.{name}": rows for name, rows in parts.items()}


def _halves(rows: Tensor, each: int, half: int) -> dict[str, Tensor]:
    """The rows of heads of `each` rows: the halves of those that rotate, and the others."""
    kinds = {"first": half, "second": half, "own": each - 2 * half}
    return {
        f"{h}.{kind}": part for h, head in enumerate(rows.split(each))
        for kind, part in zip(kinds, head.split([*kinds.values()]), strict=True) if len(part)
    }  # fmt: skip


def _pieces(mixer: Any, name: str, x: Tensor) -> dict[str, Tensor]:
    """The pieces of a parameter of a linear mixer whose rows have another order in a format; none of other ones."""
    spec, n, (module, _, part) = mixer.spec, mixer.spec.write.steps, name.rpartition(".")
    half, projected = spec.angles(mixer.K), module.startswith("in_proj")
    if projected and part == "decay" and isinstance(mixer.decay, SoftplusRateDecay):
        return {"step": x[::2], "rate": x[1::2]}  # which alternate
    if half and projected and part in "qk":
        return _halves(x, mixer.K, half)
    if half and module == "qk_norm":
        both = {which: _halves(y.transpose(0, -1), mixer.K, half) for which, y in zip("qk", x, strict=True)}
        return {f"{which}.{kind}": y for which, kinds in both.items() for kind, y in kinds.items()}
    if n > 1 and part in ("k", "v", "beta"):
        heads = mixer.Hq if part == "k" else mixer.H
        return {f"{i // n}.{i % n}": y for i, y in enumerate(x.chunk(heads * n))}
    if module == "shift" and part != "base":  # of RWKV-6, with a row for each of the rank
        streams = mixer.shift.STREAMS
        rows = x if part == "up" else (x.T if part == "down" else x).chunk(len(streams))
        return dict(zip(streams, rows, strict=True))
    return {}


def _experts(path: str, up: Tensor, down: Tensor, gated: bool) -> dict[str, Tensor]:
    """The matrices of each expert."""
    parts = {"gate": up[:, : up.shape[1] // 2], "up": up[:, up.shape[1] // 2 :]} if gated else {"up": up}
    parts["down"] = down
    return {f"{path}.{e}.{part}": x[e] for part, x in parts.items() for e in range(len(x))}
