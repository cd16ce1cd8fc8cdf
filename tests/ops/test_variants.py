"""Mixers whose equations are told by fields of the spec, against those equations written out in float64."""

import pytest
import torch
import torch.nn.functional as F

from attention_layers import D, H, agree, heads, layer, randomized
from headrace import zoo
from headrace.extra.fast_weights import sum_norm
from headrace.layers.linear.features import FEATURE_MAPS
from headrace.verification.verify import relative
from tiny import covering

T = 50


def build(name):
    return randomized(layer(name))


# --- xPos ------------------------------------------------------------------------------------------------------------


def test_xpos_equals_its_definition():
    """q_n e^{inθ} ζ^{n/512} against k_m e^{imθ} ζ^{−m/512} for complex pairs of channels, all pairs of tokens, no decay
    besides."""
    mixer, x = build("xpos-retnet"), torch.randn(2, T, D).double()
    q, k, v = heads(mixer, x)
    i, n = torch.arange(mixer.K // 2).double(), torch.arange(T).double()[:, None, None]
    theta, zeta = 10000 ** (-2 * i / mixer.K), (i / (mixer.K / 2) + 0.4) / (1 + 0.4)
    pairs = lambda y: torch.complex(*y.chunk(2, -1)) * torch.exp(1j * n * theta)  # noqa: E731
    q, k = pairs(q) * zeta ** (n / 512), pairs(k) * zeta ** (-n / 512)
    scores = torch.einsum("bnhi,bmhi->bhnm", q, k.conj()).real.tril() * mixer.K**-0.5
    out = F.rms_norm(torch.einsum("bhnm,bmhv->bnhv", scores, v), (mixer.V,), mixer.norm_weight, 1e-6)
    expected = mixer.o_proj((out * F.silu(next(heads(mixer, x, ["gate"])))).flatten(-2))
    assert relative(mixer(x)[0], expected) <= 1e-12


def test_xpos_is_finite_at_far_positions():
    """At position 40 000 the smallest ζ^{−m/512} is e^98, beyond float32."""
    mixer, x = build("xpos-retnet").float(), torch.randn(1, T, D)
    near, state = mixer(x)
    far = mixer(x, state._replace(tokens=torch.tensor([40_000]), memory=torch.zeros_like(state.memory)))[0]
    assert far.isfinite().all()
    assert relative(far, near) <= 1e-4  # only distances count


# --- fast weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shifts", [1, 2, 3])
def test_fast_weight_features_are_sparse_and_sum_to_one(shifts):
    x = torch.randn(1000, 6).double()
    features = FEATURE_MAPS[f"dpfp-{shifts}"](x)
    assert features.shape == (1000, 12 * shifts)
    r = torch.cat([x, -x], -1).clamp(min=0)
    expected = [r[:, i] * r[:, (i + j) % 12] for j in range(1, shifts + 1) for i in range(12)]
    assert torch.equal(features, torch.stack(expected, -1))
    k = sum_norm(features)
    assert (k >= 0).all()
    assert (k.square().sum(-1) <= 1).all()  # the delta rule needs β |k|² ≤ 2
    assert torch.equal(sum_norm(torch.zeros(6)), torch.zeros(6))


# --- a write strength that sees the residual -------------------------------------------------------------------------


def residual_delta(mixer, x):
    """Token by token, the memory before the token's chunk taken anew at each of its beginnings."""
    decays = mixer.decay(F.linear(x, mixer.part("decay")))
    logits = F.linear(x, mixer.part("beta"))
    q, k, v = heads(mixer, x)
    q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    S, out = x.new_zeros(len(x), H, mixer.K, mixer.V), []
    for t in range(x.shape[1]):
        if t % mixer.spec.write.residual_chunk == 0:
            before = S
        S, before = (decays[:, t, :, None, None].exp() * M for M in (S, before))
        read = lambda M, t=t: torch.einsum("bhk,bhkv->bhv", k[:, t], M)  # noqa: E731
        wrong, size = (y.square().sum(-1) for y in (v[:, t] - read(before), v[:, t]))
        beta = torch.sigmoid(logits[:, t] + mixer.residual.weight * (wrong - size) / (wrong + size))
        S = S + torch.einsum("bh,bhk,bhv->bhkv", beta, k[:, t], v[:, t] - read(S))
        out.append(mixer.K**-0.5 * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    out = F.rms_norm(torch.stack(out, 1), (mixer.V,), mixer.norm_weight, 1e-6)
    return mixer.o_proj((out * F.silu(next(heads(mixer, x, ["gate"])))).flatten(-2))


@pytest.mark.parametrize("look", [1, 7, 16, 40])
def test_residual_uses_the_memory_before_the_chunk(look):
    """Of one token: the exact residual. Outputs and all gradients."""
    mixer, x = build(f"residual-delta(inputs.conv=0, write.residual_chunk={look})"), torch.randn(2, T, D).double()
    agree(lambda x: mixer(x)[0], lambda x: residual_delta(mixer, x), x, 1e-11, mixer.parameters())


# --- several steps per token -----------------------------------------------------------------------------------------


def product_of_steps(mixer, x):
    """Token by token and step by step; the decay before the first step, the read after the last. The write gate is of
    the token, the softmax over the heads of the product of its keys and the weights."""
    n = mixer.spec.write.steps
    decay = 0 * x[..., :H] if mixer.decay is None else mixer.decay(F.linear(x, mixer.part("decay")))
    q, k, v, beta = heads(mixer, x, ["q", "k", "v", "beta"])
    gate = torch.ones_like(decay)
    if mixer.spec.competition is not None:
        gate = H * (k * mixer.write_competition.weight).sum(-1).softmax(-1)
        read = H * (q * mixer.read_competition.weight).sum(-1).softmax(-1)
    unit = lambda y: y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)  # noqa: E731
    q, k, v, beta = unit(q), unit(k.unflatten(-1, (n, -1))), v.unflatten(-1, (n, -1)), 2 * beta.sigmoid()
    S, out = x.new_zeros(len(x), H, mixer.K, mixer.V), []
    for t in range(x.shape[1]):
        S = decay[:, t, :, None, None].exp() * S
        for i in range(n):
            error = gate[:, t, :, None] * v[:, t, :, i] - torch.einsum("bhk,bhkv->bhv", k[:, t, :, i], S)
            S = S + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t, :, i], k[:, t, :, i], error)
        out.append(mixer.K**-0.5 * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    out = F.rms_norm(torch.stack(out, 1), (mixer.V,), mixer.norm_weight, 1e-6)
    out = out if mixer.spec.competition is None else out * read[..., None]
    out = out if mixer.gate is None else out * F.silu(next(heads(mixer, x, ["gate"])))
    return mixer.o_proj(out.flatten(-2))


@pytest.mark.parametrize("name", ["deltaproduct", "gated-deltaproduct", "softmax-gated-deltaproduct"])
@pytest.mark.parametrize("steps", [2, 3])
def test_several_steps_equal_their_product(name, steps):
    """Outputs and all gradients; decoding and packs: test_laws.py."""
    mixer, x = build(f"{name}(inputs.conv=0, write.steps={steps})"), torch.randn(2, T, D).double()
    agree(lambda x: mixer(x)[0], lambda x: product_of_steps(mixer, x), x, 1e-11, mixer.parameters())


# --- what the delta rule removes -------------------------------------------------------------------------------------


def general_delta(mixer, x):
    """Token by token: Comba with the share b of what is stored under k before the decay, and GDN-2 with β per key and a
    gate per value channel."""
    decays = mixer.decay(F.linear(x, mixer.part("decay")))
    decays = (decays if decays.dim() == 4 else decays[..., None]).exp()[..., None]
    q, k, v, beta = heads(mixer, x, ["q", "k", "v", "beta"])
    q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    beta, S, out = beta.sigmoid(), x.new_zeros(len(x), H, mixer.K, mixer.V), []
    for t in range(x.shape[1]):
        if mixer.spec.write.erase == "feedback":
            wrong = v[:, t] - mixer.general.feedback.sigmoid()[:, None] * torch.einsum("bhk,bhkv->bhv", k[:, t], S)
            S = decays[:, t] * S + torch.einsum("bhk,bhv->bhkv", beta[:, t] * k[:, t], wrong)
            read = q[:, t] - mixer.general.correction[:, None] * k[:, t]
        else:
            S = decays[:, t] * S
            removed = torch.einsum("bhk,bhkv->bhv", beta[:, t] * k[:, t], S)
            written = next(heads(mixer, x[:, t], ["write"])).sigmoid() * v[:, t]
            S, read = S + torch.einsum("bhk,bhv->bhkv", k[:, t], written - removed), q[:, t]
        out.append(mixer.K**-0.5 * torch.einsum("bhk,bhkv->bhv", read, S))
    out = F.rms_norm(torch.stack(out, 1), (mixer.V,), mixer.norm_weight, 1e-6)
    gate = F.linear(x, mixer.part("gate"))
    gate = gate if mixer.spec.read.gate == "sigmoid" else mixer.gate.up(gate)
    return mixer.o_proj((out * gate.unflatten(-1, (H, -1)).sigmoid()).flatten(-2))


@pytest.mark.parametrize("name", ["comba", "gated-deltanet-2"])
def test_what_is_removed_may_differ_from_what_is_written(name):
    mixer, x = build(f"{name}(inputs.conv=0)"), torch.randn(2, T, D).double()
    agree(lambda x: mixer(x)[0], lambda x: general_delta(mixer, x), x, 1e-11, mixer.parameters())


# --- a joint gate of low rank ----------------------------------------------------------------------------------------


def gates(mixer, x):
    """G^Q [B, T, H], P(r | h, q) and G^K [B, T, H, R], as softmaxes of the scores."""
    R = mixer.spec.memories_per_head
    q, k = heads(mixer, x, "qk")
    read = H * torch.einsum("bthk,hk->bth", q, mixer.read_competition.weight).softmax(-1)
    choice = torch.einsum("bthk,hrk->bthr", q, mixer.choice.weight).softmax(-1)
    scores = torch.einsum("bthk,hrk->bthr", k, mixer.write_competition.weight.unflatten(0, (H, R)))
    return read, choice, H * R * scores.flatten(2).softmax(-1).unflatten(-1, (H, R))


PLAIN = "decay.kind=none, inputs.rotary=false, read.norm=none, read.gate=none"


@pytest.mark.parametrize("rank", [2, 3])
def test_joint_gate_has_the_declared_rank(rank):
    """All pairs of tokens, weighted by P(h | q_t, k_s)."""
    mixer, x = build(f"softmax-retnet({PLAIN}, competition.memories_per_head={rank})"), torch.randn(2, T, D).double()
    read, choice, write = gates(mixer, x)
    joint = torch.einsum("bth,bthr,bshr->bhts", read, choice, write)
    assert (torch.linalg.matrix_rank(joint, rtol=1e-9) == rank).all()
    q, k, v = heads(mixer, x)
    scores = (torch.einsum("bthk,bshk->bhts", q, k) * mixer.K**-0.5 * joint).tril()
    assert relative(mixer(x)[0], mixer.o_proj(torch.einsum("bhts,bshv->bthv", scores, v).flatten(-2))) <= 1e-12


@pytest.mark.parametrize(
    "name",
    covering([name for name, spec in zoo.LINEAR.items() if spec.write.beta != "trapezoid" and name != "lolcats"]),
)
def test_joint_gate_starts_as_the_backbone(name):
    def start(name):
        torch.manual_seed(0)
        return layer(name)

    plain, joint = start(name), start(f"softmax-{name}(competition.memories_per_head=3)")
    shared = plain.state_dict()
    added = {key for key in joint.state_dict() if key not in shared and "residual" not in key}
    assert added == {"read_competition.weight", "write_competition.weight", "choice.weight"}
    x = torch.randn(2, T, D).double()
    y = joint(x)[0]
    assert relative(y, plain(x)[0]) <= 1e-12
    (gradient,) = torch.autograd.grad((y * torch.randn_like(y)).sum(), joint.write_competition.weight)
    first, second, third = gradient.unflatten(0, (joint.H, 3)).unbind(1)
    assert min(relative(first, second), relative(second, third), relative(third, first)) > 0.1
