"""The launches of the backend "triton", compiled for GPUs that are not there: their number and their code."""

from collections import Counter

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from test_batched import Calls

import dry
from headrace import Mixer, linear_attention, set_backend, zoo
from headrace.layers.blocks.block import MLP, Block, Sizes
from headrace.layers.linear.convolution import convolve
from headrace.ops.backends.triton import block_sizes
from headrace.ops.control import Control
from headrace.ops.dispatch import choose
from headrace.ops.gated_norm import GatedNorm
from headrace.ops.query_key import QueryKey
from headrace.ops.residual_norm import ResidualNorm
from headrace.ops.sequences import Sequences
from peers import FAMILIES

pytestmark = pytest.mark.slow
KERNELS = ["prepare", "scan", "prepare", "scan", "reverse_scan", "gradients"]  # two forward, four backward
# Bytes of registers that a thread may spill to memory, by (GPU, family). Hopper and Blackwell spill nothing, by Triton
# 3.9.0 and, for gated-delta and kda, 3.6.0 and 3.8.0; the others are somewhat above what these made. FLA's kernels
# spill up to 7,512 bytes under a decay per channel, and up to 824 and 2,080 under delta rules.
STACK = {
    **dict.fromkeys([("sm_90", family) for family in ("linear", "scalar", "vector", "delta", "gated-delta", "kda")], 0),
    ("sm_100", "scalar"): 0, ("sm_100", "gated-delta"): 0, ("sm_100", "kda"): 0,
    ("sm_90", "normalised"): 0, ("sm_90", "bonus"): 0, ("sm_100", "bonus"): 0,
    ("sm_80", "vector"): 192,
    ("sm_120", "scalar"): 48, ("gfx942", "scalar"): 24, ("gfx942", "gated-delta"): 32,
    ("gfx942", "kda"): 232,  # the most of bfloat16, in docs/limits.md
}  # fmt: skip
# Multiply-adds of the equations per chunk with K = 128, in units of 64³. A loop over blocks of channels counts once, as
# in the code. `scan` and `reverse_scan` have 64 value channels on Hopper and else 32.
SCANS, DELTA_SCANS = {"scan": 5, "reverse_scan": 5}, {"scan": 8, "reverse_scan": 8}
MACS = {
    ("sm_90", "linear"): SCANS | {"prepare": 1, "gradients": 5},
    ("sm_90", "scalar"): SCANS | {"prepare": 1, "gradients": 6},
    ("sm_90", "vector"): SCANS | {"prepare": 1.5, "gradients": 3.25},
    ("sm_90", "delta"): DELTA_SCANS | {"prepare": 4, "gradients": 9},
    ("sm_90", "gated-delta"): DELTA_SCANS | {"prepare": 4, "gradients": 10},
    ("sm_90", "kda"): DELTA_SCANS | {"prepare": 5, "gradients": 6},
    **{key: {"scan": 2.5, "reverse_scan": 2.5} for key in [("sm_80", "vector"), ("sm_120", "scalar")]},
}  # fmt: skip


def launches(
    gpu: str, family: str, T: int = 128, K: int = 128, dtype: torch.dtype = torch.bfloat16, V: int | None = None
) -> list[dry.Launch]:
    """The launches of forward and backward with both gates and an initial state; V: K unless given."""
    V = V or K
    tensors = FAMILIES[family].inputs(T=T, K=K, V=V, dtype=dtype)
    shape = tensors["v"].shape
    gates = {name: torch.rand(shape[:3], requires_grad=True) for name in ("read_gate", "write_gate")}
    state = torch.zeros(shape[0], shape[2], K, V + FAMILIES[family].normalise, requires_grad=True)
    with dry.gpu(gpu) as found:
        results = linear_attention(
            **tensors, **gates, initial_state=state, **FAMILIES[family].options(), backend="triton"
        )
        torch.autograd.backward(results, [torch.ones_like(x) for x in results])
    return found


@pytest.mark.parametrize(("gpu", "family"), STACK)
def test_launches_and_their_code(gpu, family):
    """Two launches forward and four backward, all on matrix units, in the GPU's shared memory, with little spilled
    and no product computed twice."""
    found = launches(gpu, family)
    assert [x.kernel for x in found] == KERNELS
    assert all(x.code.matrix for x in found)
    assert max(x.code.shared for x in found) <= dry.GPUS[gpu].shared
    assert max(x.code.stack for x in found) <= STACK[gpu, family]
    for kernel, units in MACS.get((gpu, family), {}).items():
        assert max(x.code.macs for x in found if x.kernel == kernel) == units * 64**3


@pytest.mark.parametrize(
    ("gpu", "family", "K", "dtype"),
    [("sm_90", "gated-delta", 128, torch.float32), ("sm_120", "gated-delta", 128, torch.float16),
     ("gfx942", "scalar", 256, torch.float32)],
)  # fmt: skip
def test_float32_and_float16(gpu, family, K, dtype):
    """Their tiles, larger than those of bfloat16, are on matrix units and in the GPU's shared memory, too."""
    found = launches(gpu, family, K=K, dtype=dtype)
    assert [x.kernel for x in found] == KERNELS
    assert all(x.code.matrix for x in found)
    assert max(x.code.shared for x in found) <= dry.GPUS[gpu].shared
    assert max(x.code.stack for x in found) <= 1456  # as in docs/limits.md


# At hidden size 1024 with four heads.
SHAPES = {"fixed": (256, 512), "vector": (128, 256), "gated-delta": (192, 384), "kda": (192, 384)}
# Of the scan of the forward, that of the backward, which computes states only, and `reverse_scan`, as in MACS: 192 keys
# are not padded to 256, and blocks have 64 value channels, except in those scans of delta rules that would spill.
UNITS = {"fixed": (9, 4, 9), "vector": (5, 2, 5), "gated-delta": (5.5, 7, 5.5), "kda": (5.5, 7, 5.5)}


@pytest.mark.parametrize("family", SHAPES)
def test_the_shapes_of_models(family):
    """RetNet, GLA, Gated DeltaNet and KDA of 340M parameters on Hopper, with nothing spilled or computed twice."""
    K, V = SHAPES[family]
    found = launches("sm_90", family, K=K, V=V)
    assert [x.kernel for x in found] == KERNELS
    assert all(x.code.matrix and x.code.stack == 0 for x in found)
    assert [x.code.macs for x in found if "scan" in x.kernel] == [units * 64**3 for units in UNITS[family]]


def instructions_at(width):
    """Of the convolution and of the recurrence of slices of a joint projection with rows of `width` numbers."""
    joint, conv = torch.randn(1, 300, width, dtype=torch.bfloat16), torch.nn.Conv1d(1024, 1024, 4, groups=1024)
    x, v = joint[..., :1024], joint[..., 1024:2048].unflatten(-1, (8, 128))
    with dry.gpu("sm_90") as found:
        convolve(conv.bfloat16(), x, None, Sequences(x, None), "triton")
        linear_attention(v, v, v, backend="triton")
    return [launch.code.instructions for launch in found]


def test_a_projection_whose_width_is_no_multiple_of_16():
    """Eight numbers, 16 bytes, are the most that an instruction loads; four are still fewer instructions than one."""
    whole, eight, four, one = (instructions_at(width) for width in (4608, 4616, 4612, 4609))
    assert eight == whole
    assert all(some < most for some, most in zip(four, one, strict=True))


@pytest.mark.parametrize(
    ("gpu", "version", "keeps"),
    [("sm_90", "3.7.0", False), ("sm_90", "3.7.1", True), ("sm_80", "3.6.0", True), ("sm_100", "3.9.0", False)],
)
def test_a_tile_is_kept_where_triton_compiles_it_right(gpu, version, keeps, monkeypatch):
    monkeypatch.setattr("triton.__version__", version)
    with dry.gpu(gpu):
        assert block_sizes.GPU.of(torch.zeros(1)).keeps == keeps


def test_64_channels():
    """The state has half as many rows: nothing is spilled, and `scan` and `reverse_scan` compute no product twice."""
    found = launches("sm_90", "gated-delta", K=64)
    assert all(x.code.stack == 0 for x in found)
    assert all(x.code.macs <= 5 * 64**3 for x in found if "scan" in x.kernel)


def test_a_long_row_is_computed_in_segments():
    """Of 16 chunks on 132 processors; the passes before the last compute M and E of ops/backends/triton/segments.py."""
    found = launches("sm_90", "linear", T=1024)
    first, last = ["prepare", "scan", "scan", "scan"], ["reverse_scan", "reverse_scan", "gradients"]
    assert [x.kernel for x in found] == [*first, *first, *last]
    assert all(x.code.matrix and x.code.stack == 0 for x in found)


@pytest.mark.parametrize("gpu", ["sm_90", "gfx942"])
def test_the_short_convolution(gpu):
    """One launch forward and two backward, with nothing spilled."""
    conv, x = torch.nn.Conv1d(96, 96, 4, groups=96), torch.randn(1, 200, 96, requires_grad=True)
    with dry.gpu(gpu) as found:
        y, _ = convolve(conv, x, None, Sequences(x, None), "triton")
        y.sum().backward()
    assert [x.kernel for x in found] == ["convolve", "slopes", "spread"]
    assert all(x.code.stack == 0 for x in found)


@pytest.mark.parametrize("gpu", ["sm_90", "gfx942"])
@pytest.mark.parametrize(("norm", "order", "V"), [("rms", "norm-gate", 128), ("rms-joint", "gate-norm", 1024)])
def test_the_gated_norm(gpu, norm, order, V):
    """One launch each way, with nothing spilled."""
    shape = (1, 300, 2, V)
    x, logits = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    strength = torch.rand(shape[:3], requires_grad=True) if norm == "rms" else None
    weight = torch.ones(V if norm == "rms" else 2 * V, requires_grad=True)
    call = GatedNorm(x, logits, strength, weight, None, norm, "silu", order, 1e-6)
    with dry.gpu(gpu) as found:
        choose("gated_norm", "triton", call).run(call).sum().backward()
    assert [x.kernel for x in found] == ["gated_norm", "gated_norm_back"]
    assert all(x.code.stack == 0 for x in found)


@pytest.mark.parametrize("gpu", ["sm_90", "gfx942"])
@pytest.mark.parametrize("branch", [None, torch.bfloat16])
@pytest.mark.parametrize("D", [1024, 4096])
def test_the_residual_norm(gpu, branch, D):
    """One launch each way, with nothing spilled, also where autograd needs the gradient in two dtypes."""
    x, weight = torch.randn(1, 300, D, requires_grad=True), torch.ones(D, requires_grad=True)
    y = None if branch is None else torch.randn(1, 300, D, dtype=branch, requires_grad=True)
    call = ResidualNorm(x, y, weight, 1e-6, torch.bfloat16)
    with dry.gpu(gpu) as found:
        s, n = choose("residual_norm", "triton", call).run(call)
        (s.sum() + n.sum()).backward()
    assert [x.kernel for x in found] == ["residual_norm", "residual_norm_back"]
    assert all(x.code.stack == 0 for x in found)


def test_a_block():
    """In a block only the last sum, of the residual stream and the MLP, is PyTorch's, besides the projections."""
    block = Block(zoo.mixer("gated-deltanet"), Sizes(hidden_size=64, num_heads=2, intermediate_size=96)).bfloat16()
    set_backend(block, "triton")
    x = torch.randn(1, 70, 64).bfloat16().requires_grad_()
    with dry.gpu("sm_90") as found, Calls() as calls:
        y, _ = block(x)
    assert [x.kernel for x in found if "residual" in x.kernel] == ["residual_norm"] * 2
    assert calls.names["add"] == 1 and not {"rms_norm", "_fused_rms_norm", "mean", "rsqrt"} & (+calls.names).keys()
    with dry.gpu("sm_90") as found, Calls() as back:
        y.backward(torch.ones_like(y))
    assert [x.kernel for x in found if "residual" in x.kernel] == ["residual_norm_back"] * 2
    assert back.names["add"] == 1  # of the gradients of the MLP's two projections


@pytest.mark.parametrize("gpu", ["sm_90", "gfx942"])
def test_a_gated_mlp(gpu):
    """One launch each way between its projections, with nothing spilled."""
    mlp, x = MLP(Sizes(hidden_size=64, num_heads=1, intermediate_size=2816)).bfloat16(), torch.randn(1, 70, 64)
    mlp.backend, x = "triton", x.bfloat16().requires_grad_()
    with dry.gpu(gpu) as found:
        with Calls() as there:
            y = mlp(x)
        y.backward(torch.ones_like(y))
    assert [x.kernel for x in found] == ["gated_norm", "gated_norm_back"]
    assert all(x.code.stack == 0 for x in found)
    assert pytorchs(there) == 3  # the projections


@pytest.mark.parametrize("gpu", ["sm_90", "gfx942"])
@pytest.mark.parametrize("shape", [(1, 300, 4), (1, 300, 4, 128)])
def test_the_decay(gpu, shape):
    """One launch each way, with nothing spilled."""
    x, bias = torch.randn(shape, requires_grad=True), torch.zeros(shape[2:]).flatten().requires_grad_()
    call = Control(x, bias, torch.zeros(4, requires_grad=True), "softplus")
    with dry.gpu(gpu) as found:
        choose("control", "triton", call).run(call).sum().backward()
    assert [x.kernel for x in found] == ["control", "control_back"]
    assert all(x.code.stack == 0 for x in found)


@pytest.mark.parametrize("gpu", ["sm_90", "gfx942"])
@pytest.mark.parametrize(
    ("heads", "groups", "key", "turned"), [(8, 8, 128, True), (6, 2, 96, False), (32, 32, 256, True), (0, 2, 256, True)]
)
def test_queries_and_keys(gpu, heads, groups, key, turned):
    """One launch each way for norm, rotation and gates, with nothing spilled; `heads` of 0: without gates."""
    weight = torch.randn(heads, key, requires_grad=True) if heads else None
    x = torch.randn(1, 50, groups, key, dtype=torch.bfloat16, requires_grad=True)
    call = QueryKey(x, torch.arange(50)[None] if turned else None, weight, "l2" if turned else "none", log=False)
    with dry.gpu(gpu) as found:
        results = [y.sum() for y in choose("query_key", "triton", call).run(call) if y is not None and y.grad_fn]
        torch.autograd.backward(results)
    assert [x.kernel for x in found] == ["query_key", "query_key_back"]
    assert all(x.code.stack == 0 for x in found)


def pytorchs(calls: Calls) -> int:
    """The number of calls but for our operators."""
    return sum(count for name, count in calls.names.items() if not name.startswith("triton_"))


@pytest.mark.parametrize("name", ["gated-deltanet", "softmax-gated-deltanet"])
def test_a_layer(name):
    """All of a layer but its projections: what PyTorch computes is counted. Gates add neither launch nor call."""
    layer = Mixer(name, hidden_size=64, num_heads=2).bfloat16()
    layer.backend, x = "triton", torch.randn(1, 70, 64).bfloat16()
    with dry.gpu("sm_90") as found:
        with Calls() as there:
            y, _ = layer(x)
        forward = len(found)
        with Calls() as back:
            y.backward(torch.ones_like(y))
    assert pytorchs(there) == 4 and pytorchs(back) == 7
    names = [x.kernel for x in found]
    assert names[:forward] == [
        "convolve", "query_key", "query_key", "control", "control", "prepare", "scan", "gated_norm",
    ]  # fmt: skip
    recurrence = ["prepare", "scan", "reverse_scan", "gradients"]
    around = ["control_back", "control_back", "query_key_back", "query_key_back", "slopes", "spread"]
    assert names[forward:] == ["gated_norm_back", *recurrence, *around]


@pytest.mark.parametrize("name", ["gla", "mamba2"])
def test_gates_where_q_and_k_have_no_norm(name):
    """A launch each way for q and one for k; autograd adds up no more gradients than without gates."""
    launched, sums = {}, {}
    for mixer in (name, f"softmax-{name}"):
        layer, x = Mixer(mixer, hidden_size=64, num_heads=2).bfloat16(), torch.randn(1, 70, 64).bfloat16()
        layer.backend = "triton"
        with dry.gpu("sm_90") as found, Calls() as calls:
            y, _ = layer(x)
            y.backward(torch.ones_like(y))
        launched[mixer], sums[mixer] = [x.kernel for x in found], calls.names["add"]
    gates = {"query_key": 2, "query_key_back": 2}
    assert Counter(launched[f"softmax-{name}"]) == Counter(launched[name]) + Counter(gates)
    assert sums[f"softmax-{name}"] == sums[name]


@pytest.mark.parametrize("gpu", ["sm_90", "gfx942"])
@pytest.mark.parametrize("mixer", ["softmax-gated-deltanet", "softmax-retnet", "kda"])
def test_a_token_of_a_layer(gpu, mixer):
    """Two launches between its projections, three with a short convolution, with nothing spilled."""
    layer, x = Mixer(mixer, hidden_size=1024, num_heads=8).bfloat16(), torch.randn(1, 1, 1024).bfloat16()
    layer.backend = "triton"
    with torch.no_grad(), dry.gpu(gpu) as found:
        _, state = layer(x)
        before = len(found)
        with Calls() as calls:
            layer(x, state, in_place=True)
    names = [x.kernel for x in found[before:]]
    assert names == ["convolve_token"] * (layer.conv is not None) + ["layer_kernel", "gated_norm"]
    assert all(x.code.stack == 0 for x in found[before:])
    assert not {"cat", "copy_", "clone"} & (+calls.names).keys()
