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
from ..ops.backends.native.bound import Ready, unknown_token
from ..ops.backends.native.program import Program, ProgramOf
from .cache import HeadraceCache
from .graphs import Graphs, unsupported_reason


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


MOST = 32  # tokens of one sequence for which a native call takes less time than the modules


class Engine:
    """Computes the next logits of a language model, one token of each sequence at a time: in one native call, or by the
    modules of the model."""

    def __init__(self) -> None:
        self.program = ProgramOf(model_program)
        self.graphs = Graphs()

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
        """Returns which engine computes a token of the model now, or in its last generation on a GPU, and why."""
        if model.device.type == "cuda":
            reason = self.graphs.refused or unsupported_reason(model)
            return "a CUDA graph" if reason is None else f"PyTorch's modules without a CUDA graph: {reason}"
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
        if cache.pending or (bound := self._bound(model, tokens, cache.states, len(tokens))) is None:
            return None
        cache.begin()
        logits = self._run(model, *bound, tokens)
        cache.advance(1, tokens)
        return logits[:, None]

    def read(self, model: Any, ids: Tensor, cache: HeadraceCache) -> Tensor | None:
        """Reads the pending tokens of one sequence and a few more, ids [1, T], in native calls, and returns the logits
        [1, T, vocabulary] of the next ones; or returns None, and then does nothing."""
        pending, columns, new = cache.pending, ids.shape[1], ids
        states, ids = cache.unread(ids)
        if ids.shape[1] > MOST or (bound := self._bound(model, ids, states, 1)) is None:
            return None
        program, _ = bound
        if ids.min() < 0 or ids.max() >= program.vocabulary:  # before a call of earlier tokens changes the states
            raise unknown_token(program.vocabulary)
        cache.begin()
        logits, start = [], 0
        for end in cache.ends(columns):
            logits.append(self._run(model, *bound, ids[0, start:end], in_order=True))
            if end < ids.shape[1] and states is not None:
                cache.pause(states, end)
            start = end
        cache.advance(columns, new)
        return torch.cat(logits)[None, pending:]

    def _bound(self, model: Any, tokens: Tensor, states: Any, rows: int) -> tuple[Program, Ready] | None:
        """Returns the program, and with the states of `rows` sequences; None if it cannot run."""
        program, _ = self.find(model)
        if program is None or not tokens.is_cpu or states is None or len(states) != len(program.layers):
            return None
        if any(type(state) is not MixerState for state in states):
            return None
        ready = program.take(states, rows)
        return None if ready is None else (program, ready)  # the modules copy the states, or say what is wrong

    def _run(self, model: Any, program: Program, ready: Ready, tokens: Tensor, in_order: bool = False) -> Tensor:
        """tokens [R] -> logits [R, vocabulary]."""
        last = len(program.operations) - 1
        logits = torch.empty(len(tokens), program.operations[last].outputs)
        operations = (last,) if model.cap is None else (last - 1, last)
        ready.run(dict.fromkeys(operations, logits), tokens.to(torch.int64).contiguous(), in_order)
        return logits.to(program.dtype(0))
