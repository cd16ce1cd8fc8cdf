"""Matrix memories outside the algebra: against other libraries and the literal recurrence, at any decay they have."""

import importlib.util
import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

import tiny
from attention_layers import randomized
from equation import weighted_gradients
from headrace import InputError, Mixer, layers, linear_attention, zoo
from headrace.extra import chunks, dplr, gla_outer, rwkv7
from headrace.layers.base import Carried
from headrace.ops.sequences import Sequences
from headrace.verification.verify import relative, specimen
from peers import load

B, T, H, K, V = 2, 70, 3, 6, 5
D = 32


def agree(inputs, ours, theirs):
    """Both outputs, and their gradients to the inputs."""
    weight = torch.randn_like(ours)
    gradients = (torch.autograd.grad((y * weight).sum(), inputs, retain_graph=True) for y in (ours, theirs))
    assert relative(ours, theirs) <= 1e-5
    for mine, their in zip(*gradients, strict=True):
        assert relative(mine, their) <= 1e-5


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def chunkwise(module, x, lengths=None):
    """A module's chunkwise form from a random state, its operands [B, T, H, ·], over a batch or a pack."""
    ends = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    sequences = Sequences(x.q, ends)
    start = draw(sequences.count, H, x.q.shape[-1], x.v.shape[-1])
    return *chunks.chunkwise(module.form, x, sequences, start), start


def literally(module, x, start):
    """Its recurrence by `step`, one sequence per row."""
    S, out = start, []
    for t in range(x.q.shape[1]):
        o, S = module.step(type(x)(*(y[:, t : t + 1] for y in x)), S)
        out.append(o)
    return torch.cat(out, 1), S


def goose(scale=1.0):
    read = F.normalize(draw(B, T, H, K), dim=-1)
    rates = -rwkv7.FASTEST * torch.sigmoid(scale * draw(B, T, H, K))
    x = rwkv7.Operands(*(draw(B, T, H, K) for _ in range(3)), rates, read, read * torch.rand(B, T, H, K).double())
    return rwkv7.Operands(*(y.requires_grad_() for y in x))


def separate(scale=1.0):
    """Any decay, and values of another width than the keys."""
    decays = -(scale * draw(B, T, H, K)).exp().clamp(max=50)
    read, erase = (F.normalize(draw(B, T, H, K), dim=-1) for _ in range(2))
    x = dplr.Operands(draw(B, T, H, K), draw(B, T, H, K), draw(B, T, H, V), decays, read, erase)
    return dplr.Operands(*(y.requires_grad_() for y in x))


def outer(scale=1.0):
    decays = (-(scale * draw(B, T, H, n)).exp().clamp(max=50) for n in (K, V))
    x = gla_outer.Operands(draw(B, T, H, K), draw(B, T, H, K), draw(B, T, H, V), *decays)
    return gla_outer.Operands(*(y.requires_grad_() for y in x))


FORMS = [(rwkv7, goose), (dplr, separate), (gla_outer, outer)]


@pytest.mark.parametrize(("module", "operands"), FORMS, ids=["rwkv7", "dplr", "gla-outer"])
@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["mild", "hostile"])
@pytest.mark.parametrize("span", [1, 64, 1000])
def test_chunkwise_equals_the_recurrence_at_any_decay(monkeypatch, module, operands, scale, span):
    """Outputs, last states and all gradients, in float64 and, against it, in float32."""
    monkeypatch.setattr(chunks, "SPAN", span)
    x = operands(scale)
    *ours, start = chunkwise(module, x)
    theirs = literally(module, x, start)
    found, expected = ((*results, *weighted_gradients(results, x)) for results in (ours, theirs))
    assert all(relative(mine, their) <= 1e-12 for mine, their in zip(found, expected, strict=True))
    single = type(x)(*(y.detach().float() for y in x))
    out, final = chunks.chunkwise(module.form, single, Sequences(single.q, None), start.float())
    assert relative(out, theirs[0]) <= 2e-6 and relative(final, theirs[1]) <= 2e-6


@pytest.mark.parametrize(("module", "operands"), FORMS, ids=["rwkv7", "dplr", "gla-outer"])
@pytest.mark.parametrize("lengths", [[33, 0, 37], [1, 64, 5], [0, 70, 0]], ids=str)
@pytest.mark.parametrize("span", [1, 64, 1000])
def test_packed_sequences_equal_separate_ones(monkeypatch, module, operands, lengths, span):
    monkeypatch.setattr(chunks, "SPAN", span)
    x = type(y := operands())(*(z[:1] for z in y))
    out, final, start = chunkwise(module, x, lengths)
    for n, (part, tokens) in enumerate(zip(out.split(lengths, 1), torch.arange(T).split(lengths), strict=True)):
        if not len(tokens):
            assert torch.equal(final[n], start[n])
            continue
        alone, S = literally(module, type(x)(*(z[:, tokens] for z in x)), start[n : n + 1])
        assert relative(part, alone) <= 1e-12 and relative(final[n : n + 1], S) <= 1e-12


@pytest.mark.parametrize("name", zoo.MATRICES)
def test_autocast_keeps_float32_states(name):
    mixer, x = specimen(name, 0)
    mixer.float()
    with torch.autocast("cpu", torch.bfloat16):
        y, state = mixer(x.float())
    assert state.memory.dtype == torch.float32 and relative(y, mixer(x.float())[0]) <= 5e-2


def test_invalid_specs_are_refused():
    for name, sentence in [
        ("rwkv7(rank=0)", "rank=0"),
        ("rwkv7(expand_k=2.0)", "has no expand_k"),
        ("gla-outer(count=7)", "num_heads=7 does not divide"),
        ("gla-outer(slots=3)", "has no slots"),
        ("abc(rank=3)", "has no rank"),
    ]:
        with pytest.raises(InputError, match=sentence):
            layers.build(zoo.get(name), hidden_size=D, num_heads=4)


# --- RWKV-7 and DPLR -------------------------------------------------------------------------------------------------


def test_general_delta_rule_equals_fla():
    """With decays down to −50 a token, and without a decay (IPLR). FLA calls what is read for the correction, with a
    minus, alpha, and what is erased beta."""
    pytest.importorskip("fla")
    x = dplr.Operands(*(y.float() for y in separate(30.0)))
    for name, g in (("dplr", x.log_decay), ("iplr", None)):
        ours = x if g is not None else x._replace(log_decay=torch.zeros_like(x.log_decay))
        out, _ = chunks.chunkwise(dplr.form, ours, Sequences(x.q, None), torch.zeros(B, H, K, V))
        q, k, v, read, erase = (y.transpose(1, 2) for y in (x.q, x.k, x.v, x.read, x.erase))
        theirs = load(f"fla:generalized_delta_rule/{name}/naive:{name}_recurrence")
        decay = [] if g is None else [g.transpose(1, 2)]
        agree([x.q, x.k, x.v, x.read, x.erase], out, theirs(q * K**0.5, k, v, -read, erase, *decay)[0].transpose(1, 2))


def test_infinite_decay_forgets_all():
    """−∞ in one token and channel, and no NaN in any output or gradient."""
    x = separate()
    g = x.log_decay.detach().clone()
    g[:, 40, :, 2] = -torch.inf
    x = x._replace(log_decay=g.requires_grad_())
    out, final, start = chunkwise(dplr, x)
    theirs = literally(dplr, x, start)
    assert relative(out, theirs[0]) <= 1e-12 and relative(final, theirs[1]) <= 1e-12
    assert all(y.isfinite().all() for y in torch.autograd.grad(out.sum(), x))


def goose_package(monkeypatch):
    """The author's own package, whose version 7 is chosen when it is loaded: as a module of its own."""
    result = importlib.util.find_spec("rwkv")
    if result is None:
        pytest.skip("rwkv is not installed")
    for name, value in {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}.items():
        monkeypatch.setenv(name, value)
    path = os.path.join(result.submodule_search_locations[0], "model.py")
    described = importlib.util.spec_from_file_location("rwkv_model_7", path)
    module = importlib.util.module_from_spec(described)
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    described.loader.exec_module(module)
    # Importing it turned these on, for whatever is tested after this.
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
    return module


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize("layer_idx", [0, 2])
def test_rwkv7_equals_the_authors_code(monkeypatch, layer_idx):
    """Outputs, and the gradients of the input and of the first layer's values."""
    theirs = goose_package(monkeypatch).RWKV_x070_TMix_seq
    ranks = "rank=4, rate_rank=5, value_rank=3, gate_rank=6"
    ours = layers.build(zoo.get(f"rwkv7({ranks})"), hidden_size=D, num_heads=4, layer_idx=layer_idx, num_layers=4)
    randomized(ours)
    w = {key: p.detach() for key, p in ours.named_parameters()}
    mix = dict(zip(rwkv7.RWKV7.STREAMS, w["mix"], strict=True))
    low = lambda name: (w[f"{name}.down"], w[f"{name}.up"])  # noqa: E731
    projections = [w[f"{name}_proj.weight"].T for name in "qkvo"]

    nothing, carried = torch.zeros(D), Carried()
    carried.layer, carried.value = 0, torch.randn(2, T, D, requires_grad=True)
    values = [w["value_bias"], *low("value")] if layer_idx else 3 * [nothing]

    def layer(row, first):
        return theirs(
            layer_idx, 4, D // 4, row, nothing, first, row.new_zeros(4, D // 4, D // 4),
            *(mix[n] for n in ("q", "decay", "k", "v", "rate", "gate")),
            w["decay_bias"], *low("decay"), w["rate_bias"], *low("rate"), *values, *low("gate"),
            w["k_read"], w["k_rate"], w["bonus"], *projections, w["norm_weight"], w["norm_bias"],
        )[0]  # fmt: skip

    x = torch.randn(2, T, D, requires_grad=True)
    expected = torch.stack([layer(row, first) for row, first in zip(x, carried.value, strict=True)])
    agree([x, carried.value][: 1 + (layer_idx > 0)], ours(x, carried=carried)[0], expected)


def gradients(model, ids):
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")  # its successor's name is new
def test_rwkv7_values_of_the_first_layer_reach_the_others():
    """Where activations are recomputed, and where lists that a block is given are copied, as FSDP does. Each parameter
    has a gradient; a reentrant checkpoint, which would cut some of them, is refused."""
    model, ids = randomized(tiny.build("rwkv7", num_hidden_layers=3), 0.2).train(), tiny.tokens(2)
    expected = gradients(model, ids)
    assert all(gradient.any() for gradient in expected)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args, kwargs: tree_map(lambda x: x, (args, kwargs)), with_kwargs=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for again, gradient in zip(gradients(model, ids), expected, strict=True):
        assert torch.equal(again, gradient)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(InputError, match="no gradient to RWKV-7's values; expected use_reentrant=False"):
        gradients(model, ids)


@pytest.mark.parametrize(("hidden_size", "gain"), [(16, 2**0.5), (64, 1.0)])
def test_rwkv7_low_rank_maps_start_orthogonal(hidden_size, gain):
    """ortho_init of the author's code: 0.1, times the root of rank over width where that is above 1."""
    up = layers.build(zoo.get("rwkv7"), hidden_size=hidden_size, num_heads=4).decay.up.detach()
    assert len(up) == 32
    torch.testing.assert_close(torch.linalg.svdvals(up), torch.full((min(up.shape),), 0.1 * gain))


# --- GLA's general gate ----------------------------------------------------------------------------------------------


def test_gla_outer_equals_its_equation():
    """S_t = (αᵀ β) ⊙ S_{t−1} + kᵀ v, number by number."""
    x = outer()
    out, final, S = chunkwise(gla_outer, x)
    expected = []
    for t in range(T):
        gate = torch.einsum("nhk,nhv->nhkv", x.k_decay[:, t].exp(), x.v_decay[:, t].exp())
        S = gate * S + torch.einsum("nhk,nhv->nhkv", x.k[:, t], x.v[:, t])
        expected.append(torch.einsum("nhk,nhkv->nhv", x.q[:, t], S))
    assert relative(out, torch.stack(expected, 1)) <= 1e-12 and relative(final, S) <= 1e-12


def test_gla_outer_layer_without_value_decay_equals_gla_layer(monkeypatch):
    build = lambda name: layers.build(zoo.get(name), hidden_size=D, num_heads=4).double()  # noqa: E731
    ours, theirs = randomized(build("gla-outer")), build("gla")
    q, k, v, gate, decay, _ = ours.in_proj.weight.data.split(ours.parts)
    parts = {"q": q, "k": k, "v": v, "gate": gate, "decay": decay}
    theirs.in_proj.weight.data = torch.cat([parts[name] for name in theirs.parts])
    theirs.decay, theirs.o_proj, theirs.norm_weight = ours.k_decay, ours.o_proj, ours.norm_weight
    monkeypatch.setattr(ours.v_decay, "forward", lambda x: x.new_zeros(*x.shape[:2], 4, D // 4))
    x = draw(2, T, D)
    assert relative(ours(x)[0], theirs(x)[0]) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", zoo.MATRICES)
def test_layer_can_be_created_in_16_bits(name, dtype, default_dtype):
    """As transformers creates models whose dtype is given."""
    default_dtype(dtype)
    mixer = layers.build(zoo.get(name), hidden_size=D, num_heads=4)
    assert {p.dtype for p in mixer.parameters()} == {dtype} and all(p.isfinite().all() for p in mixer.parameters())


@pytest.mark.slow
def test_operator_of_a_graph_passes_opcheck():
    """Rows and six operands; packed sequences, one of them empty, and five."""
    rows = [*goose(), draw(B, H, K, K).requires_grad_(), None, f"{rwkv7.__name__}:form"]
    qkv, decays = [draw(1, T, H, n).requires_grad_() for n in (K, K, V)], [-draw(1, T, H, n).abs() for n in (K, V)]
    pack = [*qkv, *decays, None, draw(3, H, K, V), torch.tensor([0, 0, 7, T]), f"{gla_outer.__name__}:form"]
    fewer = "test_schema", "test_faketensor"
    for given, which in ((rows, "ALL"), (pack, fewer)):
        checks = torch.library.opcheck(torch.ops.headrace.chunks.default, given, test_utils=which)
        assert set(checks.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", ["rwkv7", "gsa", "abc", "gla-outer", "comba", "gated-deltanet-2", "residual-delta"])
def test_states_on_the_meta_device_have_the_shapes_of_others(name):
    made = []
    for device in ("cpu", "meta"):
        with torch.device(device), torch.no_grad():
            mixer, state = Mixer(name, hidden_size=32, num_heads=2), None
            for tokens in (150, 1):
                y, state = mixer(torch.zeros(3, tokens, 32), state)
            made.append([(x.shape, x.dtype) for x in (y, *state) if x is not None])
    assert made[0] == made[1]


# PyTorch calls an operator once per sample, and says so: on stderr before 2.15, as a warning since.
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
@pytest.mark.parametrize("name", ["comba", "gated-deltanet-2"])
def test_vmap_over_an_erasing_mixer_equals_a_loop(name):
    mixer, x = Mixer(name, hidden_size=32, num_heads=2).double(), torch.randn(3, 1, 70, 32, dtype=torch.float64)
    mapped = torch.func.vmap(lambda row: mixer(row)[0])(x)
    assert torch.allclose(mapped, torch.stack([mixer(row)[0] for row in x]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["gla-outer", "log-linear-mamba2"])
def test_torch_func_gradients_of_many_spans(name, monkeypatch):
    monkeypatch.setattr(chunks, "SPAN", 16)
    made, x = layers.Mixer(name, hidden_size=32, num_heads=2).double(), torch.randn(1, 40, 32, dtype=torch.float64)
    if name.startswith("log-linear"):
        made.op = partial(linear_attention, form="recurrent")
    expected = torch.autograd.grad(made(x.requires_grad_())[0].square().sum(), x)[0]
    found = torch.func.grad(lambda x: made(x)[0].square().sum())(x.detach())
    assert relative(found, expected) < 1e-12
