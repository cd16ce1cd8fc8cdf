"""Cross-entropy of a language model's head, without storing the logits of all tokens.

Dimensions: N tokens, D hidden size, V vocabulary.
"""

import math
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from ..utils.device import interpreted, is_hopper, without_autocast
from .backends.triton import limits
from .call import accumulator
from .derivatives import check_transforms, first_order, transformed

NAMES = "linear_cross_entropy", "; expected F.cross_entropy of the logits"
IGNORED = -100
PIECE = 2**24  # number of logits stored at a time
PIECE_ON_GPU = 2**27  # where a kernel needs no copy of them in float32


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Returns the sum of the cross-entropies of the logits hidden [N, D] weightᵀ [D, V] and the labels [N].

    A label of −100 is ignored. The logits are computed once, for some tokens at a time, and with them the gradients,
    which are stored instead, as large as hidden and weight. Losses are summed in float32 (float64 for float64).

    Raises:
        InputError: for second derivatives, forward-mode differentiation and gradients inside torch.func.
    """
    kind = hidden.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and hidden.dtype is not torch.float64:  # as in products
        hidden, weight = (x.to(torch.get_autocast_dtype(kind)) for x in (hidden, weight))
    if kind == "cpu" and not torch.compiler.is_compiling():  # nonzero() would synchronize a GPU
        labelled = (labels != IGNORED).nonzero()[:, 0]
        hidden, labels = hidden.index_select(0, labelled), labels[labelled]
    with without_autocast(hidden):
        if torch.is_grad_enabled():
            if transformed():
                check_transforms(*NAMES, (hidden, weight))
            return _LinearCrossEntropy.apply(hidden, weight, labels)
        return _in_pieces(hidden, weight, labels, None, None)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels):
        acc, wanted = accumulator(hidden), ctx.needs_input_grad
        d_hidden = torch.empty_like(hidden) if wanted[0] else None
        d_weight = torch.zeros_like(weight, dtype=acc) if wanted[1] else None
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtype = weight.dtype
        return _in_pieces(hidden, weight, labels, d_hidden, d_weight)

    @staticmethod
    @first_order(*NAMES)
    def backward(ctx, d_loss):
        d_hidden, d_weight = (None if x is None else x * d_loss for x in ctx.saved_tensors)
        return d_hidden, None if d_weight is None else d_weight.to(ctx.dtype), None


def _in_pieces(hidden, weight, labels, d_hidden, d_weight) -> Tensor:
    """Returns the loss. Writes its gradients into d_hidden and adds them to d_weight, if given."""
    total, kernel = hidden.new_zeros((), dtype=accumulator(hidden)), _has_kernel(hidden)
    size = max((PIECE_ON_GPU if kernel else PIECE) // len(weight), 1)
    for start in range(0, len(hidden), size):
        piece = slice(start, start + size)
        logits = F.linear(hidden[piece], weight)
        if kernel:
            module = import_module(f"{limits.__package__}.cross_entropy")  # needs Triton
            loss, errors = module.loss_and_errors(logits, labels[piece], IGNORED)
        else:
            loss, errors = _loss_and_errors(logits.to(accumulator(hidden)), labels[piece])
        total += loss
        errors = errors.to(hidden.dtype)
        if d_hidden is not None:
            torch.mm(errors, weight, out=d_hidden[piece])
        if d_weight is not None and hidden.dtype is not torch.bfloat16:  # sums of float16 may be beyond its range
            d_weight.addmm_(errors.mT.to(d_weight.dtype), hidden[piece].to(d_weight.dtype))
        elif d_weight is not None:
            d_weight += errors.mT @ hidden[piece]
    return total


def _has_kernel(hidden: Tensor) -> bool:
    """Whether a Triton kernel computes the losses: of tensors that are not fake, on GPUs that ran it, uncompiled."""
    on_gpu = type(hidden) is Tensor and (is_hopper(hidden.device) if hidden.is_cuda else interpreted())
    return on_gpu and hidden.dtype in limits.DTYPES and limits.missing() is None and not torch.compiler.is_compiling()


def _loss_and_errors(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a piece's loss and the gradient of its logits: softmax − one-hot label, or 0 for ignored labels."""
    labelled = labels != IGNORED
    at, normalizer = labels.where(labelled, 0)[:, None], logits.logsumexp(-1)
    loss = (normalizer - logits.gather(1, at)[:, 0]).where(labelled, 0).sum()
    errors = logits.sub_(normalizer.masked_fill(~labelled, math.inf)[:, None]).exp_()
    return loss, errors.scatter_add_(1, at, -labelled[:, None].to(errors.dtype))


def per_item(total: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Divides a sum over the labels that are not ignored by num_items_in_batch; None: the number of these labels.

    Without labels the sum is 0 and has zero gradients, and so has the quotient, whatever num_items_in_batch is."""
    count = (labels != IGNORED).sum().to(total.device)
    items = count if num_items_in_batch is None else num_items_in_batch
    items = items.squeeze() if isinstance(items, Tensor) else items  # transformers' [1]; a number may be on the CPU
    return total / (items + (count == 0))
