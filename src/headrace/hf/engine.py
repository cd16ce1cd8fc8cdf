"""The engine of single tokens: the whole model as one native program, where the native backend supports all of it.

Dimensions: B batch.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..layers.blocks.stack import Backbone
from ..layers.blocks.token import add_backbone
from ..layers.linear.token import MixerState
from ..layers.quantized import Int8Linear
from ..ops.backends.native import library as native
from ..ops.backends.native.program import Program, ProgramOf
from .cache import HeadraceCache


def model_program(program: Program, model: Any) -> None:
    """Builds the program tokens [B] -> logits [B, vocabulary] of a language model.

    The logits are written by its last operation, and with a cap of the logits by the one before it too."""
    program.module(model, "model", model.base_class)
    embedding = program.module(model.model, "embed_tokens", nn.Embedding)
    backbone = program.module(model.model, "backbone", Backbone)
    program.module(backbone, "layers", nn.ModuleList)
    program.fixed(backbone, "embedding_scale")
    program.fixed(model, "cap")
    program.vocabulary, D = embedding.weight.shape
    x = program.columns(D)
    weight = program.weight(embedding, "weight", (program.vocabulary, D))
    program.add("embed", out=x, outputs=D, number=backbone.embedding_scale, weight=weight)
    add_backbone(program, backbone, x)
    program.linear(program.module(model, "lm_head", nn.Linear, Int8Linear), x, 0)
    if model.cap is not None:
        program.add("cap", outputs=model.lm_head.out_features, number=model.cap)


class Engine:
    """Computes the next logits of a language model, one token of each sequence at a time: in one native call, or by the
    modules of the model."""

    def __init__(self) -> None:
        self.program = ProgramOf(model_program)

    def find(self, model: Any) -> tuple[Program | None, str | None]:
        """Returns (the program that computes a token of the model now, None), or (None, why modules compute it)."""
        if torch.compiler.is_compiling():
            return None, "a graph is traced"
        if type(model).forward is not type(model).plain_forward:
            return None, f"{type(model).__name__} has a forward of its own"
        return self.program.find(model)

    def unsupported_reason(self, model: Any) -> str | None:
        """Returns why a token of the model is not computed in one native call now, or None."""
        return self.find(model)[1]

    def about(self, model: Any) -> str:
        """Returns which engine computes a token of the model now, and why."""
        with torch.no_grad():
            reason = self.unsupported_reason(model)
        return f"one native call ({native.instructions})" if reason is None else f"PyTorch's modules: {reason}"

    def step(self, model: Any, tokens: Tensor, cache: HeadraceCache) -> Tensor:
        """tokens [B] -> logits [B, 1, vocabulary] of the next. Updates the cache, which must not be empty."""
        logits = self.native_step(model, tokens, cache)
        if logits is not None:
            return logits
        return model.logits(model.model(tokens[:, None], past_key_values=cache, use_cache=True).last_hidden_state)

    def native_step(self, model: Any, tokens: Tensor, cache: HeadraceCache) -> Tensor | None:
        """Returns the result of `step` by the native call, or None, and then does nothing."""
        program, _ = self.find(model)
        if program is None or not tokens.is_cpu or cache.pending:
            return None
        states, B = cache.states, len(tokens)
        if states is None or len(states) != len(program.layers):
            return None
        if any(type(state) is not MixerState for state in states):
            return None
        if (ready := program.take(states, B)) is None:
            return None  # the modules copy the states, or say what is wrong
        cache.begin()
        last = len(program.operations) - 1
        logits = torch.empty(B, 1, program.operations[last].outputs)
        operations = (last,) if model.cap is None else (last - 1, last)
        ready.run(dict.fromkeys(operations, logits), tokens.to(torch.int64).contiguous())
        cache.advance(1, tokens)
        return logits.to(program.dtype(0))
