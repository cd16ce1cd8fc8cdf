"""From an arm to a model: an MLP width that matches parameters, and the inputs of a task."""

from collections.abc import Iterator

from torch import Tensor, nn

from ..gates import HeadCompetition
from ..hf import HeadraceConfig, HeadraceForCausalLM
from .plan import Arm


class Learner(nn.Module):
    """A language model that reads a task's rows, with several channels at a position if need be."""

    def __init__(self, lm: HeadraceForCausalLM):
        super().__init__()
        self.lm = lm

    def forward(self, input_ids: Tensor, shift_labels: Tensor):
        """input_ids [B, T] or [B, T, channels] (negative: nothing), shift_labels [B, T]."""
        labels = {"labels": shift_labels, "shift_labels": shift_labels}
        if input_ids.dim() == 2:
            return self.lm(input_ids=input_ids, **labels)
        embedded = self.lm.get_input_embeddings()(input_ids.clamp_min(0))
        return self.lm(inputs_embeds=(embedded * (input_ids >= 0)[..., None]).sum(2), **labels)


def build(arm: Arm) -> Learner:
    """The arm's model, its parameters drawn from torch's generator as it stands.

    Gates are drawn from nothing, so that a mixer and its softmax version start from the same weights."""
    shape = arm.plan.shape
    config = HeadraceConfig(
        mixer=arm.spec,
        vocab_size=arm.plan.task.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_heads=shape.heads,
        mlp="none" if arm.width is None else "swiglu",
        intermediate_size=arm.width,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return Learner(HeadraceForCausalLM(config))


def gate_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, HeadCompetition):
            yield from module.parameters()
