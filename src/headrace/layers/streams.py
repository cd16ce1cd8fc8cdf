"""A projection whose parts read an input of their own each, where all parts are one linear layer.

Dimensions: B batch, T tokens, D hidden size, n parts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.modules import untouched


def project(linear: nn.Module, streams: list[Tensor], sizes: list[int]) -> list[Tensor]:
    """streams: an input [B, T, D] per part; sizes: of the parts of the layer's output -> [B, T, size] for each part.

    Any other module than a bare linear layer is called, and makes all parts of all inputs: n times the work.
    """
    if untouched(linear, nn.Linear) and linear.bias is None:
        return [F.linear(x, weight) for x, weight in zip(streams, linear.weight.split(sizes), strict=True)]
    wholes = linear(torch.stack(streams, -2)).unbind(-2)
    return [whole.split(sizes, -1)[i] for i, whole in enumerate(wholes)]
