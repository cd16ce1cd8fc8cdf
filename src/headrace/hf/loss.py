"""The losses of the language model: next-token cross-entropy, and the load balance of mixtures of experts.

Dimensions: B batch, T tokens, D hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from ..layers.blocks.moe import balance_loss, routings
from ..layers.packing import padding_mask
from ..ops.loss import IGNORED, causal_loss
from ..ops.modules import is_plain
from ..ops.parallel.context import current
from ..utils.errors import InputError


def token_loss(model: Any, hidden: Tensor, logits: Tensor | None, **loss_kwargs) -> Tensor:
    """The mean loss. Without logits it is computed in pieces, unless the head or the loss has been replaced or the
    head has hooks."""
    if current() is not None and loss_kwargs.get("shift_labels") is None:
        raise InputError(
            "labels=... under context_parallel, where a label can be in another process; expected shift_labels"
        )
    plain = is_plain(model.lm_head, nn.Linear) and model.lm_head.bias is None and model.cap is None
    if logits is None and plain and model.loss_function is ForCausalLMLoss:
        return causal_loss(hidden, model.lm_head.weight, **loss_kwargs)
    logits = model.logits(hidden) if logits is None else logits
    return model.loss_function(logits=logits, vocab_size=model.config.vocab_size, **loss_kwargs)


def experts_loss(
    model: Any, attention_mask: Tensor | None, labels: Any, shift_labels: Any = None, num_items_in_batch: Any = None
) -> Tensor | float:
    """The load-balancing loss of mixtures of experts, weighted by this batch's share of the items of a step."""
    routed = routings(model)
    if not routed:
        return 0.0
    if torch.is_grad_enabled() and not routed[0].shares.requires_grad:
        raise InputError("use_reentrant=True gives no gradient to the balance loss; expected use_reentrant=False")
    shares = routed[0].shares
    mask = padding_mask(None if attention_mask is None else attention_mask[:, -shares.shape[1] :], shares, False)
    losses = torch.stack([balance_loss(routing, mask) for routing in routed])
    targets = labels[:, 1:] if shift_labels is None else shift_labels
    share = 1 if num_items_in_batch is None else (targets != IGNORED).sum().to(losses) / num_items_in_batch
    return model.balance * losses.mean() * share
