"""The formats of other libraries by their model_type."""

from typing import Any

from . import delta, dense, flash, hybrid, lfm, pairs, parallel, recurrent, rwkv, softmax, sparse, variants
from .form import Format

MODULES: Any = (
    softmax, variants, parallel, pairs, dense, sparse, recurrent, lfm, delta, hybrid, flash, rwkv
)  # fmt: skip
FORMATS: dict[str, Format] = {kind: form for module in MODULES for kind, form in module.FORMATS.items()}

# Formats with a recurrence that are not converted -> what they have that no mixer or model here has.
MISSING: dict[str, str] = {
    "hgrn": "lower bounds of all layers that are partial sums of one softmax",
    "comba": "a norm of q after its correction by k, and one of the share of k that is removed",
    "mesa_net": "short convolutions of q and k, and none of v",
    "lightnet": "keys that are a softmax over all tokens so far",
    "path_attn": "positions by products of Householder matrices",
    "zamba": "Mamba layers of several heads, each with projections of its own (n_mamba_heads)",
    "qwen4_exp": "several residual streams (hc_count) and embeddings of n-grams",
    "glm5_next": "sparse attention whose tokens an indexer chooses",
    "zaya": "convolutions of compressed q and k (CCA)",
    "inkling2": "convolutions whose weights depend on the token, and biases of relative positions",
    "xlstm": "a cap on the logits of mLSTM's gates (gate_soft_cap)",
}
