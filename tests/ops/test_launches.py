"""The launches of the backend "triton", compiled for GPUs that are not there: their number and their code."""

import math

import pytest
import torch
from torch.torch_version import TorchVersion

pytest.importorskip("triton", reason="Triton is not installed")

import triton

import dry
import gpu_tables
from headrace import Mixer, linear_attention
from headrace.ops.backends.triton import block_sizes, elementwise, op
from headrace.ops.call import Call
from headrace.ops.dispatch import BACKENDS
from peers import FAMILIES

pytestmark = pytest.mark.slow
KERNELS = ["prepare", "scan", "prepare", "scan", "reverse_scan", "gradients"]  # two forward, four backward
# Bytes of registers that a thread may spill to memory, by (GPU, family), with Triton 3.9.0. Hopper and Blackwell's data
# centre spill nothing but under a decay per channel, in `prepare` and `gradients`: their four warps spill, and were
# faster on an H200 than eight that do not. The others are what these made, or somewhat above. FLA's kernels spill up to
# 7,512 bytes under a decay per channel, and up to 824 and 2,080 under delta rules.
STACK = {  # on Hopper each rule and each kind of decay (a number per head: below), one family on each other GPU
    ("sm_90", "gated-delta"): 0, ("sm_90", "vector"): 288, ("sm_90", "kda"): 584,
    ("sm_100", "bonus"): 0, ("sm_80", "vector"): 192, ("sm_120", "scalar"): 48,
    ("gfx942", "kda"): 232,  # the most of bfloat16, in research/docs/benchmarks.md
}  # fmt: skip
# What Triton before 3.9 spills where that is more.
OLDER = {("gfx942", "kda"): 392, ("sm_80", "vector"): 224}
# Multiply-adds of the equations per chunk with K = 128, in units of 64³. A loop over blocks of channels counts once, as
# in the code. `scan` and `reverse_scan` have 64 value channels on Hopper and else 32.
SCANS, DELTA_SCANS = {"scan": 5, "reverse_scan": 5}, {"scan": 8, "reverse_scan": 8}
MACS = {
    ("sm_90", "vector"): SCANS | {"prepare": 1.5, "gradients": 3.25},
    ("sm_90", "gated-delta"): DELTA_SCANS | {"prepare": 4, "gradients": 10},
    ("sm_90", "kda"): DELTA_SCANS | {"prepare": 5, "gradients": 6},
    **{key: {"scan": 2.5, "reverse_scan": 2.5} for key in [("sm_80", "vector"), ("sm_120", "scalar")]},
}  # fmt: skip


def launches(
    gpu: str, family: str, K: int = 128, dtype: torch.dtype = torch.bfloat16, V: int | None = None, B: int = 20
) -> list[dry.Launch]:
    """The launches of forward and backward with both gates and an initial state; V: K unless given. B: the number of
    sequences, 20 of which are enough for blocks of 64 value channels on every GPU."""
    V = V or K
    tensors = FAMILIES[family].inputs(B=B, K=K, V=V, dtype=dtype)
    shape = tensors["v"].shape
    gates = {name: torch.rand(shape[:3], requires_grad=True) for name in ("read_gate", "write_gate")}
    state = torch.zeros(shape[0], shape[2], K, V + FAMILIES[family].normalize, requires_grad=True)
    with dry.gpu(gpu) as found:
        results = linear_attention(
            **tensors, **gates, initial_state=state, **FAMILIES[family].options(), backend="triton"
        )
        torch.autograd.backward(results, [torch.ones_like(x) for x in results])
    assert [x.kernel for x in found] == KERNELS
    return found


@pytest.mark.parametrize(("gpu", "family"), STACK)
def test_kernels_use_matrix_units_and_fit(gpu, family):
    """Two launches forward and four backward, all on matrix units, in the GPU's shared memory, with little spilled
    and no product computed twice."""
    found = launches(gpu, family)
    assert all(x.code.matrix for x in found)
    assert max(x.code.shared for x in found) <= dry.GPUS[gpu].shared
    older = OLDER if TorchVersion(triton.__version__) < "3.9" else {}
    assert max(x.code.stack for x in found) <= older.get((gpu, family), STACK[gpu, family])
    for kernel, units in MACS.get((gpu, family), {}).items():
        assert max(x.code.macs for x in found if x.kernel == kernel) == units * 64**3


def test_float32_kernels_fit():
    """Their tiles, larger than those of bfloat16, are on matrix units and in the GPU's shared memory, too."""
    found = launches("gfx942", "scalar", K=256, dtype=torch.float32)
    assert all(x.code.matrix for x in found)
    assert max(x.code.shared for x in found) <= dry.GPUS["gfx942"].shared
    assert max(x.code.stack for x in found) <= 1456  # as in research/docs/benchmarks.md


# At hidden size 1024 with four heads.
SHAPES = {"fixed": (256, 512), "gated-delta": (192, 384)}
# Of the scan of the forward, that of the backward, which computes states only, and `reverse_scan`, as in MACS: 192 keys
# are not padded to 256, and blocks have 64 value channels.
UNITS = {"fixed": (9, 4, 9), "gated-delta": (11, 7, 11)}
# Spilled bytes, as in STACK. With 64 value channels the scan of gated-delta spills, and was faster than with 32.
SPILLED = {"fixed": 0, "gated-delta": 64}


@pytest.mark.parametrize("family", SHAPES)
def test_kernels_fit_at_model_shapes(family):
    """RetNet and Gated DeltaNet of 340M parameters on Hopper, little spilled and nothing computed twice."""
    K, V = SHAPES[family]
    found = launches("sm_90", family, K=K, V=V)
    assert all(x.code.matrix and x.code.stack <= SPILLED[family] for x in found)
    assert [x.code.macs for x in found if "scan" in x.kernel] == [units * 64**3 for units in UNITS[family]]


def instructions_at(width):
    """Of the recurrence of a slice of a joint projection with rows of `width` numbers."""
    v = torch.randn(1, 300, width, dtype=torch.bfloat16)[..., 1024:2048].unflatten(-1, (8, 128))
    with dry.gpu("sm_90") as found:
        linear_attention(v, v, v, backend="triton")
    return [launch.code.instructions for launch in found]


def test_unaligned_projection_widths_are_loaded_in_parts():
    """Eight numbers, 16 bytes, are the most that an instruction loads; four are still fewer instructions than one."""
    whole, eight, four, one = (instructions_at(width) for width in (4608, 4616, 4612, 4609))
    assert eight == whole != []
    assert all(some < most for some, most in zip(four, one, strict=True))


@pytest.mark.parametrize(
    ("gpu", "version", "keeps"),
    [("sm_90", "3.7.0", False), ("sm_90", "3.7.1", True), ("sm_80", "3.6.0", True), ("sm_100", "3.9.0", False)],
)
def test_tiles_are_kept_where_triton_compiles_them_right(gpu, version, keeps, monkeypatch):
    monkeypatch.setattr("triton.__version__", version)
    with dry.gpu(gpu):
        assert block_sizes.GPU.of(torch.zeros(1)).keeps == keeps


def test_few_sequences_have_blocks_of_32_value_channels():
    """With 64, `scan` and `reverse_scan` would leave most of the GPU idle."""
    few, many = launches("sm_90", "scalar", B=1), launches("sm_90", "scalar")
    for one, other in zip(few, many, strict=True):
        halved = 2 if "scan" in one.kernel else 1
        assert math.prod(one.grid) * 20 == math.prod(other.grid) * halved
        assert one.code.macs * halved == other.code.macs and one.code.stack == 0


def test_kernels_fit_with_64_channels():
    """The state has half as many rows: the four warps of `gradients` spill little, no other kernel spills, and `scan`
    and `reverse_scan` compute no product twice."""
    found = launches("sm_90", "gated-delta", K=64)
    assert all(x.code.stack <= (32 if x.kernel == "gradients" else 0) for x in found)
    assert all(x.code.macs <= 5 * 64**3 for x in found if "scan" in x.kernel)


@pytest.mark.parametrize(("gpu", "takes"), [("sm_80", False), ("sm_90", True), ("sm_100", False), ("gfx942", False)])
def test_auto_takes_the_kernels_on_gpus_that_have_run_them(gpu, takes):
    """Before FLA's; the native backend computes on the CPU, where these tensors are."""
    q = torch.zeros(1, 4, 2, 16)
    with dry.gpu(gpu):
        assert op.BACKEND.on_request(Call(q, q, q)) != takes
        assert elementwise.computes("auto", q) == takes and not elementwise.computes("torch", q)
    assert [*BACKENDS].index("triton") < [*BACKENDS].index("fla")


def launches_of_a_layer(mixer, gpu="sm_90"):
    layer = Mixer(mixer, hidden_size=128, num_heads=2).bfloat16()
    layer.backend, x = "triton", torch.randn(1, 70, 128).bfloat16()
    with dry.gpu(gpu) as launched:
        y, _ = layer(x)
        y.backward(torch.ones_like(y))
    return launched


def test_a_layer_launches_each_kernel_once():
    """Those of the norm and of the gates once for q and once for k."""
    launched = launches_of_a_layer("softmax-gated-deltanet")
    gates, norms = ["head_gate"] * 2, ["l2_norm_backward"] * 2
    forward = ["convolve", "softplus_decay", *gates, "l2_norm", "l2_norm", *KERNELS[:2], "norm"]
    backward = ["norm_backward", *KERNELS[2:], *norms, *gates, "softplus_decay_backward", "silu_backward"]
    assert [x.kernel for x in launched] == [*forward, *backward, "convolve_backward"]
    assert all(x.code.stack == 0 for x in launched)


@torch.no_grad()
@pytest.mark.parametrize("gpu", dry.GPUS)
def test_a_token_of_a_layer_launches_each_kernel_once(gpu):
    layer, x = Mixer("gated-deltanet", hidden_size=128, num_heads=2).bfloat16(), torch.randn(2, 1, 128).bfloat16()
    layer.backend, state = "triton", layer(x)[1]
    with dry.gpu(gpu) as launched:
        layer(x, state)
    expected = ["convolve_token", "softplus_decay", "l2_norm", "l2_norm", "step_kernel", "norm"]
    assert [x.kernel for x in launched] == expected and all(x.code.stack == 0 for x in launched)


@pytest.mark.parametrize("gpu", dry.GPUS)
def test_elementwise_kernels_spill_nothing(gpu):
    found = [
        x
        for mixer in ("softmax-retnet", "kda", "softmax-mamba2", "retnet(read.norm=layer)")
        for x in launches_of_a_layer(mixer, gpu)
    ]
    names = "l2_norm", "softplus_decay", "norm", "silu_product", "gate_norm"
    kernels = {*(f"{name}{way}" for name in names for way in ("", "_backward")), "rotate", "head_gate"}
    assert kernels <= {x.kernel for x in found} and all(x.code.stack == 0 for x in found if x.kernel in kernels)


@pytest.mark.parametrize("gpu", dry.GPUS)
@pytest.mark.parametrize(("heads", "shared", "K"), [(4, 1, 128), (16, 1, 256), (32, 32, 128), (3, 1, 1025)])
def test_gates_of_large_layers_spill_nothing(gpu, heads, shared, K):
    """Up to the most weights, the last in a tile of 8,192."""
    x = torch.randn(1, 70, heads // shared, K, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(heads, K, dtype=torch.bfloat16, requires_grad=True)
    with dry.gpu(gpu) as found:
        gate = elementwise.head_gate(x, weight, 1.0, True, False, torch.float32)
        gate.backward(torch.ones_like(gate))
    assert weight.numel() <= elementwise.MOST_WEIGHTS
    assert [x.kernel for x in found] == ["head_gate"] * 2 and all(x.code.stack == 0 for x in found)


@pytest.mark.parametrize("gpu", dry.GPUS)
def test_norms_of_long_rows_spill_nothing(gpu):
    """With as many channels as a program takes."""
    x, weight = (torch.ones(*shape, 2048, dtype=torch.bfloat16, requires_grad=True) for shape in ((1, 3), ()))
    with dry.gpu(gpu) as launched:
        gated = elementwise.GatedNorm.apply(x[:, :, None], x[:, :, None], weight, 1e-6, True)
        torch.autograd.backward([gated, *elementwise.NormOfSum.apply(x, x, weight, 1e-6)], [gated, x, x])
    assert [x.kernel for x in launched] == ["norm", "norm", "norm_backward", "norm_backward"]
    assert all(x.code.stack == 0 for x in launched)


@pytest.mark.parametrize("gpu", dry.GPUS)
def test_norms_of_many_gated_heads_spill_nothing(gpu):
    """With as many channels as a program takes."""
    x, read, skip, weight = (
        torch.ones(shape, dtype=torch.bfloat16, requires_grad=True)
        for shape in ((1, 3, 64, 64), (1, 3, 64), (64,), (4096,))
    )
    with dry.gpu(gpu) as launched:
        y = elementwise.gate_norm(x, x, x, skip, read, weight, 1, 1e-6)
        y.backward(torch.ones_like(y))
    assert elementwise.gate_norm_takes(64, 64) and not elementwise.gate_norm_takes(65, 64)
    assert [x.kernel for x in launched] == ["gate_norm", "gate_norm_backward"]
    assert all(x.code.stack == 0 for x in launched)


# Of the layers of 340M parameters: heads of v, K, V, whether the decay is per key, whether the rule is delta
LAYERS = {
    "gla": (4, 128, 256, True, False), "kda": (8, 128, 128, True, True), "gated-deltanet": (4, 192, 384, False, True),
    "mamba2": (32, 128, 64, False, False),
}  # fmt: skip


@pytest.mark.parametrize(("name", "kernel"), gpu_tables.TAKEN)
def test_block_sizes_are_those_that_were_fastest_on_an_h200(name, kernel):
    """As research/docs/benchmarks.md says of training with 4 rows of 4,096 tokens."""
    H, K, V, per_key, delta = LAYERS[name]
    few = 2 * 4 * H * -(-V // 64) <= 132
    h200 = block_sizes.GPU(False, True, 2, 132, True, False)
    sizes = block_sizes.block_sizes(kernel, K, V, delta, per_key, torch.bfloat16, True, h200, few)
    taken = (word.split("=") for word in gpu_tables.TAKEN[name, kernel].split())
    assert {name: int(size) for name, size in taken}.items() <= sizes.items()
