"""Mixers and stages of mixers that few need, each a file that registers itself as a plug-in does: its spec, its layer,
its names. A file is imported when one of its names, or a spec that has its stage, is asked for. Layers get the
arguments of LinearMixer, and do not use those that they do not name. Backends that only some machines have, or that
only an export needs, are rows of the table of `ops/dispatch.py`."""

from ..utils import tables

tables.offer("headrace.extra.gla_outer", matrices=("gla-outer",), matrix_kinds=("gla-outer",))
tables.offer("headrace.extra.slots", matrices=("gsa", "abc"), matrix_kinds=("gsa", "abc"))
tables.offer(
    "headrace.extra.log_linear", linear=("log-linear-mamba2", "log-linear-gated-deltanet"), types=("log-linear",)
)
tables.offer("headrace.extra.fast_weights", feature_maps=("dpfp-1", "dpfp-2", "dpfp-3"), qk_norms=("sum",))
tables.offer("headrace.extra.fixed_decays", decays=("xpos", "slopes"))
tables.offer("headrace.extra.mesa", linear=("mesa",), types=("mesa",))
tables.offer("headrace.extra.hgrn2", stages=("complement-key",))
tables.offer("headrace.extra.taylor", linear=("taylor-softmax", "based"), stages=("taylor",))
tables.offer(
    "headrace.extra.mamba3",
    linear=("mamba3",),
    decays=("softplus-rate",),
    stages=("biased-norm", "turn", "trapezoid"),
    rules=("inputs.turns",),
)
tables.offer("headrace.extra.mlstm", linear=("mlstm",), stages=("exponential-gate", "divide-by-weights"))
tables.offer(
    "headrace.extra.deltaproduct",
    linear=("deltaproduct", "gated-deltaproduct"),
    stages=("keys-of-steps", "steps"),
    rules=("write.steps",),
)
tables.offer(
    "headrace.extra.residual", linear=("residual-delta",), stages=("residual",), rules=("write.residual_chunk",)
)
tables.offer(
    "headrace.extra.erasing",
    linear=("comba", "gated-deltanet-2"),
    stages=("gate-of-channels", "erase"),
    rules=("write.erase",),
)
tables.offer(
    "headrace.extra.memories",
    stages=("memories", "values-of-memories", "sum-of-memories", "freeze"),
    rules=("competition.memories_per_head",),
)
tables.offer("headrace.extra.pattern", attention_layers=("pattern",))
tables.offer("headrace.extra.forgetting", attention_layers=("forget",))
tables.offer("headrace.extra.attention_token", tokens=("headrace.layers.attention.attention.SoftmaxAttention",))
tables.offer("headrace.extra.shared", shared_blocks=("block", "adapters"))
tables.offer("headrace.extra.averages", stages=("value-gate", "over-length", "divide-detached", "divide-by-length"))
tables.offer("headrace.extra.mamba", scans=("mamba",), scan_kinds=("mamba",), models=("jamba", "zamba"))
tables.offer("headrace.extra.rg_lru", scans=("rg-lru",), scan_kinds=("rg-lru",))
tables.offer("headrace.extra.gated", scans=("mingru", "minlstm", "hgrn"), scan_kinds=("mingru", "minlstm", "hgrn"))
tables.offer("headrace.extra.short_conv", scans=("short-conv",), scan_kinds=("short-conv",))
tables.offer("headrace.extra.rwkv", stages=("shift", "bonus"), decays=("exp-fixed", "exp"))
tables.offer("headrace.extra.rwkv7", matrices=("rwkv7",), matrix_kinds=("rwkv7",))
tables.offer("headrace.extra.channel_mixing", mlps=("rwkv4", "rwkv7"))
tables.offer("headrace.extra.encoder", linear_layers=("encoder", "both-ways"))
tables.offer("headrace.extra.latent", others=("mla",))
tables.offer("headrace.extra.capped", types=("capped",))
tables.offer("headrace.extra.moe", mlps=("experts",))
tables.offer("headrace.extra.clamped", types=("clamped-experts",))
tables.offer("headrace.extra.late_norm", types=("late-norm",))
tables.offer("headrace.extra.growing", types=("growing",))
tables.offer("headrace.extra.xielu", mlps=("xielu",))
tables.offer("headrace.extra.sparsemixer", types=("near-experts",))
tables.offer("headrace.extra.specs.scan", types=("scan",))
tables.offer("headrace.extra.specs.matrix", types=("matrix",))
tables.offer("headrace.extra.specs.latent", types=("latent",))
tables.offer("headrace.extra.linearized", linear=("hedgehog",), types=("linearized",))
tables.offer("headrace.extra.windowed", linear=("lolcats",), types=("windowed",))
tables.offer("headrace.extra.context_parallel", parallel=("context_parallel", "SequenceShard"))
tables.offer("headrace.extra.fla.op", backends=("fla",))
tables.offer("headrace.extra.onnx_node", backends=("onnx",))
