"""Mixers with a recurrence per channel: against their literal recurrences, and what is refused."""

from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import signal
from torch import nn
from torch.func import grad, jvp, vmap

from attention_layers import randomized
from equation import selective_literally, weighted_gradients
from headrace import InputError, layers, zoo
from headrace.extra import selective_scan as selective
from headrace.extra.selective_scan import Operands, scan_tiles
from headrace.extra.specs import scan as spec
from headrace.history.layers.linear_system import Response
from headrace.history.layers.rwkv4 import empty_memory, wkv
from headrace.history.layers.s4 import S4, hippo, hippo_diagonal_plus_low_rank
from headrace.verification.verify import relative, specimen

D, T = 32, 70


def build(name, **settings):
    sizes = {"hidden_size": D, "num_heads": 4, "layer_idx": 1, "num_layers": 3}
    return layers.build(zoo.get(name), **sizes | settings)


@pytest.mark.parametrize("name", zoo.SCANS)
def test_parameters_may_be_parts_of_a_larger_tensor(name):
    """As after vector_to_parameters, which makes them parts of one vector."""
    mixer, x = build(name), torch.randn(1, 1, D)
    with torch.no_grad():
        expected = mixer(x)[0]
        for parameter in mixer.parameters():
            parameter.data = torch.cat([parameter.new_zeros(1), parameter.flatten()])[1:].view_as(parameter)
        assert relative(mixer(x)[0], expected) <= 1e-5


@pytest.mark.parametrize("name", ["s4", "s4d"])
def test_torch_func_gradients_agree(name):
    mixer, x = build(name).double(), torch.randn(2, 9, D).double().requires_grad_()
    result = grad(lambda x: mixer(x)[0].square().sum())(x)
    assert relative(result, *torch.autograd.grad(mixer(x)[0].square().sum(), x)) <= 1e-12


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", ["mamba", "rwkv4", "rg-lru", "mingru"])
def test_unsupported_transforms_are_refused(name):
    mixer, x = build(name), torch.randn(2, 9, D)
    run = lambda x: mixer(x)[0].sum()  # noqa: E731
    for call in (lambda: grad(run)(x), lambda: vmap(run)(x[None]), lambda: jvp(run, (x,), (x,))):
        with pytest.raises(InputError, match=r"scan.* has no rules for torch.func or forward-mode derivatives"):
            call()


# --- Mamba -----------------------------------------------------------------------------------------------------------


def selective_operands(tokens, sequences, S=3, E=5):
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    A, dt = -draw(S, E).exp(), draw(tokens, E).exp()
    operands = Operands(draw(tokens, E), dt, A, draw(tokens, S), draw(tokens, S), draw(sequences, S, E))
    return Operands(*(x.requires_grad_() for x in operands))


@pytest.mark.parametrize("tile", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("lengths", [[9], [4, 4], [0, 1, 0, 7, 3, 0], [1, 1, 1]], ids=str)
def test_selective_scan_equals_its_recurrence(monkeypatch, lengths, tile):
    """However tiles and sequences fall: outputs, last states and every gradient, those of the last states too."""
    x = selective_operands(sum(lengths), len(lengths))
    monkeypatch.setattr(selective, "TILE", tile * x.A.numel())
    ours, theirs = scan_tiles(x, lengths), selective_literally(x, lengths)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weighted_gradients(ours, x), weighted_gradients(theirs, x), rtol=1e-11, atol=1e-11)


def test_default_device_does_not_matter():
    """The bounds of rows lie on the CPU, as the native library reads them."""
    mamba, x = layers.build(zoo.get("mamba"), hidden_size=D, num_heads=1), torch.randn(2, T, D)
    with torch.device("meta"):
        y, _ = mamba(x)
    assert torch.equal(y, mamba(x)[0])


def test_extreme_decays_stay_finite():
    x = selective_operands(40, 1)
    extreme = x._replace(dt=torch.where(torch.rand_like(x.dt) < 0.3, 1e6, 1e-12).requires_grad_())
    out, final = scan_tiles(extreme, [40])
    assert relative(out, selective_literally(extreme, [40])[0]) <= 1e-12
    gradients = torch.autograd.grad(out.sum() + final.sum(), extreme)
    assert all(g.isfinite().all() for g in gradients)


# --- RWKV-4 ----------------------------------------------------------------------------------------------------------


def wkv_literally(k, v, rate, bonus):
    """The operator as it is defined, for one sequence: every weight of every earlier token."""
    out = []
    for t in range(len(k)):
        age = torch.arange(t - 1, -1, -1, dtype=k.dtype)[:, None]
        weights = torch.cat([k[:t] - age * rate, (k[t] + bonus)[None]]).softmax(0)
        out.append((weights * v[: t + 1]).sum(0))
    return torch.stack(out)


@pytest.mark.parametrize("size", [1, 300])
def test_wkv_equals_a_softmax_over_the_past(size):
    """Exponents of hundreds too, which would overflow by themselves."""
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    x = [(size * draw(40, 5)), draw(40, 5), draw(5).exp(), size * draw(5)]
    x = [y.requires_grad_() for y in x]
    ours = wkv(*x, empty_memory(x[0], 1), [40])[0]
    theirs = wkv_literally(*x)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    gradients = (weighted_gradients([y], x) for y in (ours, theirs))
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_wkv_accepts_empty_sequences():
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    k, v, rate, bonus = draw(7, 5), draw(7, 5), draw(5).exp(), draw(5)
    memory = torch.cat([draw(4, 1, 5), draw(4, 2, 5).exp()], 1)
    out, after = wkv(k, v, rate, bonus, memory, [0, 3, 4, 0])
    for n, tokens in ((1, slice(0, 3)), (2, slice(3, 7))):
        alone, end = wkv(k[tokens], v[tokens], rate, bonus, memory[n : n + 1], [len(k[tokens])])
        torch.testing.assert_close(out[tokens], alone)
        torch.testing.assert_close(after[n], end[0])
    assert torch.equal(after[[0, 3]], memory[[0, 3]])


# --- S4 and S4D ------------------------------------------------------------------------------------------------------


def real_system(layer, h):
    """(A, B, C) of channel h in real numbers, written down from the layer's parameters."""
    pair = lambda x: torch.cat([x, x.conj()])  # noqa: E731
    as_complex = lambda x: pair(torch.view_as_complex(x.detach()[h]))  # noqa: E731
    poles = pair(torch.complex(-layer.log_damping[h].exp(), layer.frequency[h]).detach())
    A, B, C = poles.diag(), torch.ones_like(poles), as_complex(layer.C)
    if isinstance(layer, S4):
        P, B = as_complex(layer.P), as_complex(layer.B)
        A = A - P[:, None] * P.conj()
    one = torch.eye(len(poles) // 2, dtype=A.dtype)
    to_real = torch.cat([torch.cat([one, one], 1), torch.cat([-1j * one, 1j * one], 1)]) / 2
    A, B, C = to_real @ A @ to_real.inverse(), to_real @ B, C @ to_real.inverse()
    assert max(x.imag.abs().max() for x in (A, B, C)) < 1e-9
    return A.real.numpy(), B.real[:, None].numpy(), C.real[None].numpy()


@pytest.mark.parametrize(("name", "method"), [("s4", "bilinear"), ("s4d", "zoh")])
def test_state_space_equals_scipy(name, method):
    """Discretization, impulse response, and the answer to a signal: as a convolution, and token by token."""
    layer = specimen(f"{name}(state_size=8)", 0)[0]
    system = layer.system(torch.float64)
    u = torch.randn(1, T, layer.shape[0], dtype=torch.float64)
    with torch.no_grad():
        response = Response(system, T)
        convolved, last = response(u, None)
        begun, middle = response(u[:, :3], None)
        close(torch.cat([begun, response(u[:, 3:], middle)[0]], 1), convolved)  # a state before more than one chunk
        x, steps = torch.zeros_like(last), []
        for token in u.unbind(1):
            y, x = system.step(x, token)
            steps.append(y)
        for h in (0, 5):
            A, B, C = real_system(layer, h)
            dt = layer.log_dt[h].exp().item()
            A, B, *_ = signal.cont2discrete((A, B, C, np.zeros((1, 1))), dt, method)
            discrete = signal.dlti(A, B, C @ A, C @ B, dt=dt)  # theirs reads the state before the token, ours after
            close(system.kernel(T)[h], signal.dimpulse(discrete, n=T)[1][0][:, 0])
            _, y, states = signal.dlsim(discrete, u[0, :, h].numpy())
            close(convolved[0, :, h], y[:, 0])
            close(torch.stack(steps, 1)[0, :, h], y[:, 0])
            close(last[0, h], A @ states[-1] + B[:, 0] * u[0, -1, h].item())
    close(x, last)


def close(ours, theirs):
    torch.testing.assert_close(ours, torch.as_tensor(theirs), rtol=1e-10, atol=1e-12)


def test_s4_starts_as_hippo():
    """The same eigenvalues, and the same Bᵀ A^k B: a change of basis and nothing else."""
    A, B = hippo(8)
    frequency, P, half = hippo_diagonal_plus_low_rank(8)
    pair = lambda x: torch.cat([x, x.conj()])  # noqa: E731
    P, ours = pair(P), pair(half)
    dynamics = torch.diag(pair(torch.complex(torch.full_like(frequency, -0.5), frequency))) - P[:, None] * P.conj()
    eigenvalues = torch.linalg.eigvals(dynamics).real.sort(descending=True).values
    torch.testing.assert_close(eigenvalues, -torch.arange(1.0, 9.0, dtype=torch.float64), rtol=1e-8, atol=1e-8)
    x, z = B, ours
    for _ in range(4):
        torch.testing.assert_close((ours.conj() @ z).real, B @ x, rtol=1e-11, atol=1e-11)
        x, z = A @ x, dynamics @ z


@pytest.mark.parametrize("S", [4, 64])
def test_s4_starts_like_the_authors_code(S):
    """nplr of state-spaces/s4, transcribed: V diagonalizes A + P Pᵀ, its first row is real; |Im V* B| is at most 2."""
    k = np.arange(S)
    A = -np.sqrt(np.outer(2 * k + 1, 2 * k + 1)) * np.tri(S, k=-1) - np.diag(k + 1)
    P, B = np.sqrt(k + 0.5), np.sqrt(2 * k + 1)
    _, V = np.linalg.eigh((A + np.outer(P, P)) * -1j)
    V = V[:, : S // 2].conj()  # their frequencies are negative, ours positive
    V = V * (np.abs(V[0]) / V[0])
    theirs = V.conj().T @ B
    assert (np.abs(theirs.imag) > 2).any()
    clipped = theirs.real + 1j * theirs.imag.clip(-2, 2)
    layer, order = build(f"s4(state_size={S})"), np.argsort(np.abs(theirs))
    ours, low_rank = (torch.view_as_complex(x.detach())[3].numpy() for x in (layer.B, layer.P))
    ours, low_rank = ours[np.argsort(np.abs(low_rank))], np.sort(np.abs(low_rank))
    sign = np.sign(ours.real / clipped.real[order])  # an eigenvector has none
    np.testing.assert_allclose(ours * sign, clipped[order], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(low_rank, np.sort(np.abs(V.conj().T @ P)), rtol=1e-6)


# --- RG-LRU and convolutions -----------------------------------------------------------------------------------------


@torch.no_grad()
def convolved_literally(conv, x):
    """Token by token: y_t = b + Σ_j w_j x_{t−j}, where w_0 is the filter's last number."""
    width, y = conv.kernel_size[0], torch.zeros_like(x)
    for t in range(x.shape[1]):
        for j in range(min(width, t + 1)):
            y[:, t] += conv.weight[:, 0, width - 1 - j] * x[:, t - j]
        y[:, t] += 0 if conv.bias is None else conv.bias
    return y


@torch.no_grad()
def test_short_conv_equals_its_equation():
    mixer, x = randomized(build("short-conv")).double(), torch.randn(2, 9, D).double()
    B, C, u = mixer.in_proj(x).split(D, -1)
    assert relative(mixer(x)[0], mixer.out_proj(C * convolved_literally(mixer.conv, B * u))) <= 1e-14


@torch.no_grad()
def test_rg_lru_equals_its_recurrence():
    """The first token of a sequence is written whole, also the first after an empty part of it."""
    mixer, x = randomized(build("rg-lru(expand=2)")).double(), torch.randn(2, 9, D).double()
    u, branch = mixer.in_proj(x).chunk(2, -1)
    u, h, rows = convolved_literally(mixer.conv, u), torch.zeros(2, 2 * D).double(), []
    for t in range(9):
        gates = []
        for weight, bias in zip(mixer.gate_weight.split(4), mixer.gate_bias.split(4), strict=True):
            blocks = [block @ w for block, w in zip(u[:, t].split(2 * D // 4, -1), weight, strict=True)]
            gates.append(torch.sigmoid(torch.cat(blocks, -1) + bias.flatten()))
        a = torch.exp(-8 * gates[1] * torch.log1p(mixer.rate.exp()))
        h = a * h + (1 if t == 0 else (1 - a**2).sqrt()) * gates[0] * u[:, t]
        rows.append(h)
    expected = mixer.out_proj(torch.stack(rows, 1) * nn.functional.gelu(branch, approximate="tanh"))
    assert relative(mixer(x)[0], expected) <= 1e-13
    _, empty = mixer(x[:1, :4], cu_seqlens=torch.tensor([0, 4, 4]))
    y, _ = mixer(torch.cat([x[:1, 4:], x[1:, :5]], 1), empty, cu_seqlens=torch.tensor([0, 5, 10]))
    assert relative(y[0], torch.cat([expected[0, 4:], expected[1, :5]])) <= 1e-13


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (zoo.SCANS, "has no heads to compete"),
        (zoo.MATRICES, "computes its memory by a recurrence of its own"),
        (zoo.ATTENTION, "has no memory that heads could compete for"),
    ],
)
def test_competition_on_scans_is_refused_with_a_reason(table, reason):
    for name in table:
        with pytest.raises(InputError, match=f"'softmax-{name}' does not exist, because {name} {reason}"):
            zoo.get(f"softmax-{name}")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"kind": "mamba", "conv": 4}, "needs state_size"),
        ({"kind": "mamba", "state_size": 0, "conv": 4}, "state_size=0"),
        ({"kind": "mamba", "state_size": 4, "conv": 1}, "conv=1"),
        ({"kind": "mamba", "state_size": 4, "conv": 4, "rank": 0}, "rank=0"),
        ({"kind": "mamba", "state_size": 4, "conv": 4, "expand": 0.0}, "expand=0.0"),
        ({"kind": "s4", "state_size": 3}, "multiple of 2"), ({"kind": "s4", "state_size": 4, "conv": 4}, "has no conv"),
        ({"kind": "rwkv4", "state_size": 4}, "has no state_size"),
        ({"kind": "s4", "state_size": 4, "expand": 2.0}, "has no expand"),
        ({"kind": "rwkv4", "norm": True}, "has no norm"), ({"kind": "rwkv4", "bias": True}, "has no bias"),
        ({"kind": "short-conv"}, "needs conv"), ({"kind": "rg-lru", "conv": 4, "rank": 3}, "has no rank"),
    ],
)  # fmt: skip
def test_invalid_specs_are_refused(fields, sentence):
    with pytest.raises(InputError, match=sentence):
        spec.ScanSpec(**fields)


def test_the_first_of_several_invalid_fields_is_named():
    """In the order of the fields: every process says the same."""
    wrong = {"expand": 2.0, "rank": 3, "norm": True, "conv_bias": False, "bias": True}
    for first, second in combinations(wrong, 2):
        with pytest.raises(InputError, match=f"kind='s4' has no {first};"):
            spec.ScanSpec("s4", state_size=4, **{name: wrong[name] for name in (second, first)})


def test_misspelt_names_and_wrong_widths_are_refused():
    with pytest.raises(InputError, match="mamba"):
        zoo.get("manba")
    with pytest.raises(InputError, match=r"expand=.* is .*; expected an integer"):
        build("mamba(expand=1.3)")
    with pytest.raises(InputError, match="num_heads=5 does not divide the 32 channels"):
        build("rg-lru", num_heads=5)


@pytest.mark.parametrize("name", ["mingru", "minlstm"])
def test_nan_of_a_sequence_reaches_no_gradient_of_another(name):
    torch.manual_seed(0)
    layer, x = layers.Mixer(name, hidden_size=4, num_heads=1), torch.randn(2, 3, 4)
    x[1, 2] = torch.nan
    x.requires_grad_()
    y, _ = layer(x)
    (gradient,) = torch.autograd.grad(y[0].sum(), x)
    assert y[0].isfinite().all() and gradient[0].isfinite().all()
