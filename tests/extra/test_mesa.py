"""MesaNet (arXiv 2506.05233): the exact solution of its linear systems, flash-linear-attention, and decoding."""

import pytest
import torch
import torch.nn.functional as F

from headrace import linear_attention
from headrace.extra.mesa import RidgeRead, conjugate_gradients
from headrace.ops.sequences import Sequences
from peers import load

B, T, H, K, V = 2, 37, 3, 6, 5


def operands():
    shapes = {"q": (K,), "k": (K,), "v": (V,), "log_decay": (), "beta": ()}
    x = {name: torch.randn(B, T, H, *shape, dtype=torch.float64) for name, shape in shapes.items()}
    x |= {"q": F.normalize(x["q"], dim=-1), "k": F.normalize(x["k"], dim=-1)}
    x |= {"log_decay": F.logsigmoid(x["log_decay"] + 3), "beta": x["beta"].sigmoid()}
    return {name: y.requires_grad_() for name, y in x.items()}


def made(steps=30):
    ridge = RidgeRead(steps, H, K).double()
    ridge.weight.data.normal_()
    return ridge


def computed(ridge, x):
    return ridge(lambda **named: linear_attention(**named, scale=1.0), x, None, Sequences(x["v"], None))[:2]


def solved(ridge, q, k, v, log_decay, beta):
    """The equations, one token after another, with the matrices of the systems."""
    S, M, out = torch.zeros(B, H, K, V).double(), torch.zeros(B, H, K, K).double(), []
    penalty = torch.diag_embed(F.softplus(ridge.weight) + ridge.LEAST)
    for t in range(T):
        decay, written = log_decay[:, t, :, None, None].exp(), beta[:, t, :, None, None] * k[:, t, :, :, None]
        S, M = decay * S + written * v[:, t, :, None], decay * M + written * k[:, t, :, None]
        out.append(torch.einsum("bhk,bhkv->bhv", torch.linalg.solve(M + penalty, q[:, t]), S))
    return torch.stack(out, 1), torch.cat([S, M], -1)


def test_a_head_reads_the_prediction_of_ridge_regression():
    ridge, x, direction = made(), operands(), torch.randn(B, T, H, V, dtype=torch.float64)
    results = computed(ridge, x), solved(ridge, **x)
    grads = []
    for out, memory in results:
        loss = (out * direction).sum() + memory.square().sum()
        grads.append(torch.autograd.grad(loss, [*x.values(), ridge.weight]))
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-11)
    for ours, exact in zip(*grads, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-10)


def test_solutions_are_those_of_flash_linear_attention():
    """Whose reference computes in float32, of values as wide as keys."""
    ridge, x = made(), operands()
    q, k, v, log_decay, beta = x.values()
    penalty, wide = F.softplus(ridge.weight) + ridge.LEAST, F.pad(v, (0, K - V))
    exact = load("fla:mesa_net/naive:naive_mesa_net_exact")(q, k, wide, log_decay, penalty, beta)[0][..., :V]
    torch.testing.assert_close(computed(ridge, x)[0].float(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_conjugate_gradients_end_after_as_many_steps_as_dimensions(dtype):
    """Also where a right side is 0, and after the end."""
    root, b = torch.randn(4, K, K, dtype=dtype), torch.randn(4, K, dtype=dtype)
    A, b = root @ root.mT + torch.eye(K, dtype=dtype), b * torch.tensor([[1], [0], [1], [1e-9]], dtype=dtype)
    for steps in (K, 5 * K):
        x = conjugate_gradients(lambda p: (A @ p[..., None])[..., 0], b, steps)
        error = ((A @ x[..., None])[..., 0] - b).norm(dim=-1)
        assert (error <= 1e5 * torch.finfo(dtype).eps * b.norm(dim=-1)).all()
