"""From an arm to a model: an MLP width that matches parameters, and the inputs of a task."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import models
from ..gates import Gate
from ..hf import HeadraceConfig, HeadraceForCausalLM
from ..model_spec import ModelSpec
from ..models import shift_right
from ..spec import from_json
from ..tasks import IGNORED, Sequences
from ..tasks.base import Batch
from ..tasks.sequences import START
from .plan import Arm


class Learner(nn.Module):
    """A language model that reads a task's rows, with several channels at a position if need be."""

    def __init__(self, lm: HeadraceForCausalLM):
        super().__init__()
        self.lm = lm

    def forward(self, input_ids: Tensor, shift_labels: Tensor, attention_mask: Tensor | None = None):
        """input_ids [B, T] or [B, T, channels] (negative: nothing), shift_labels and attention_mask [B, T]."""
        labels = {"labels": shift_labels, "shift_labels": shift_labels, "attention_mask": attention_mask}
        if input_ids.dim() == 2:
            return self.lm(input_ids=input_ids, **labels)
        embedded = self.lm.get_input_embeddings()(input_ids.clamp_min(0))
        return self.lm(inputs_embeds=(embedded * (input_ids >= 0)[..., None]).sum(2), **labels)


class Whole(nn.Module):
    """A whole model that reads a task's rows."""

    def __init__(self, model: models.Model):
        super().__init__()
        self.model = model

    def forward(self, shift_labels: Tensor, **rows: Any):
        return self.model(labels=shift_labels, **rows)


def as_read(arm: Arm, rows: Batch) -> Batch:
    """A task's rows as the arm's model reads them: a causal one has source and target in one row, one after another."""
    if not isinstance(arm.plan.task, Sequences) or isinstance(from_json(arm.spec), ModelSpec):
        return rows
    source, labels = rows["input_ids"], rows["shift_labels"]
    return {
        "input_ids": torch.cat([source, shift_right(labels, START)], 1),
        "attention_mask": torch.cat([rows["attention_mask"], torch.ones_like(labels, dtype=torch.bool)], 1),
        "shift_labels": torch.cat([torch.full_like(source, IGNORED), labels], 1),
    }


def build(arm: Arm) -> Learner | Whole:
    """The arm's model, its parameters drawn from torch's generator as it stands.

    Gates are drawn from nothing, so that a mixer and its softmax version start from the same weights."""
    shape, spec = arm.plan.shape, from_json(arm.spec)
    if isinstance(spec, ModelSpec):
        sizes = {"hidden_size": shape.hidden_size, "num_heads": shape.heads, "num_layers": shape.layers}
        return Whole(models.build(spec, vocab_size=arm.plan.task.vocab_size, **sizes))
    config = HeadraceConfig(
        mixer=arm.spec,
        vocab_size=arm.plan.task.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_heads=shape.heads,
        mlp="none" if arm.width is None else None,
        intermediate_size=arm.width,
        max_position_embeddings=arm.plan.positions,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return Learner(HeadraceForCausalLM(config))


def gate_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, Gate):
            yield from module.parameters()
