"""The losses of the language model: next-token cross-entropy, and the load balance of mixtures of experts.

Dimensions: B batch, T tokens, D hidden size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from ..layers.packing import padding_mask
from ..ops.checks import require
from ..ops.loss import IGNORED, linear_cross_entropy, per_item
from ..ops.modules import is_plain
from ..ops.parallel.context import current


def token_loss(model: Any, hidden: Tensor, logits: Tensor | None, labels: Tensor | None, **loss_kwargs) -> Tensor:
    """The mean loss, as transformers' ForCausalLMLoss has it, but 0 without labels. Without logits it is computed in
    pieces, unless the head or the loss has been replaced or the head has hooks."""
    reason = "labels=... under context_parallel, where a label can be in another process; expected shift_labels"
    require(current() is None or loss_kwargs.get("shift_labels") is not None, reason)
    plain = is_plain(model.lm_head, nn.Linear) and model.lm_head.bias is None and model.cap is None
    ours, vocabulary = model.loss_function is ForCausalLMLoss, model.config.vocab_size
    if logits is None and not (plain and ours):
        logits = model.logits(hidden)
    if not ours:
        return model.loss_function(logits=logits, labels=labels, vocab_size=vocabulary, **loss_kwargs)
    targets = next_labels(labels, loss_kwargs.get("shift_labels")).to(hidden.device).contiguous()
    if logits is None:
        total = linear_cross_entropy(hidden.flatten(0, 1), model.lm_head.weight, targets.flatten())
    else:
        one: Any = 1  # so that the loss is a sum
        total = ForCausalLMLoss(logits, None, vocabulary, num_items_in_batch=one, shift_labels=targets)
    return per_item(total, targets, loss_kwargs.get("num_items_in_batch"))


def next_labels(labels: Any, shift_labels: Tensor | None) -> Tensor:
    """The label of each position [B, T]: shift_labels, or the label of the token after it."""
    return F.pad(labels, (0, 1), value=IGNORED)[:, 1:].contiguous() if shift_labels is None else shift_labels


def experts_loss(
    model: Any, attention_mask: Tensor | None, labels: Any, shift_labels: Any = None, num_items_in_batch: Any = None
) -> Tensor | float:
    """The load-balancing loss of mixtures of experts, weighted by this batch's share of the items of a step."""
    taken = [module.take_routing() for module in model.modules() if getattr(module, "routes", False)]
    routed = [routing for routing in taken if routing is not None]
    if not routed:
        return 0.0
    trained = not torch.is_grad_enabled() or routed[0].graded
    require(trained, "use_reentrant=True gives no gradient to the balance loss; expected use_reentrant=False")
    shares, targets = routed[0].shares, next_labels(labels, shift_labels)
    if attention_mask is not None:  # of rows, which may be packed
        attention_mask = attention_mask[:, attention_mask.shape[1] - targets.shape[1] :].reshape(shares.shape[:2])
    mask = padding_mask(attention_mask, shares, False)
    losses = torch.stack([routing.balance_loss(mask) for routing in routed])
    share = per_item((targets != IGNORED).sum().to(losses), targets, num_items_in_batch)
    return model.balance * losses.mean() * share
