"""Small models in float64 whose weights are far from where they begin: a state that is lost, stale, rounded or in the
wrong row shows in every comparison."""

import warnings
from dataclasses import fields, is_dataclass

import torch

from headrace import GateWarning, HeadraceConfig, HeadraceForCausalLM, layers, zoo
from headrace.extra.capped import CappedSpec
from headrace.extra.clamped import ClampedExperts
from headrace.extra.growing import GrowingSpec
from headrace.extra.late_norm import LateNormSpec
from headrace.extra.sparsemixer import NearExperts
from headrace.extra.specs.latent import LatentSpec
from headrace.spec import AttentionSpec, Pattern, Rope
from headrace.spec.stack import BlockStyle, Decoder, Experts, Layer
from headrace.verification.verify import relative

MIXERS = {
    "retnet": "retnet",
    "gla": "gla",
    "mamba2": "mamba2",
    "rwkv6": "rwkv6",
    "gated-deltanet": "gated-deltanet",
    "softmax-gla": "softmax-gla",
    "sparse": [
        "longformer(pattern.window=2, pattern.first=1)",
        "bigbird(pattern.window=2, pattern.block=2, pattern.first=1)",
    ],
    "window": "softmax-lolcats(window=3, kv_heads=2, decay.kind=sigmoid-head)",
    "mamba and s4": ["mamba", "s4"],
    "rwkv4 and s4d": ["rwkv4", "s4d"],
    "hybrid": ["softmax-gated-deltanet", "transformer"],
    "gpt": "gpt",
    "first gpt": "gpt(style.order=post)",
    "experts": "jamba(style.experts.count=4)",
    "shared": "zamba",
    "parallel": Decoder(
        (Layer(zoo.get("mamba2"), parallel=zoo.get("gqa(kv_heads=2)")), Layer(zoo.get("gla"), order="branch")),
        BlockStyle(order="parallel-joint", mlp="relu2", embedding_scale=2.0, head_bias=True, logits_cap=8.0),
    ),
    "qwen3-next": Decoder(
        (
            Layer(zoo.get("gated-deltanet(heads.qk_groups=2)")),
            Layer(AttentionSpec(2, head_dim=16, rope=Rope(dims=4), qk_norm="head", gate="channel"), "experts"),
        ),
        BlockStyle(experts=Experts(4, 2, width=8, shared=12, shared_gate=True)),
    ),
    "ling": Decoder(
        (
            Layer(zoo.get("kda(decay.rank=full, read.gate=sigmoid, decay.lower_bound=-5.0)")),
            Layer(LatentSpec(16, None, 8, 4, 12, gate="head"), "experts"),
        ),
        BlockStyle(experts=Experts(4, 2, width=8, scores="sigmoid", biased=True, normalized=True, shared=8)),
    ),
    "gemma2": Decoder(
        (Layer(CappedSpec(2, pattern=Pattern(3), cap=1.5)), Layer(CappedSpec(2, null="learned", cap=1.5))),
        BlockStyle("rms-offset", "both", "geglu-tanh", logits_cap=8.0),
    ),
    "gpt-oss": Decoder(
        tuple(
            Layer(AttentionSpec(2, null="learned", bias=True, pattern=pattern), "experts")
            for pattern in (Pattern(3), None)
        ),
        BlockStyle(experts=ClampedExperts(4, 2, normalized=True, limit=0.5)),
    ),
    "late norms": Decoder(
        (Layer(LateNormSpec(2)), Layer(GrowingSpec(2, growth=0.5, period=3))),
        BlockStyle("rms-plain", mlp="xielu", embedding_norm=True),
    ),
    "phimoe": Decoder(
        (Layer(AttentionSpec(2), "experts"),),
        BlockStyle("layer-bias", head_bias=True, experts=NearExperts(4, 2, near=0.3)),
    ),
    "channel mixing": Decoder((Layer(zoo.get("rwkv4")),), BlockStyle("layer", mlp="rwkv4", embedding_norm=True)),
}
SIZES = {
    "vocab_size": 29, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "intermediate_size": 16,
    "initializer_range": 0.02,  # small beside what `trained` adds: with more, a tied model repeats its last token
}  # fmt: skip
T = 9


def values(spec):
    """(class, field, value) of a spec and of the records in it."""
    for field in fields(spec):
        value = getattr(spec, field.name)
        yield type(spec), field.name, type(value) if is_dataclass(value) else value
        yield from values(value) if is_dataclass(value) else ()


def covering(names):
    """Few of the mixers, whose specs have every value of every field that the others have: every path through code
    that depends on one value."""
    of, chosen = {name: set(values(zoo.get(name))) for name in names}, []
    left = set().union(*of.values())
    while left:
        chosen.append(max(names, key=lambda name: len(of[name] & left)))
        left -= of[chosen[-1]]
    return chosen


def by_state(names):
    """One of the mixers for each kind of layer with each kind of state: for what happens to states alone."""
    kinds = {}
    for name in names:
        spec = zoo.get(name)
        kinds.setdefault((spec.facts.layer, bool(getattr(spec, "pattern", None)), *spec.state_shapes(32, 4)), name)
    return list(kinds.values())


def config(mixer, **changes):
    if mixer == "shared":
        changes = {"num_hidden_layers": 3, **changes}
    mixer = MIXERS.get(mixer, mixer) if isinstance(mixer, str) else mixer
    return HeadraceConfig(**{"mixer": mixer, **SIZES, **changes})


@torch.no_grad()
def trained(model):
    """Weights as training might leave them: no gate at 1, no norm at 1, no flat prediction."""
    for name, p in model.named_parameters():
        p.add_(torch.randn_like(p), alpha=1.0 if "competition" in name else 0.3)
    return model.double().eval()


@torch.no_grad()
def perturbed(module, size=0.1):
    """The module with no parameter at its first value, many of which are zero."""
    for p in module.parameters():
        p.add_(torch.randn_like(p), alpha=size)
    return module


def layer(mixer, dtype=torch.float32, **settings):
    """A perturbed layer of 32 channels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GateWarning)
        module = layers.build(zoo.get(mixer), **{"hidden_size": 32, "num_heads": 4, **settings})
    return perturbed(module).to(dtype)


def build(mixer, **changes):
    return trained(HeadraceForCausalLM(config(mixer, **changes)))


def saved(model, folder, tokenizer=None):
    """Writes the model and its tokenizer, of bytes unless another is given, and returns the folder."""
    from headrace.data.tokenizer import byte_level

    for part in (model, tokenizer or byte_level()):
        part.save_pretrained(folder)
    return folder


def in_memory(model):
    """A model that was loaded, its weights no longer in the file, where they lie at any address: a BLAS may sum in
    another order what is aligned otherwise."""
    for p in model.parameters():
        p.data = p.data.clone()
    return model


def tokens(B, length=T):
    return torch.randint(1, SIZES["vocab_size"], (B, length))  # 0 is for padding: generate looks for it


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def gradients_agree(actual, expected, tolerance):
    """By name, each relative to the larger of its norm and a thousandth of the largest.

    A key's bias moves all logits of a query alike, which no softmax sees: its gradient is 0, and what is found is the
    rounding of terms that cancel, each as large as other gradients. In float64 that is 1e-13 of a thousandth of them.
    """
    largest = max(g.norm().item() for g in expected.values())
    for name, gradient in actual.items():
        assert relative(gradient, expected[name], 1e-3 * largest) <= tolerance, name
