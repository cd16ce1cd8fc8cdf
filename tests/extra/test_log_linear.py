"""Log-linear attention (arXiv 2506.04761): the literal Fenwick tree. flash-linear-attention's model:
tests/convert/test_convert_flash.py."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import tiny
from headrace import Mixer, linear_attention, zoo
from headrace.extra.log_linear import LogLinear
from headrace.ops.sequences import Sequences
from headrace.training.parameters import undecayed
from headrace.verification.verify import relative

B, T, H, K, V = 2, 33, 3, 6, 5  # one more than a block of tokens, and than a power of 2


def fenwick(q, k, v, decay, beta, weights, delta):
    """A memory for each level, one token after another: a write begins level 0; before the next token, the levels below
    the lowest digit of its position become one. The operands are of one sequence, [T, H, ·]."""
    memories, out = [], []
    for t in range(len(v)):
        for memory in memories:
            memory[1] = decay[t, :, None, None] * memory[1]
            if delta:
                memory[1] = memory[1] - beta[t, :, None, None] * k[t, :, :, None] * (k[t, :, None] @ memory[1])
        memories.append([0, beta[t, :, None, None] * k[t, :, :, None] * v[t, :, None]])
        out.append(sum(weights[t, :, at, None] * (q[t, :, None] @ S)[:, 0] for at, S in memories))
        merged = min(((t + 1) & -(t + 1)).bit_length(), weights.shape[-1] - 1)
        joined = sum(S for at, S in memories if at <= merged)
        memories = [*([at, S] for at, S in memories if at > merged), [merged, joined]]
    return torch.stack(out)


def operands(levels):
    shapes = {"q": (K,), "k": (K,), "v": (V,), "log_decay": (), "beta": (), "levels": (levels,)}
    x = {name: torch.randn(B, T, H, *shape, dtype=torch.float64) for name, shape in shapes.items()}
    x |= {"k": F.normalize(x["k"], dim=-1), "log_decay": F.logsigmoid(x["log_decay"]), "beta": x["beta"].sigmoid()}
    return {name: y.requires_grad_() for name, y in x.items()}


@pytest.mark.parametrize("levels", [2, 4, 15])
@pytest.mark.parametrize("rule", ["add", "delta"])
def test_levels_are_a_fenwick_tree_of_memories(rule, levels):
    x, direction = operands(levels), torch.randn(B, T, H, V, dtype=torch.float64)
    q, k, v, decay, beta, logits = x.values()
    given = q, k, v, decay.exp(), beta, F.softplus(logits)
    literal = torch.stack([fenwick(*(y[b] for y in given), rule == "delta") for b in range(B)])
    op = partial(linear_attention, rule=rule, scale=1.0)
    out = LogLinear(levels, H).double()(op, x, None, Sequences(v, None))[0]
    torch.testing.assert_close(out, literal, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad((y * direction).sum(), list(x.values())) for y in (out, literal))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("name", ["log-linear-mamba2", "log-linear-gated-deltanet"])
def test_strong_decays_do_not_lose_far_levels_in_the_rounding_of_near_ones(name):
    torch.manual_seed(0)
    layer, x = tiny.perturbed(Mixer(name, hidden_size=24, num_heads=2), 0.1), 30 * torch.randn(1, 5 * T, 24)
    y = layer(x)[0]
    assert relative(y, layer.double()(x.double())[0]) < 1e-5


def test_empty_batch_runs_over_several_blocks():
    layer, x = Mixer("log-linear-mamba2", hidden_size=16, num_heads=2), torch.randn(0, 2 * T, 16)
    y, state = layer(x)
    assert y.shape == layer(x, state)[0].shape == x.shape


def test_the_weights_of_levels_have_no_weight_decay():
    assert undecayed(LogLinear(levels=4, num_heads=2)) == ["weight"]


@pytest.mark.parametrize(("name", "per_number"), [
    ("log-linear-mamba2", 4 * (1 + 2) + 2),  # all levels decay and are read, one is written
    ("log-linear-gated-deltanet", 4 * (1 + 2 + 4)),  # all lose what they have under the key
])  # fmt: skip
def test_operations_are_those_of_a_token(name, per_number):
    spec = zoo.get(f"{name}(levels=5)")
    H, K, columns = spec.state_shapes(256, 2)["memory"]
    assert spec.flops_per_token(256, 2) == per_number * H * K * columns / 4
