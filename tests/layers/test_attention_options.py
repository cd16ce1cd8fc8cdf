"""Options of softmax attention that released models use. Sinks, latents and others are compared in whole models:
tests/convert/test_families.py."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from attention_layers import D, H, agree, d, layer
from headrace.extra.capped import CappedSpec
from headrace.extra.dense import QUERIES
from headrace.extra.growing import GrowingSpec
from headrace.extra.late_norm import LateNormSpec
from headrace.extra.specs.latent import LatentSpec
from headrace.layers.rotary import angles, frequencies
from headrace.spec import AttentionSpec, Pattern, Rope
from headrace.utils.errors import InputError
from headrace.verification.verify import relative
from tiny import perturbed

# --- frequencies -----------------------------------------------------------------------------------------------------

THEIRS = {"original": "original_max_position_embeddings", "amplitude": "attention_factor"}
THEIRS |= {"short": "short_factor", "long": "long_factor"}
BOUNDS = {"yarn": {"slow": "beta_slow", "fast": "beta_fast"}}
BOUNDS["llama3"] = {"slow": "low_freq_factor", "fast": "high_freq_factor"}
DIVISORS = {"short": tuple(1 + i / 7 for i in range(8)), "long": tuple(2.0 + i for i in range(8))}
ROPES = {
    "default": Rope(), "linear": Rope("linear", factor=3.0), "dynamic": Rope("dynamic", factor=2.0, original=64),
    "yarn": Rope("yarn", factor=8.0, original=64),
    "yarn with all fields": Rope("yarn", factor=4.0, original=32, slow=0.3, fast=7.0, truncate=False, amplitude=1.5),
    "yarn of one channel": Rope("yarn", factor=4.0, original=64, slow=0.99, fast=1.0, truncate=False),
    "llama3": Rope("llama3", factor=8.0, original=64, slow=1.0, fast=4.0),
    "longrope": Rope("longrope", factor=8.0, original=64, **DIVISORS),
    "longrope with an amplitude": Rope("longrope", original=64, amplitude=1.25, **DIVISORS),
}  # fmt: skip


def described(rope, theta, part=1.0):
    """Their rope_parameters."""
    names = THEIRS | BOUNDS.get(rope.kind, {})
    values = {their: getattr(rope, our) for our, their in names.items() if getattr(rope, our) is not None}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    more = {"truncate": rope.truncate} if rope.kind == "yarn" else {}
    return values | more | {
        "rope_type": rope.kind, "rope_theta": theta, "factor": rope.factor, "partial_rotary_factor": part
    }  # fmt: skip


@pytest.mark.parametrize("length", [30, 64, 65, 500])
@pytest.mark.parametrize(
    ("name", "dims"),
    # the divisors of longrope are of 16 channels
    [(name, n) for name, rope in ROPES.items() for n in (16, 32) if name != "default" and (n == 16 or not rope.short)],
)
def test_frequencies_equal_those_of_transformers(name, dims, length):
    rope, theta = ROPES[name], 5000.0
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=64,
        rope_parameters=described(rope, theta, dims / 32),
    )  # fmt: skip
    expected, amplitude = ROPE_INIT_FUNCTIONS[rope.kind](config, seq_len=length)
    ours = frequencies(rope, theta, dims, torch.tensor([[length]])).flatten()
    assert ((ours / expected.double() - 1).abs() < 1e-6).all() and math.isclose(rope.scale, amplitude, rel_tol=1e-12)


@pytest.mark.parametrize("length", [40, 90])
@pytest.mark.parametrize("name", ROPES)
def test_angles_equal_those_of_transformers(name, length):
    """One length for the call, which is the longest position that transformers sees."""
    rope = ROPES[name]
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=2, max_position_embeddings=64, rope_parameters=described(rope, 5000.0)
    )
    positions = torch.arange(length)[None]
    ours = angles(positions, rope, 5000.0, 16, torch.tensor([[length]]))
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    for mine, other in zip(ours, theirs, strict=True):
        assert (torch.cat([mine, mine], -1)[:, :, 0] - other).abs().max() < 1e-5  # their angles are float32


def test_ropes_that_do_not_fit_the_heads_are_refused():
    lists = Rope("longrope", original=4, short=(1.0,), long=(1.0,))
    for spec, sentence in [
        (AttentionSpec(rope=Rope(dims=12)), "does not fit a head dimension of 8"),
        (AttentionSpec(rope=lists), "rope.short has 1 numbers; expected 4, one per frequency"),
        (AttentionSpec(head_dim=5), "needs an even head dimension; got 5"),
        (LatentSpec(shared_dim=3), "needs an even head dimension; got 3"),
    ]:
        with pytest.raises(InputError, match=sentence):
            layer(spec)
    for theta, base in ((1.0, 1e4), (None, 1.0)):
        with pytest.raises(InputError, match=r"base 1\.0 of the frequencies, theta; expected more than 1"):
            layer(AttentionSpec(rope=Rope("yarn", theta=theta, original=64)), rope_theta=base)(torch.randn(1, 2, 32))


@pytest.mark.parametrize("spec", [AttentionSpec(kv_heads=2), LatentSpec(shared_dim=8)], ids=["gqa", "mla"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_decoding_with_frequencies_by_length_equals_recomputing(kind, spec):
    """The cache has keys before rotation, so that tokens after the original length rotate all of them anew."""
    divisors = {"short": (1, 2, 3, 4), "long": (4, 3, 2, 7)} if kind == "longrope" else {}
    made = layer(replace(spec, rope=Rope(kind, factor=2.0, original=6, **divisors)))
    x, state = torch.randn(2, 12, D).double(), None
    for t in range(12):
        y, state = made(x[:, t : t + 1], state)
        assert relative(y, made(x[:, : t + 1])[0][:, -1:]) < 1e-12
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, :4] = False
    padded, alone = made(x, mask=mask)[0][1, 4:], made(x[1:, 4:])[0][0]
    assert relative(padded, alone) < 1e-12
    pack = made(x.flatten(0, 1)[None], cu_seqlens=torch.tensor([0, 12, 24]))[0]
    assert relative(pack[0], made(x)[0].flatten(0, 1)) < 1e-12


# --- bounded logits and scales ---------------------------------------------------------------------------------------


def capped(made, x, since=0):
    """The output of a layer with a bound of the logits, from a token on, by a loop over all pairs."""
    spec, out = made.spec, torch.zeros(*x.shape[:2], H, d, dtype=x.dtype)
    q, k, v = (p(x).unflatten(-1, (-1, d)) for p in (made.q_proj, made.k_proj, made.v_proj))
    for b, t, h in product(range(len(x)), range(since, x.shape[1]), range(H)):
        group = h * k.shape[2] // H
        last = t if made.causal else x.shape[1] - 1
        pairs = [s for s in range(last + 1) if spec.pattern is None or t - s < spec.pattern.window]
        logits = [spec.cap * torch.tanh(q[b, t, h] @ k[b, s, group] / d**0.5 / spec.cap) for s in pairs]
        more = {False: [], True: [torch.zeros(())], "learned": [made.sinks[h] if made.sinks is not None else None]}
        weights = torch.stack(logits + more[spec.null]).softmax(0)
        out[b, t, h] = sum(w * v[b, s, group] for w, s in zip(weights, pairs, strict=False))
    return made.o_proj(out[:, since:].flatten(2))


@pytest.mark.parametrize("null", [False, True, "learned"])
@pytest.mark.parametrize("where", ["causal", "window", "encoder"])
def test_bounded_logits_equal_a_loop_over_all_pairs(where, null):
    """Also in several pieces of queries, and with gradients."""
    pattern = Pattern(3) if where == "window" else None
    spec = CappedSpec(2, rotary=False, null=null, pattern=pattern, cap=1.5)
    made, x = perturbed(layer(spec, causal=where != "encoder"), 0.5), torch.randn(2, 7, D).double()
    agree(lambda x: made(x)[0], lambda x: capped(made, x), x, 1e-12, made.parameters())
    if where != "window":
        T = 2 * QUERIES + 3
        x = torch.randn(1, T, D).double()
        assert relative(made(x)[0][:, -2:], capped(made, x, T - 2)) < 1e-12


def test_bounded_logits_are_not_rounded_to_the_precision_of_the_queries():
    made, qkv = layer(CappedSpec()), [8 * torch.randn(1, 20, H, d).bfloat16() for _ in range(3)]
    wide = made.weigh(*(x.float() for x in qkv), causal=True)
    assert torch.equal(made.weigh(*qkv, causal=True), wide.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(made.weigh(*(x.float() for x in qkv), causal=True), wide)


def test_what_has_no_bound_of_the_logits_is_refused():
    for changes in ({"form": "tiles"}, {"buckets": 8}, {"pattern": Pattern(4, random=1)}):
        with pytest.raises(InputError, match=r"\(cap\) supports neither form='tiles', buckets nor pattern\.random"):
            CappedSpec(**changes)
    with pytest.raises(InputError, match=r"CappedSpec\.cap=0\.0; expected more than 0"):
        CappedSpec(cap=0.0)
    for spec in (CappedSpec(pattern=Pattern(4)), GrowingSpec(pattern=Pattern(4)), LateNormSpec(pattern=Pattern(4))):
        with pytest.raises(InputError, match=r"a pattern with .* is of causal attention; expected pattern=None"):
            layer(spec, causal=False)


@pytest.mark.parametrize(
    ("mixer", "width", "last"),
    [("transformer(", 8, "q_proj"), ("transformer(qk_norm=head, ", 8, "q_norm"), ("mla(", 12, "q_proj")],
)
def test_scale_may_be_a_number(mixer, width, last):
    """It replaces d^-1/2, after the norm of q: as a last factor of q."""
    named, number = layer(mixer + "scale=key)"), layer(mixer + "scale=3)")
    number.load_state_dict(named.state_dict())
    named.get_submodule(last).weight.data.mul_(3 * width**0.5)
    x = torch.randn(1, 9, D).double()
    assert relative(number(x)[0], named(x)[0]) < 1e-12
