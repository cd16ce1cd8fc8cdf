"""A linear layer whose output parts are computed from different inputs.

Dimensions: B batch, T tokens, D hidden size, n parts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.modules import is_plain


def project(linear: nn.Module, streams: list[Tensor], sizes: list[int]) -> list[Tensor]:
    """Computes part i of the layer's output from streams[i].

    A module other than an `nn.Linear` without hooks and bias is called on all inputs, which takes n times the work.

    Args:
        streams: n inputs [B, T, D].
        sizes: sizes of the n parts of the output.

    Returns:
        n tensors [B, T, size].
    """
    if is_plain(linear, nn.Linear) and linear.bias is None:
        return [F.linear(x, weight) for x, weight in zip(streams, linear.weight.split(sizes), strict=True)]
    wholes = linear(torch.stack(streams, -2)).unbind(-2)
    return [whole.split(sizes, -1)[i] for i, whole in enumerate(wholes)]
