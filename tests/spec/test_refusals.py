"""Fields that contradict each other: one sentence for each, whoever asks for the mixer."""

import pytest

from headrace import InputError, Mixer

COMPLEMENT = r"inputs\.key='complement'"
STRENGTH = r"write\.beta='\w+' is defined for"
LEVELS, RIDGE = r"levels=4 weights what is read", r"ridge_steps=30 is of a memory Σ β kᵀv"
STEPS, REMOVED = "steps=2 makes several updates", "changes what the delta rule removes"
XPOS = "map=none, inputs.rotary_first=false, read.norm=rms, decay.kind=xpos"
LONG = "map=none, inputs.rotary_first=false, inputs.qk_norm=l2, read.norm=rms, write.rule=delta, rope.kind=yarn, "
LONG += "rope.factor=32, rope.original=4"
# What a mixer cannot be with each of these changes.
CHANGES = {
    "deltanet": {"inputs.qk_norm=sum": "can make vanish", "inputs.qk_norm=none": "diverges"},
    "retnet": {"decay.kind=xpos, inputs.rotary=false": "is defined for rotated q and k"},
    "xpos-retnet": {"inputs.feature_map=dpfp-1": "neither dpfp nor a learned map"},
    "taylor-softmax": {"decay.kind=xpos": "order=None"},
    "residual-delta": dict.fromkeys(
        ("write.rule=add", "write.beta=one", "write.residual_chunk=0"), "residual_chunk"
    ),
    "gated-deltaproduct": dict.fromkeys(
        ("write.rule=add", "write.beta=dt", "write.beta=sigmoid, write.residual_chunk=4", "read.skip=true"), STEPS
    ),
    "comba": dict.fromkeys(("write.rule=add", "write.beta=one", "write.steps=2", "write.residual_chunk=4"), REMOVED),
    "softmax-gated-deltanet-2": {"competition.write=beta": "gates what is removed and not what is written"},
    "softmax-gla": {
        "competition.memories_per_head=0": "memories_per_head",
        "competition.memories_per_head=2, competition.write=none": "memories_per_head",
    },
    "softmax-linear-attention": {"competition.top_k=2, competition.freeze=true": "decay.kind='none' keeps no memory"},
    "softmax-gated-deltanet": {
        "competition.gradient=all": "competition.top_k", "competition.freeze=true": "competition.top_k",
        "competition.top_k=2, competition.gradient=all, competition.write=beta": "logarithm of a gate of 0",
        "competition.top_k=2, competition.freeze=true": "expected a write gate, and for write.rule='delta'",
    },
    "gla": {
        "inputs.rotary_first=true": "places a rotation",
        "inputs.order=2, read.norm=none, read.affine=true": "of a norm with channels",
        "read.norm=l2, read.eps=0.1": r"read\.eps=0\.1",
        "read.norm=detached": r"read\.norm='detached' divides by q·z",
        "inputs.turns=0.5": r"inputs\.turns=0\.5",
        **{f"inputs.key=complement, {change}": COMPLEMENT for change in (
            "inputs.conv=4", "inputs.rotary=true", "inputs.qk_norm=l2", "inputs.order=2", "decay.kind=exp-fixed",
            "decay.kind=none", "decay.kind=softplus", "heads.qk_groups=2",
        )},
    },
    "hedgehog": {
        f"map=none, qk_norm={norm}, inputs.key=complement, inputs.rotary=false, inputs.rotary_first=false, "
        "read.norm=rms, decay.kind=sigmoid": "are of a key that is projected" for norm in ("head", "joint")
    } | {
        f"read.norm=rms, write.rule=delta, write.beta=sigmoid, write.steps=2, inputs.qk_norm={norm}": "maps one key"
        for norm in ("l2", "sum")
    } | {
        "inputs.qk_norm=rms-bias": "can vanish or change sign",
        "inputs.rotary_first=false, read.norm=rms, decay.kind=xpos": "neither dpfp nor a learned map",
        f"{XPOS}, rope.dims=4": "is of all 8 key channels",
        f"{LONG}, write.beta=sigmoid-2": "1.35 times as long after their norm", f"{LONG}, inputs.order=1": "as long",
    },
    "rwkv6": {"read.affine=false": "whose weight is optional"},
    "linear-attention": {"read.by_length=true": "has no effect", "inputs.rotary=true": "rotary_first"},
    "mlstm": {
        **dict.fromkeys(
            ("read.eps=none, write.rule=delta, inputs.qk_norm=l2", "read.eps=none, read.norm=rms, read.bonus=true",
             "read.eps=none, read.norm=detached, inputs.feature_map=relu", "decay.kind=sigmoid"), STRENGTH,
        ),
    },
    "softmax-mlstm": {"competition.top_k=1, competition.freeze=true": STRENGTH},
    "mamba3": {
        **dict.fromkeys(
            ("write.rule=delta, inputs.qk_norm=l2", "read.norm=rms, read.bonus=true", "inputs.shift=lerp"), STRENGTH
        ),
        **dict.fromkeys(("inputs.qk_norm=none", "inputs.order=1", "heads.key_dim=2"), r"inputs\.turns=0\.5"),
    },
    "log-linear-gated-deltanet": {f"levels=4, {change}": LEVELS for change in (
        "read.bonus=true, write.rule=add, inputs.qk_norm=none",
        "read.norm=sum, inputs.feature_map=relu, write.rule=add",
        "write.residual_chunk=4", "write.erase=feedback", "write.steps=2",
    )},
    "mesa": dict.fromkeys(("read.scale=key", "write.rule=delta", "decay.kind=sigmoid", "read.bonus=true"), RIDGE),
    "softmax-mesa": {"competition.top_k=2, competition.freeze=true": "with ridge_steps keeps no memory"},
    "sliding-window": {
        "pattern.window=0": "window=0; expected at least 1", "forget=true": "forget=True supports neither",
        "rope.kind=dynamic, rope.original=4, pattern.window=4": "with a pattern is not available",
    },
    "flash-reference": {"null=true": "form='tiles' supports neither"},
    "fox": {"form=tiles": "forget=True supports neither"},
    "gqa": {f"buckets={n}": f"buckets={n}; expected 4 to 255" for n in (3, 256)},
    "transformer": {
        "rope.kind=linear, rope.original=4": "kind='linear' has no original; got 4",
        "rope.kind=yarn": "kind='yarn' needs original",
        "rope.kind=longrope, rope.original=4": "kind='longrope' needs short",
        "rope.kind=longrope, rope.original=1": "with original=1; expected more",
        "rope.kind=llama3, rope.original=4, rope.fast=1": "expected slow below fast",
        "rope.dims=3": "expected an even number", "rotary=false, rope.theta=5": "expected rotary=True",
    },
    "softmax-rnn-norm": {
        "denominator=sum, order=3": "even order", "denominator=detached, numerator=cosine": "even order",
        "denominator=sum, by_length=true": "by_length=True has no effect",
        "gate=input, gate_order=gate-norm": "before a norm", "order=101": "order=101; expected 0 to 100",
    },
    "softmax-rnn-gate": {
        "affine=true": "parameters to a norm", "gate_order=gate-norm": "before a norm", "order=-1": "order=-1",
        "numerator=tanh": "exp, relu",
    },
}  # fmt: skip


@pytest.mark.parametrize(("mixer", "change"), [(mixer, change) for mixer, rows in CHANGES.items() for change in rows])
def test_contradictory_fields_are_refused(mixer, change):
    with pytest.raises(InputError, match=CHANGES[mixer][change]):
        Mixer(f"{mixer}({change})", hidden_size=32, num_heads=4)
