"""The stack: softmax attention's masks, packs, states and agreement with Llama, and matching of parameters."""

import math

import pytest
import torch
import torch.nn.functional as F

import headrace
from headrace import InputError, zoo
from headrace.comparison.plan import match_intermediate_size
from headrace.extra.capped import CappedSpec
from headrace.extra.growing import GrowingSpec
from headrace.extra.late_norm import LateNormSpec
from headrace.layers import SoftmaxAttention, build
from headrace.layers.attention.sdpa import attend
from headrace.layers.blocks.block import Sizes
from headrace.layers.blocks.stack import Backbone
from headrace.layers.blocks.widths import default_intermediate_size
from headrace.layers.packing import padding_mask
from headrace.ops.sequences import Sequences
from headrace.spec import AttentionSpec, Pattern, Rope
from tiny import by_state, close, covering

D, H = 24, 6


SPECS = {
    "full": AttentionSpec(), "grouped": AttentionSpec(kv_heads=2), "no rotary": AttentionSpec(rotary=False),
    "null": AttentionSpec(null=True), "distances": AttentionSpec(rotary=False, buckets=4),
    "tiles": AttentionSpec(form="tiles"), "window": AttentionSpec(pattern=Pattern(3)),
    "window and first": AttentionSpec(kv_heads=2, pattern=Pattern(2, first=3)),
    "capped": CappedSpec(kv_heads=2, null="learned", cap=2.0),
    "capped window": CappedSpec(kv_heads=2, pattern=Pattern(3, first=1), cap=2.0),
    "capped, forgetting": CappedSpec(rotary=False, forget=True, cap=2.0),
    "late norms": LateNormSpec(kv_heads=2, rope=Rope("yarn", factor=4.0, original=4)),
    "late norms in a window": LateNormSpec(kv_heads=2, pattern=Pattern(3), weights=False),
    "growing": GrowingSpec(kv_heads=2, growth=1.0, period=3),
    "growing in a window": GrowingSpec(kv_heads=2, pattern=Pattern(3), growth=1.0, period=2),
    "random": AttentionSpec(null=True, buckets=4, pattern=Pattern(2, first=1, random=1, block=2)),
}  # fmt: skip


@pytest.fixture(params=SPECS)
def attention(request):
    return build(SPECS[request.param], hidden_size=D, num_heads=H).double()


def inputs(B, T):
    return torch.randn(B, T, D, dtype=torch.float64)


@pytest.mark.parametrize(("name", "layer"), [("distances", "EarlyAttention"), ("capped", "CappedAttention")])
def test_attention_of_another_layer_is_refused(name, layer):
    with pytest.raises(InputError, match=rf"has a layer of its own, .*{layer}; expected headrace\.layers\.build"):
        SoftmaxAttention(SPECS[name], hidden_size=D, num_heads=H)


def test_padding_only_sees_itself():
    """And does see itself: a query that sees nothing would be NaN in some kernels, and in their gradients."""
    q, k, v = torch.randn(3, 1, 4, 2, 8, dtype=torch.float64).unbind()
    out = attend(q, k, v, torch.tensor([[False, True, False, True]]))
    close(out[:, 0], v[:, 0])


def test_attention_separates_packed_sequences(attention):
    """Over two packs, with empty sequences, against each sequence alone; then one token for each from the state."""
    lengths, more = [3, 0, 1, 5], [0, 2, 4, 1]
    x, late, last = inputs(1, 9), inputs(1, 7), inputs(4, 1)
    first, state = attention(x, cu_seqlens=F.pad(torch.tensor(lengths).cumsum(0), (1, 0)))
    second, state = attention(late, state, cu_seqlens=F.pad(torch.tensor(more).cumsum(0), (1, 0)))
    third, _ = attention(last, state)
    pairs = (((x, first), lengths), ((late, second), more))
    pieces = [zip(*(t[0].split(n) for t in pair), strict=True) for pair, n in pairs]
    for (x1, y1), (x2, y2), x3, y3 in zip(*pieces, last, third, strict=True):
        close(torch.cat([y1, y2, y3]), attention(torch.cat([x1, x2, x3])[None])[0][0])


@pytest.mark.parametrize("name", ["full", "grouped", "no rotary", "null"])
def test_attention_without_padding_uses_the_fast_kernel(name, monkeypatch):
    attention, seen = SoftmaxAttention(SPECS[name], hidden_size=D, num_heads=H).double(), []
    original = F.scaled_dot_product_attention

    def spy(q, k, v, mask, **options):
        seen.append((mask, options["is_causal"]))
        return original(q, k, v, mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    _, state = attention(inputs(2, 5))
    attention(inputs(2, 1), state)
    attention(inputs(1, 5), cu_seqlens=torch.tensor([0, 2, 5]))
    assert seen == [(None, True), (None, False), (None, True), (None, True)]


def test_half_precision_norms_are_computed_in_float32():
    norm = Backbone([], Sizes(hidden_size=512, num_heads=1, intermediate_size=None)).bfloat16().norm
    x = torch.randn(8, 512).bfloat16()
    assert torch.equal(norm(x), F.rms_norm(x.float(), (512,), eps=1e-6).bfloat16())


def test_default_mlp_width_has_eight_hidden_sizes_squared_of_weights():
    assert [default_intermediate_size(n) for n in (1024, 2048, 768, 256, 128, 64)] == [2816, 5632, 2048, 768, 352, 176]


def test_mlp_width_can_match_a_parameter_count():
    def build(width, name="gla"):
        return Backbone([zoo.get(name)] * 2, Sizes(hidden_size=64, num_heads=4, intermediate_size=width))

    target = sum(p.numel() for p in build(100, "retnet").parameters())
    size = lambda width: sum(p.numel() for p in build(width).parameters())  # noqa: E731
    width = match_intermediate_size(size, target)
    best = min(range(1, 200), key=lambda w: abs(size(w) - target))
    assert width == best != 100
    with pytest.raises(InputError, match="with the narrowest MLP; expected at most target=10"):
        match_intermediate_size(size, 10)
    assert match_intermediate_size(lambda width: 7, target) is None, "of a model without an MLP"


def test_invalid_masks_are_refused():
    x, ends = inputs(2, 3), torch.tensor([0, 1, 3])
    assert padding_mask(torch.ones(2, 5), x, False, 2) is None
    assert padding_mask(torch.tensor([[1, 1, 0, 1]] * 2), x, False, 1).tolist() == [[True, False, True]] * 2
    with pytest.raises(InputError, match=r"has shape \[2, 5\]; expected \[2, 3\] or, with the tokens before, \[2, 4\]"):
        padding_mask(torch.ones(2, 5), x, False, 1)
    for mask in (torch.ones(2, 5), torch.ones(2, 2), torch.ones(3, 3), torch.ones(2, 1, 3, 3)):
        with pytest.raises(InputError, match=r"attention_mask has shape .* expected \[2, 3\]"):
            padding_mask(mask, x, False)
    with pytest.raises(InputError, match="expected B=1, got B=2"):
        Sequences.of(x, ends)
    with pytest.raises(InputError, match="marks padding in packed sequences; expected cu_seqlens alone"):
        padding_mask(torch.tensor([[0, 1, 1]]), x[:1], True)


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_padding_reaches_nothing_and_outputs_zeros(causal):
    mask, x = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 0, 0]]).bool(), torch.randn(2, 5, 32)
    spoilt = x.masked_fill(~mask[..., None], torch.nan)
    for name in covering(zoo.names()):
        if causal or getattr(zoo.get(name), "pattern", None) is None:
            layer = headrace.Mixer(name, hidden_size=32, num_heads=4, causal=causal)
            y, state = layer(spoilt, mask=mask)
            assert not y[~mask].any(), name
            torch.testing.assert_close(y, layer(x, mask=mask)[0])
            if causal:
                assert layer(x[:, :1], state)[0].isfinite().all(), name


MASK = torch.ones(2, 9, dtype=torch.bool)
REFUSED = [
    ({"x": torch.zeros(9, 32)}, r"x has shape \[9, 32\]; expected \[B, T, 32\]"),
    ({"x": torch.zeros(2, 9, 16)}, r"x has shape \[2, 9, 16\]; expected \[B, T, 32\]"),
    ({"mask": MASK[:, :8]}, r"mask has dtype torch.bool and shape \[2, 8\]; expected torch.bool and \[2, 9\]"),
    ({"mask": MASK.float()}, r"mask has dtype torch.float32 and shape \[2, 9\]"),
    ({"x": [[0.5]]}, r"x=\[\[0.5\]\]; expected a tensor"),
    ({"mask": [[True] * 9] * 2}, r"mask=\[\[True, .*; expected a tensor"),
    ({"mask": MASK, "cu_seqlens": torch.tensor([0, 9])}, "mask and cu_seqlens are both given"),
    ({"x": torch.zeros(2, 9, 32, dtype=torch.long)}, "x has dtype torch.int64; expected a floating-point dtype"),
    ({"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens packs sequences into one row; expected B=1, got B=2"),
]


@pytest.mark.parametrize(
    "mixer", ["softmax-gla", "transformer", "sliding-window", "mamba", "rwkv7", "softmax-rnn-norm"]
)
@pytest.mark.parametrize(("given", "sentence"), REFUSED)
def test_layer_refuses_wrong_shapes(mixer, given, sentence):
    layer = headrace.Mixer(mixer, hidden_size=32, num_heads=4)
    with pytest.raises(InputError, match=sentence):
        layer(**{"x": torch.zeros(2, 9, 32)} | given)


@pytest.mark.parametrize(("dtype", "ends"), [(torch.uint8, [0, 120, 120, 200]), (torch.int8, [0, 100, 127])])
def test_layer_takes_bounds_of_any_integer_dtype(dtype, ends):
    """Lengths and positions are sums and differences of bounds, which would overflow in 8 bits."""
    for name in by_state(zoo.names()):
        layer, x = headrace.Mixer(name, hidden_size=16, num_heads=2), torch.randn(1, ends[-1], 16)
        with torch.no_grad():
            actual, expected = (layer(x, cu_seqlens=torch.tensor(ends, dtype=kind))[0] for kind in (dtype, torch.long))
        assert torch.equal(actual, expected), name


def test_layer_refuses_bounds_of_other_tokens():
    shape = r"cu_seqlens has shape \[.*\] and dtype .*; expected shape \[N \+ 1\] with N ≥ 1 and an integer dtype"
    values = r"cu_seqlens=\[.*\]; expected 0 = c_0 ≤ … ≤ c_N = T = 9"
    refused = {
        "expected a tensor of integers": [[0, 9], (0, 9)],
        shape: [torch.tensor(x) for x in ([], [0], [[0, 9]], [0.0, 9.0], [False, True])],
        values: [torch.tensor(x) for x in ([0, 5], [2, 9], [0, 6, 4, 9], [0, 10])],
        "cu_seqlens is on meta and x is on cpu; expected the same device": [torch.tensor([0, 9], device="meta")],
    }
    for name in by_state(zoo.names()):
        layer = headrace.Mixer(name, hidden_size=32, num_heads=4)
        for sentence, bounds in refused.items():
            for cu_seqlens in bounds:
                with pytest.raises(InputError, match=sentence):
                    layer(torch.zeros(1, 9, 32), cu_seqlens=cu_seqlens)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"layer_idx": 2, "num_layers": 2}, "layer_idx=2; expected 0 to 1"),
        ({"layer_idx": 0.5}, "layer_idx=0.5; expected 0 to 0"),
        ({"num_layers": 2.5}, "num_layers=2.5; expected a positive integer"),
        *(({"norm_eps": x}, f"norm_eps={x!r}; expected a positive number") for x in (-1, math.nan, "x")),
        *(({"rope_theta": x}, f"rope_theta={x!r}; expected a positive number") for x in (0, -3, math.nan)),
        ({"causal": "no"}, "causal='no'; expected True or False"),
        *(({"mixer": x}, "mixer=.*; expected a name of the zoo, a spec or its JSON") for x in (3, None, ["gla"])),
        ({"mixer": "sofmax-gla"}, "is unknown"), ({"mixer": "no"}, "names are( [a-z0-9-]+,?){3} "),
        ({"mixer": "bert"}, "whole model"), ({"mixer": "jamba"}, "is a Decoder; expected the mixer of one layer"),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused(settings, sentence):
    with pytest.raises(InputError, match=sentence):
        headrace.Mixer(**{"mixer": "rwkv6", "hidden_size": 32} | settings)
