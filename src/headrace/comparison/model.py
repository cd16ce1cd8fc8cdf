"""The model of an arm: its shape and its recipe, and the inputs and labels of a task's rows as its arguments."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..hf.model import HeadraceConfig, HeadraceForCausalLM
from ..history import models
from ..history.models import shift_right
from ..spec.mixer import ModelSpec, Spec
from ..spec.record import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Record
from ..spec.serialize import from_json
from ..tasks import IGNORED, Sequences, Task
from ..tasks.base import Batch
from ..tasks.sequences import START
from ..training.compiled import uncompiled
from ..training.model import matrix_products
from ..training.optimization import Optimization
from ..training.parameters import initialize_gates


@dataclass(frozen=True)
class Shape(Record):
    """The model around the mixer.

    mlp: MLP width of the model with the most parameters; the widths of the other models are chosen so that all models
    have equally many parameters. None: no MLP if the parameters match without one, else `hidden_size`. 0: no MLP."""

    hidden_size: PositiveInt = 64
    layers: PositiveInt = 1
    heads: PositiveInt = 8
    mlp: NonNegativeInt | None = None


@dataclass(frozen=True)
class ArmRecipe(Optimization):
    """Training of one arm with AdamW."""

    lr: PositiveFloat = 1e-2
    min_lr: NonNegativeFloat = 0.05
    steps: PositiveInt = 300
    batch_size: PositiveInt = 64
    warmup: NonNegativeFloat = 1 / 15
    evaluations: PositiveInt = 10
    held_out: PositiveInt = 512  # number of held-out rows
    # torch.compile of each block; None: on a CUDA GPU, unless a mixer needs the lengths of sequences on the host
    compile: bool | None = None


class CausalModel(nn.Module):
    """A causal language model on a task's rows. Rows with several tokens at a position (channels) are embedded as the
    sum of the embeddings of these tokens."""

    def __init__(self, lm: HeadraceForCausalLM):
        super().__init__()
        self.lm = lm

    def forward(self, input_ids: Tensor, shift_labels: Tensor, attention_mask: Tensor | None = None):
        """input_ids [B, T] or [B, T, channels] (negative: no token), shift_labels and attention_mask [B, T]."""
        others: dict[str, Any] = {"attention_mask": attention_mask, "skip_logits": self.training}
        others |= {"labels": shift_labels, "shift_labels": shift_labels}
        if input_ids.dim() == 2:
            return self.lm(input_ids=input_ids, **others)
        embedded = self.lm.get_input_embeddings()(input_ids.clamp_min(0))
        return self.lm(inputs_embeds=(embedded * (input_ids >= 0)[..., None]).sum(2), **others)


class CompleteModel(nn.Module):
    """An encoder-decoder or BERT on a task's rows."""

    def __init__(self, model: models.Model):
        super().__init__()
        self.model = model

    def forward(self, shift_labels: Tensor, **rows: Any):
        return self.model(labels=shift_labels, **rows)


def model_inputs(arm: Any, rows: Batch) -> Batch:
    """The rows of a task as arguments of the arm's model. For a causal model on a sequence-to-sequence task, source and
    target are concatenated to one row."""
    if not isinstance(arm.plan.task, Sequences) or isinstance(from_json(arm.spec), ModelSpec):
        return rows
    source, labels = rows["input_ids"], rows["shift_labels"]
    return {
        "input_ids": torch.cat([source, shift_right(labels, START)], 1),
        "attention_mask": torch.cat([rows["attention_mask"], labels != IGNORED], 1),
        "shift_labels": torch.cat([torch.full_like(source, IGNORED), labels], 1),
    }


def build(arm: Any) -> CausalModel | CompleteModel:
    """Builds the arm's model with parameters drawn from torch's global generator.

    Gate parameters are drawn last, so that a mixer and its softmax version start from the same other weights."""
    task, shape, recipe, spec = arm.plan.task, arm.plan.shape, arm.plan.recipe, from_json(arm.spec)
    if isinstance(spec, ModelSpec):
        sizes = {
            "num_heads": shape.heads, "num_layers": shape.layers, "intermediate_size": arm.width,
            "initializer_range": recipe.initializer_range,
        }  # fmt: skip
        whole = models.build(spec, vocab_size=task.vocab_size, hidden_size=shape.hidden_size, **sizes)
        return initialize_gates(CompleteModel(whole), recipe.gate_std, recipe.gate_init)
    config = HeadraceConfig(
        mixer=arm.spec,
        vocab_size=task.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_heads=shape.heads,
        mlp="none" if arm.width is None else None,
        intermediate_size=arm.width,
        max_position_embeddings=positions(task),
        tie_word_embeddings=False,
        use_cache=False,
        initializer_range=recipe.initializer_range,
    )
    return initialize_gates(CausalModel(HeadraceForCausalLM(config)), recipe.gate_std, recipe.gate_init)


@cache
def positions(task: Task) -> int:
    """Number of positions of the longest row, held-out lengths and concatenated source and target included."""
    longest = max([*task.by_length(1), task.length])
    return 2 * longest + 1 if isinstance(task, Sequences) else longest


@torch.no_grad()
def flops(model: nn.Module, row: Batch, shape: Shape) -> int | None:
    """Floating-point operations of the forward pass of one row: the matrix products, as counted by PyTorch, and the
    recurrences, as counted by `flops_per_token` of their specs. None for a model with an LSTM or GRU, whose matrix
    products PyTorch does not count."""
    if any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in model.modules()):
        return None
    updates: list[int] = []

    def count(mixer: Any, args: Any) -> None:
        updates.append(args[0].shape[1] * mixer.spec.flops_per_token(shape.hidden_size, shape.heads))

    mixers = [module for module in model.modules() if isinstance(getattr(module, "spec", None), Spec)]
    handles = [mixer.register_forward_pre_hook(count) for mixer in mixers]
    device = next(model.parameters()).device
    with uncompiled(model), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.eval()(**{name: values.to(device) for name, values in row.items()})
    for handle in handles:
        handle.remove()
    return matrix_products(counter, model) + sum(updates)
