"""A sliding window beside a linear memory (LoLCATs, arXiv 2410.10254): its equation, token by token in float64, from
the layer's weights alone; its limits; and its state."""

from itertools import cycle, product

import pytest
import torch

import tiny
from headrace import InputError, Mixer, layers, zoo
from headrace.extra.windowed import window_sums
from headrace.layers.rotary import angles, rotate
from headrace.training.parameters import undecayed
from headrace.verification.verify import relative

B, T, D, H = 2, 13, 24, 4
OWN = [
    "", ", kv_heads=2", ", map=exp", ", decay.kind=sigmoid-head, kv_heads=1", ", decay.kind=retnet", ", qk_norm=head",
    ", qk_norm=joint, kv_heads=2",
]  # fmt: skip


def layer_of(expression, dtype=torch.float64):
    torch.manual_seed(0)
    return tiny.perturbed(Mixer(expression, hidden_size=D, num_heads=H).to(dtype), 0.5)


def operands(mixer, x):
    """q, k [B, T, H, K] after the rotation, v [B, T, H, V] and the decays [B, T, H]."""
    parts = {name: x @ mixer.part(name).T for name in mixer.parts}
    q, k, v = (parts[name].unflatten(-1, (-1, D // H)) for name in "qkv")
    if mixer.spec.qk_norm != "none":
        norms = (mixer.q_norm, q), (mixer.k_norm, k)
        q, k = (norm(y.flatten(2).unflatten(2, (-1, *norm.weight.shape))).view_as(y) for norm, y in norms)
    k, v = (y.repeat_interleave(H // y.shape[2], 2) for y in (k, v))
    turn = angles(torch.arange(T)[None], mixer.spec.rope, mixer.rope_theta, D // H)
    decay = x.new_ones(B, T, H)
    if mixer.spec.decay.kind == "sigmoid-head":
        decay = (parts["decay"] + mixer.decay.bias).sigmoid() ** (1 / mixer.spec.decay.temperature)
    elif mixer.spec.decay.kind == "retnet":
        decay = (1 - 2 ** (-5 - torch.arange(H, dtype=x.dtype))).expand(B, T, H)
    return rotate(q, turn), rotate(k, turn), v, decay


def features(weight, x, kind):
    y = torch.einsum("hji,hi->hj", weight, x * (D // H) ** -0.25)
    return torch.cat([y.softmax(-1), (-y).softmax(-1)] if kind == "softmax" else [y.exp(), (-y).exp()], -1)


def literal(mixer, x, window):
    """The weights of all pairs of tokens."""
    (q, k, v, decay), phi, out = operands(mixer, x), mixer.learned_map, []
    gates = [torch.ones(B, T, H, dtype=x.dtype)] * 2
    if mixer.spec.competition is not None:
        raw = [(x @ mixer.part(name).T).unflatten(-1, (-1, D // H)) for name in "qk"]
        raw[1] = raw[1].repeat_interleave(H // raw[1].shape[2], 2)
        both = mixer.read_competition, mixer.write_competition
        gates = [H * (y * gate.weight).sum(-1).softmax(-1) for y, gate in zip(raw, both, strict=True)]
    read, write = gates
    for b in range(B):
        for t in range(T):
            weights = torch.zeros(H, T, dtype=x.dtype)
            near = range(max(t - window + 1, 0), t + 1)
            logits = torch.stack([(q[b, t] * k[b, i]).sum(-1) for i in near], 1) * (D // H) ** -0.5
            largest = logits.max(1, keepdim=True).values
            weights[:, near.start : t + 1] = mixer.window_factor.sigmoid()[:, None] * (logits - largest).exp()
            for i in range(t - window + 1):
                old = features(phi.q, q[b, t], mixer.spec.map) * features(phi.k, k[b, i], mixer.spec.map)
                weights[:, i] = old.sum(-1) * decay[b, i + 1 : t - window + 1].prod(0)
            weights = weights * write[b].T
            out.append(read[b, t, :, None] * torch.einsum("ht,thv->hv", weights / weights.sum(1, keepdim=True), v[b]))
    return torch.stack(out).view(B, T, -1) @ mixer.o_proj.weight.T


# Every window with every field, the gates in every other one.
@pytest.mark.parametrize(
    ("name", "own", "window"),
    [(name, *each) for name, each in zip(cycle(["lolcats", "softmax-lolcats"]), product(OWN, (1, 3, 20)))],
)
def test_outputs_and_gradients_are_those_of_the_equation(name, own, window):
    mixer, x = layer_of(f"{name}(window={window}{own})"), torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    slope, of = torch.randn(B, T, D, dtype=torch.float64), [x, *mixer.parameters()]
    ours, theirs = mixer(x)[0], literal(mixer, x, window)
    assert relative(ours, theirs) < 1e-12
    pairs = [torch.autograd.grad((y * slope).sum(), of, allow_unused=True) for y in (ours, theirs)]
    names = ["x", *(name for name, _ in mixer.named_parameters())]
    found, exact = (dict(zip(names, grads, strict=True)) for grads in pairs)
    for name, gradient in exact.items():
        unused = gradient is None or (window > T and ("learned_map" in name or name == "window_factor"))
        assert (found[name] == 0).all() if unused else relative(found[name], gradient) < 1e-10, name


def test_without_a_window_it_is_linear_attention():
    mixer, plain = layer_of("lolcats(window=0)"), layer_of("hedgehog")
    plain.load_state_dict(mixer.state_dict())
    x = torch.randn(B, T, D, dtype=torch.float64)
    assert torch.equal(mixer(x)[0], plain(x)[0]) and mixer.summands == {}


def sums(mixer, x, *absent):
    """What the layer gives where these parts give 0."""
    hooks = [mixer.summands[name].register_forward_hook(nothing) for name in absent]
    out = mixer(x)[0]
    for hook in hooks:
        hook.remove()
    return out


def nothing(module, given, out):
    return (torch.zeros_like(out[0]), out[1]) if isinstance(out, tuple) else torch.zeros_like(out)


def test_without_its_memory_it_is_sliding_window_attention():
    mixer, x = layer_of("lolcats(window=4, kv_heads=2)"), torch.randn(B, T, D, dtype=torch.float64)
    sliding = layers.build(zoo.get("sliding-window(pattern.window=4, kv_heads=2)"), hidden_size=D, num_heads=H).double()
    of = {f"{name}_proj.weight": mixer.part(name) for name in "qkv"} | {"o_proj.weight": mixer.o_proj.weight}
    sliding.load_state_dict(of)
    assert relative(sums(mixer, x, "memory"), sliding(x)[0]) < 1e-12 and sums(mixer, x, "memory", "window").eq(0).all()


def test_without_its_window_it_is_linear_attention_some_tokens_later():
    """Which is the equation where the window has the factor 0."""
    w, x = 3, torch.randn(B, T, D, dtype=torch.float64)
    mixer = layer_of(f"lolcats(window={w}, kv_heads=2)")
    far = sums(mixer, x, "window")
    torch.nn.init.constant_(mixer.window_factor, -torch.inf)
    assert far[:, :w].eq(0).all() and relative(far[:, w:], literal(mixer, x, w)[:, w:]) < 1e-12


@pytest.mark.parametrize("splits", [[1] * T, [2, 1, 10], [12, 1], [3, 3, 7]])
def test_a_state_of_one_size_continues(splits):
    mixer, x = layer_of("softmax-lolcats(window=3, decay.kind=sigmoid-head, kv_heads=2)"), torch.randn(B, T, D).double()
    whole, last = mixer(x)
    state, pieces = None, []
    for piece in x.split(splits, 1):
        y, state = mixer(piece, state)
        pieces.append(y)
        shapes = {name: tuple(y.shape[1:]) for name, y in state._asdict().items()}
        assert shapes == mixer.spec.state_shapes(D, H) | {"tokens": ()}
    assert relative(torch.cat(pieces, 1), whole) < 1e-12
    for name, y in state._asdict().items():
        assert relative(y.double(), getattr(last, name).double()) < 1e-12, name


@pytest.mark.parametrize("window", [1, 3, 5])
def test_sequences_of_a_pack_do_not_see_each_other(window):
    """Short and long ones, none and one token, and a state before each."""
    mixer, lengths = layer_of(f"lolcats(window={window}, kv_heads=2, decay.kind=sigmoid-head)"), [4, 0, 1, 7, 2]
    rows = [torch.randn(1, n, D, dtype=torch.float64) for n in lengths]
    old = [mixer(torch.randn(1, 6, D, dtype=torch.float64))[1] for _ in lengths]
    state = type(old[0])(*(torch.cat(parts) for parts in zip(*old, strict=True)))
    y, after = mixer(torch.cat(rows, 1), state, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
    for n, (row, before, found) in enumerate(zip(rows, old, y.split(lengths, 1), strict=True)):
        expected, end = mixer(row, before)
        assert not row.shape[1] or relative(found, expected) < 1e-12
        assert all(torch.allclose(a[n : n + 1], b, rtol=1e-12, atol=1e-12) for a, b in zip(after, end, strict=True))


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_logits_of_any_size_give_finite_means(scale):
    q, k = (scale * torch.randn(1, n, 2, 4) for n in (9, 12))
    v, exists = torch.rand(1, 12, 2, 3), torch.arange(12)[None] >= 2
    out = window_sums(q, k, torch.cat([v, torch.ones(1, 12, 2, 1)], -1), exists)
    assert out.isfinite().all() and (out[..., -1] >= 1).all()


def test_what_is_no_number_stays_visible():
    mixer, x = layer_of("lolcats(window=3)"), torch.randn(B, T, D, dtype=torch.float64)
    x[0, 5] = torch.nan
    y = mixer(x)[0]
    assert y[0, 5:].isnan().all() and y[1].isfinite().all()


def test_a_new_layer_has_the_published_factor():
    mixer = Mixer("lolcats", hidden_size=D, num_heads=H)
    torch.testing.assert_close(mixer.window_factor.sigmoid(), torch.full((H,), 0.1))
    assert "window_factor" in undecayed(mixer) and mixer.spec.window == 64


@pytest.mark.parametrize(
    "fields",
    [
        "inputs.conv=4", "inputs.qk_norm=l2", "decay.kind=sigmoid", "heads.qk_groups=2", "read.norm=rms",
        "map=none, inputs.feature_map=relu", "write.beta=sigmoid", "inputs.shift=lerp", "inputs.value_gate=true",
    ],
)  # fmt: skip
def test_what_a_window_does_not_have_is_named(fields):
    with pytest.raises(InputError, match="window=64 is of a mean with the weights of a learned map"):
        zoo.get(f"lolcats({fields})")


@torch.no_grad()
def test_a_fixed_decay_that_memories_keep_from_is_one_of_the_token():
    """With competition.freeze, so that the state has it for the tokens of the window."""
    fields = "window=2, decay.kind=retnet, competition.top_k=2, competition.freeze=true"
    mixer = Mixer(f"softmax-lolcats({fields})", hidden_size=D, num_heads=H).double()
    torch.nn.init.normal_(mixer.write_competition.weight)
    x, state, found = torch.randn(2, 5, D, dtype=torch.float64), None, []
    for t in range(5):
        y, state = mixer(x[:, t : t + 1], state)
        found.append(y)
    assert relative(torch.cat(found, 1), mixer(x)[0]) < 1e-12
    assert mixer.spec.state_shapes(D, H)["decay"] == state.decay.shape[1:]


def test_heads_of_keys_divide_those_of_queries():
    with pytest.raises(InputError, match="kv_heads=3 does not divide num_heads=4"):
        zoo.get("lolcats(kv_heads=3)").head_dims(D, H)


@pytest.mark.filterwarnings("ignore::headrace.GateWarning")
def test_heads_that_no_token_of_a_window_chose_have_finite_gradients():
    mixer = layer_of("softmax-lolcats(window=2, competition.top_k=1)", torch.float32)
    x = torch.randn(B, T, D, requires_grad=True)
    gradients = torch.autograd.grad(mixer(x)[0].square().sum(), [x, *mixer.parameters()])
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.filterwarnings("ignore::headrace.GateWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [30.0, 100.0, 300.0])
def test_write_gates_that_are_nearly_0_have_finite_gradients(scale, dtype):
    """Where a head has such gates for all tokens, so is the sum of their weights, and a gradient is over its square."""
    mixer = layer_of("softmax-lolcats(window=2)", dtype)
    mixer.write_competition.weight.data *= scale
    x = torch.randn(B, T, D, dtype=dtype, requires_grad=True)
    gradients = torch.autograd.grad(mixer(x)[0].square().sum(), [x, *mixer.parameters()])
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("factor", [-44.0, -88.0, -110.0])
def test_a_factor_that_is_nearly_0_has_a_gradient(factor):
    found = []
    for dtype in (torch.float64, torch.float32):
        mixer = layer_of("lolcats(window=4)").to(dtype)
        torch.nn.init.constant_(mixer.window_factor, factor)
        torch.manual_seed(1)
        mixer(torch.randn(B, T, D).to(dtype))[0].square().sum().backward()
        found.append(torch.cat([parameter.grad.double().flatten() for parameter in mixer.parameters()]))
    assert relative(found[1], found[0]) < 1e-5
