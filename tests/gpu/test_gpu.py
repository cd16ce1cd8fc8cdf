"""What an engineer with a GPU runs first, in three minutes: `make test-gpu`. The most important come first.

References are computed on the CPU in float64, from the same rounded inputs. HEADRACE_TEST_DEVICE=cpu runs what needs no
GPU on the CPU, to check the tests themselves.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equation import DECAYS, by_literal, detached, inputs
from headrace import InputError, linear_attention, set_backend, step, zoo
from headrace.hf import HeadraceForCausalLM, generation
from headrace.layers.blocks.block import Block, Sizes
from headrace.layers.linear import decays, features
from headrace.layers.linear.convolution import convolve
from headrace.layers.rotary import rotate
from headrace.ops.backends.triton import elementwise
from headrace.ops.dispatch import BACKENDS
from headrace.ops.sequences import Sequences
from headrace.verification.op import TOLERANCE
from headrace.verification.verify import relative, verify, worst
from tiny import build, config, tokens, trained

TOKENS, HEAD_SIZE = 150, 32  # two chunks and a part; kernels multiply matrices of at least 16 columns
TOLERANCES = {torch.float64: 1e-10, torch.float16: 2**-9, **TOLERANCE}
LINEAR_LAYERS = ["retnet", "mamba2", "gla", "rwkv6", "softmax-gated-deltanet", "softmax-kda"]
OTHER_LAYERS = ["transformer", "sliding-window", "gqa", "mamba", "rwkv7", "s4", "softmax-rnn-gate"]
ORDERED = sorted(BACKENDS, key=lambda name: ("triton", "torch", "native", "onnx", "fla").index(name))
RECURRENT_MODELS = ["gla", "mamba2", "rwkv6", "softmax-gated-deltanet", "mamba and s4"]


def rounded_inputs(decay, dtype, **sizes):
    return detached(inputs(decay, **{"tokens": TOKENS, "key": HEAD_SIZE, "value": HEAD_SIZE} | sizes), dtype)


def outputs_and_gradients(op, tensors):
    """Output, final state, and the gradients of a weighted sum of them to all tensors."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    results = op(leaves)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in results]
    return results, torch.autograd.grad(results, list(leaves.values()), weights)


def run_or_skip(op, *arguments):
    """A backend may refuse a dtype, a size or the machine; anything else that it raises is a failure."""
    try:
        return op(*arguments)
    except InputError as error:
        if "cannot run here" in str(error):
            pytest.skip(str(error))
        raise


def assert_matches_reference(device, backend, dtype, tensors, cu_seqlens=None, **settings):
    given = {name: x.to(device) for name, x in tensors.items()}
    bounds = None if cu_seqlens is None else cu_seqlens.to(device)
    call = lambda x: linear_attention(**x, cu_seqlens=bounds, backend=backend, **settings)  # noqa: E731
    reference = lambda x: by_literal(x, cu_seqlens, **settings)  # noqa: E731
    results, gradients = run_or_skip(outputs_and_gradients, call, given)
    expected, expected_gradients = outputs_and_gradients(reference, detached(tensors, torch.float64))
    assert results[0].dtype == dtype and results[0].device.type == device
    assert worst(results, expected) <= TOLERANCES[dtype]
    assert worst(gradients, expected_gradients) <= 10 * TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("rule", ["add", "delta"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("backend", ORDERED)
def test_op_matches_the_reference(device, backend, decay, rule, dtype):
    assert_matches_reference(device, backend, dtype, rounded_inputs(decay, dtype, groups=2), rule=rule)


@pytest.mark.parametrize("rule", ["add", "delta"])
@pytest.mark.parametrize("backend", ORDERED)
def test_grouped_queries_match_the_reference(device, backend, rule):
    tensors = rounded_inputs("scalar", torch.float32, queries=2)
    assert_matches_reference(device, backend, torch.float32, tensors, rule=rule)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", RECURRENT_MODELS)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_decoding_with_a_cuda_graph_gives_the_same_tokens(device, name, backend, sampled, monkeypatch):
    """As transformers' loop, by the same random numbers; the second time by the same graph."""
    if device != "cuda":
        pytest.skip("a CUDA graph needs a GPU")
    model, ids = build(name).to(device, torch.float32), tokens(2).to(device)
    set_backend(model, backend)
    options = {"max_new_tokens": 12, "do_sample": sampled, "top_k": 9, "top_p": 0.9} if sampled else {}
    options |= {"max_new_tokens": 12, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        results.append(model.generate(ids, **options, cache_implementation="static"))
    assert model.engine.about(model) == "a CUDA graph" and model.engine.graph.step is not None
    monkeypatch.setattr(generation, "changed_reason", lambda model: "transformers' loop is asked for")
    torch.manual_seed(1)
    expected = model.generate(ids, **options)
    assert all(torch.equal(each, expected) for each in results)


@pytest.mark.parametrize("name", ["hybrid", "transformer"])
def test_models_with_growing_states_say_that_they_have_no_graph(device, name):
    model, ids = build(name).to(device), tokens(2).to(device)
    model.generate(ids, max_new_tokens=3, pad_token_id=0, attention_mask=torch.ones_like(ids))
    assert "grows with the tokens" in model.engine.about(model) or device != "cuda"


@pytest.mark.parametrize("name", ["gla", "transformer"])
def test_tokens_on_the_cpu_are_continued(device, name):
    model, ids = build(name).to(device, torch.float32), tokens(2)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    here, there = (model.generate(x, attention_mask=torch.ones_like(x), **options) for x in (ids, ids.to(device)))
    assert here.is_cpu and torch.equal(here, there.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", ["add", "delta"])
@pytest.mark.parametrize("decay", DECAYS)
def test_steps_match_the_reference(device, decay, rule, dtype):
    tensors = rounded_inputs(decay, dtype, tokens=9)
    expected, final = by_literal(detached(tensors, torch.float64), rule=rule)
    given = {name: x.to(device) for name, x in tensors.items()}
    state = given.pop("initial_state").float()
    for t in range(9):
        token = {name: x if x.dim() == 1 else x[:, t] for name, x in given.items()}
        out, state = step(**token, state=state, rule=rule)
        assert relative(out, expected[:, t]) <= TOLERANCES[dtype]
    assert relative(state, final) <= TOLERANCES[dtype]


@pytest.mark.parametrize("rule", ["add", "delta"])
@pytest.mark.parametrize("backend", ORDERED)
def test_packed_sequences_match_the_reference(device, backend, rule):
    """One of a single token, and one without tokens."""
    bounds = torch.tensor([0, 3, 4, 4, 70, TOKENS])
    tensors = rounded_inputs("scalar", torch.float32, rows=1, n=5)
    assert_matches_reference(device, backend, torch.float32, tensors, bounds, rule=rule)


def between_products(x, gate, bias, angle, backend):
    """What stands between a layer's products and its recurrence."""
    by, rates, weight = (angle.cos(), angle.sin()), bias[: x.shape[2]], bias[-x.shape[3] :]
    found, of_heads = (
        (rotate(x, by, backend), elementwise.silu_product(x.flatten(-2), gate, backend)),
        bias.view(x.shape[2:]) / 4,
    )
    found += (decays.log_sigmoid(x, 16.0, backend),)
    if backend == "torch":
        decay, each = (decays.softplus_decay(decays.biased(z, bias[: z[0, 0].numel()]), rates) for z in (x, x[..., 0]))
        norm = F.rms_norm(x, weight.shape, weight, 1e-5) * F.silu(gate.view_as(x))
        shares = len(of_heads) * (x * of_heads).sum(-1).softmax(-1)
        wide = ((1 + rates[:, None]) * x * shares[..., None] * F.silu(gate.view_as(x))).flatten(-2)
        joint = F.rms_norm(wide, wide.shape[-1:], bias, 1e-5).view_as(x)
        return *found, features.l2_norm(x), decay, each, norm, shares, joint
    decay, each = elementwise.SoftplusDecay.apply(x, bias, rates), elementwise.head_decay(x[..., 0], rates, rates)
    norm = elementwise.GatedNorm.apply(x, gate.view_as(x), weight, 1e-5, True)
    shares = elementwise.head_gate(x, of_heads, 1.0, True, False, x.dtype)
    joint = elementwise.gate_norm(x, gate.view_as(x), x, rates, shares, bias, 1, 1e-5)
    return *found, elementwise.L2Norm.apply(x, features.EPS), decay, each, norm, shares, joint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_elementwise_operators_match_the_reference(device, dtype):
    B, H, K = 2, 3, 96
    sizes = {"x": (B, TOKENS, H, K), "gate": (B, TOKENS, H * K), "bias": (H * K,)}
    given = {name: torch.randn(size).to(dtype) for name, size in sizes.items()}
    there, angle = {name: x.to(device) for name, x in given.items()}, torch.randn(1, TOKENS, 1, K // 2)
    if not elementwise.computes("triton", there["x"]):
        pytest.skip("the operators need Triton, and a GPU or its interpreter")
    run = lambda x: between_products(**x, angle=angle.to(x["x"]), backend="triton")  # noqa: E731
    by_pytorch = lambda x: between_products(**x, angle=angle.to(dtype).double(), backend="torch")  # noqa: E731
    ours = outputs_and_gradients(run, there)
    exact = outputs_and_gradients(by_pytorch, detached(given, torch.float64))
    assert worst(ours[0], exact[0]) <= TOLERANCES[dtype] and worst(ours[1], exact[1]) <= 10 * TOLERANCES[dtype]


@torch.no_grad()
def test_convolution_of_a_token_matches_the_reference(device):
    conv, x, history = nn.Conv1d(70, 70, 4, groups=70), torch.randn(3, 1, 70), torch.randn(3, 3, 70)
    there, rows = [y.to(device) for y in (x, history)], Sequences(x, None)
    exact = convolve(conv.double(), x.double(), history.double(), rows, "torch")
    found = convolve(conv.float().to(device), *there, rows, "triton", in_place=True)
    assert worst(found, exact) <= TOLERANCES[torch.float32] and found[1].cpu().equal(exact[1].float())


@pytest.mark.parametrize("name", LINEAR_LAYERS)
def test_compiled_blocks_equal_uncompiled_ones(device, name):
    torch.compiler.reset()
    block = Block(zoo.mixer(name), Sizes(64, 2, 64), 0, 2).to(device)
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(copy.deepcopy(block), fullgraph=True, backend=backend)
    x = torch.randn(2, TOKENS, 64).to(device)
    results = []
    for module in (compiled, block):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.square().sum().backward()
        results.append([y, leaf.grad, *(p.grad for p in module.parameters())])
    assert worst(results[0], [y.cpu().double() for y in results[1]]) <= 1e-4


def test_model_loss_and_gradients_match_the_cpu(device):
    reference = trained(HeadraceForCausalLM(config("hybrid"))).train()
    model, ids = copy.deepcopy(reference).float().to(device), tokens(2)
    there = ids.to(device)
    loss, expected = model(there, labels=there, skip_logits=True).loss, reference(ids, labels=ids).loss
    loss.backward(), expected.backward()
    assert relative(loss, expected) <= 1e-5
    assert worst([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()]) <= 1e-3


@pytest.mark.parametrize("name", [*RECURRENT_MODELS, "hybrid"])
def test_generation_gives_the_tokens_of_whole_forward_passes(device, name):
    model, ids = build(name).to(device), tokens(2).to(device)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    generated = model.generate(ids, **options)
    for length in range(ids.shape[1], generated.shape[1]):
        logits = model(generated[:, :length], use_cache=False).logits[:, -1]
        assert torch.equal(logits.argmax(-1), generated[:, length])


def test_hostile_decays_stay_finite(device):
    """Decays that underflow, forget everything, or forget nothing."""
    tensors = {name: x.to(device) for name, x in rounded_inputs("vector", torch.float32).items()}
    for value in (-1e4, -torch.inf, 0.0):
        x = tensors | {"log_decay": torch.full_like(tensors["log_decay"], value)}
        results, gradients = outputs_and_gradients(lambda x: linear_attention(**x), x)
        assert all(y.isfinite().all() for y in (*results, *gradients)), value


@pytest.mark.filterwarnings("ignore::headrace.GateWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LINEAR_LAYERS + OTHER_LAYERS)
def test_layers_obey_every_law(device, name, dtype):
    """The checks of `headrace verify`: packed, padded, split, token by token, every backend, forward and backward."""
    rows = verify([name], device, dtype)
    assert rows and not [row for row in rows if not row.holds]


def test_op_obeys_its_laws_at_the_sizes_of_large_models(device):
    if device == "cpu":
        pytest.skip("takes minutes on a CPU")
    rows = verify(["linear_attention"], device, torch.float32)
    assert rows and not [row for row in rows if not row.holds]
