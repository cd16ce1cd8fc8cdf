"""The parameters of a headrace model by the names that formats give places to."""

from typing import Any

from torch import Tensor

from ..extra.latent import LatentAttention
from ..layers.base import Mixer
from ..layers.blocks.moe import MixtureOfExperts


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
        elif isinstance(module, LatentAttention):
            by_name |= _latent(path, module, by_name)
        elif isinstance(module, MixtureOfExperts):
            if module.choice_bias is not None:
                by_name[f"{path}.choice_bias"] = module.choice_bias
            by_name |= _experts(path, by_name.pop(f"{path}.up"), by_name.pop(f"{path}.down"), module.gated)
    return by_name


def _latent(path: str, module: LatentAttention, by_name: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows of queries, head by head, and of the shared key: the halves of those that rotate, and the others."""
    half, parts = module.rotary_dim // 2, dict[str, Tensor]()
    heads = by_name.pop(f"{path}.q_proj.weight").split(module.head_dim)
    for h, (first, second, own) in enumerate(rows.split([half, half, module.key_dim]) for rows in heads):
        parts |= {f"q_proj.{h}.first": first, f"q_proj.{h}.second": second, f"q_proj.{h}.own": own}
    own, first, second = by_name.pop(f"{path}.kv_a_proj.weight").split([module.kv_a_norm.weight.numel(), half, half])
    parts |= {"kv_a_proj.0.first": first, "kv_a_proj.0.second": second, "kv_a_proj.0.own": own}
    return {f"{path}.{name}": rows for name, rows in parts.items()}


def _experts(path: str, up: Tensor, down: Tensor, gated: bool) -> dict[str, Tensor]:
    """The matrices of each expert."""
    parts = {"gate": up[:, : up.shape[1] // 2], "up": up[:, up.shape[1] // 2 :]} if gated else {"up": up}
    parts["down"] = down
    return {f"{path}.{e}.{part}": x[e] for part, x in parts.items() for e in range(len(x))}
