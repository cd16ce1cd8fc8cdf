"""The native selective scan against its recurrence in float64."""

import pytest
import torch

from equation import selective_literally, weighted_gradients
from headrace import InputError, layers, zoo
from headrace.extra import native_scan as scan
from headrace.extra.selective_scan import Operands
from headrace.verification.verify import relative

OPERATOR = torch.ops.headrace.selective_scan.default


pytestmark = pytest.mark.usefixtures("native")


def given(lengths, S=16, D=20):
    """Operands in float32, of which dt lies beside other numbers."""
    T, draw = sum(lengths), torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
    dt = normal(T, D + 3).sub(1).exp()[:, :D]
    operands = Operands(normal(T, D), dt, -normal(S, D).exp(), normal(T, S), normal(T, S), normal(len(lengths), S, D))
    return Operands(*(x.requires_grad_() for x in operands))


def bounds(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def with_gradients(function, x, lengths):
    results = function(x, lengths)
    return *results, *weighted_gradients(results, x)


@pytest.mark.parametrize(
    ("lengths", "S", "D"),
    [([1], 1, 1), ([31], 3, 5), ([32, 32], 16, 16), ([33, 0, 7, 1, 60], 16, 33), ([0, 9, 0], 2, 7), ([70], 17, 300),
     ([5, 64], 4, 513)],
)  # fmt: skip
def test_scan_equals_the_recurrence(lengths, S, D):
    x = given(lengths, S, D)
    assert scan.unsupported_reason(x.u, x.A) is None
    exact = with_gradients(selective_literally, Operands(*(y.detach().double().requires_grad_() for y in x)), lengths)
    found = with_gradients(scan.selective_scan, x, bounds(lengths))
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype is torch.float32 and ours.shape == theirs.shape
        assert relative(ours.double(), theirs) <= 1e-6  # a few roundings of float32


def test_extreme_steps_and_values():
    """Decays to nothing and to almost one; what is not finite in a sequence does not reach the next."""
    x = given([40, 40], 4, 6)
    dt = torch.where(torch.rand_like(x.dt) < 0.3, 1e6, 1e-12).requires_grad_()
    found = with_gradients(scan.selective_scan, x._replace(dt=dt), bounds([40, 40]))
    exact = selective_literally(Operands(*(y.detach().double() for y in x._replace(dt=dt))), [40, 40])
    assert all(relative(a.double(), b) <= 1e-6 for a, b in zip(found, exact, strict=False))
    assert all(y.isfinite().all() for y in found)
    u = x.u.detach().clone()
    u[3], u[5, 2] = torch.nan, torch.inf
    wrong, clean = (scan.selective_scan(x._replace(u=y), bounds([40, 40])) for y in (u, x.u))
    assert wrong[0][3:40].isnan().all() and torch.equal(wrong[0][:3], clean[0][:3])
    assert torch.equal(wrong[0][40:], clean[0][40:]) and torch.equal(wrong[1][1], clean[1][1])


def test_threads_change_no_bit():
    x, results = given([300, 40], 16, 600), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(with_gradients(scan.selective_scan, x, bounds([300, 40])))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_operator_passes_opcheck():
    for keep in (False, True):
        x = given([9, 4], 3, 5)
        x = x if keep else [y.detach() for y in x]
        checks = torch.library.opcheck(OPERATOR, (*x, bounds([9, 4]), keep))
        assert set(checks.values()) == {"SUCCESS"}


def test_operator_refuses_wrong_tensors():
    """Every shape and dtype, because the kernel reads memory by address."""
    x, ends = Operands(*(y.detach() for y in given([9, 4], 3, 5))), bounds([9, 4])
    for name in Operands._fields:
        for change in (lambda y: y[..., :-1], lambda y: y[:-1], lambda y: y[None], lambda y: y.double()):
            with pytest.raises(ValueError, match=r" has shape .* expected \["):
                OPERATOR(*x._replace(**{name: change(getattr(x, name))}), ends, False)
    for wrong in (ends[:-1], ends + 1, ends.flip(0), ends[None], torch.tensor([0, 14, 13])):
        with pytest.raises(ValueError, match=r"(initial_state has shape|cu_seqlens=).* expected "):
            OPERATOR(*x, wrong, False)


def test_second_derivatives_are_refused():
    x = given([5], 2, 3)
    out, _ = scan.selective_scan(x, bounds([5]))
    with pytest.raises(InputError, match="has no second derivative"):
        torch.autograd.grad(out.sum(), x.u, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_equals_the_layer_in_pytorch(monkeypatch, dtype):
    """Rows, packed sequences and a state that is carried, with what the kernel computes and without."""
    made = layers.build(zoo.get("mamba"), hidden_size=24, num_heads=2).to(dtype)
    x, results, called, kernel = torch.randn(1, 50, 24).to(dtype), [], [], scan.selective_scan
    monkeypatch.setattr(scan, "selective_scan", lambda *given: called.append(missing) or kernel(*given))
    for missing in (None, "left out"):
        monkeypatch.setattr(scan.native, "missing", missing)
        packed, _ = made(x, cu_seqlens=torch.tensor([0, 33, 50]))
        y, state = made(x.view(2, 25, 24)[:, :20])
        later, after = made(x.view(2, 25, 24)[:, 20:], state)
        results.append([packed, y, later, *after[:2]])
    assert called == [None] * 3
    for ours, theirs in zip(*results, strict=True):
        assert relative(ours.double(), theirs.double()) <= 4 * torch.finfo(dtype).eps
