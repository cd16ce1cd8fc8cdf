"""torch.compile(model, fullgraph=True): logits, losses, gradients and decoding are those of the model itself."""

import copy
import shutil

import pytest
import torch

from headrace import HeadraceForCausalLM, Mixer, compile_blocks, layers, quantize, set_backend, zoo
from headrace.spec.stack import BlockStyle, Decoder, Experts, Layer
from tiny import SIZES, close, config, gradients_agree

pytestmark = pytest.mark.filterwarnings(  # PyTorch's own, of what its compiler does itself
    "ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor that is not a leaf"
)


@pytest.fixture(autouse=True)
def _from_the_beginning():
    torch.compiler.reset()


def build(mixer, **changes):
    return HeadraceForCausalLM(config(mixer, **changes))


def compiled(model, backend):
    return torch.compile(model, fullgraph=True, backend=backend)


def loss_and_gradients(model, call, ids):
    model.zero_grad()
    loss = call(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


# Tracing every expert's products takes long: one layer.
EXPERTS = Decoder((Layer(zoo.get("transformer"), "experts"),), BlockStyle(experts=Experts(4, 2)))


@pytest.mark.slow
def test_compiled_training_equals_uncompiled():
    """With labels, where experts have a loss of their own."""
    model = build(EXPERTS, num_hidden_layers=1).train()
    ids = torch.randint(1, SIZES["vocab_size"], (2, 9))
    results = loss_and_gradients(model, compiled(model, "aot_eager"), ids)
    gradients_agree(results, loss_and_gradients(model, model, ids), 1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")  # its successor's name is new
@pytest.mark.parametrize("reentrant", [False, True])
def test_compiled_training_with_checkpoints_is_one_graph(reentrant):
    model, ids = build("hybrid").train(), torch.randint(1, SIZES["vocab_size"], (2, 9))
    expected = loss_and_gradients(model, model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    gradients_agree(loss_and_gradients(model, compiled(model, "aot_eager"), ids), expected, 1e-5)


@pytest.mark.slow(seconds=30)
@pytest.mark.parametrize(
    ("mixer", "backend"),
    [("linear-attention", "inductor"), ("softmax-retnet", "eager"), ("mamba2", "eager"), ("rwkv6", "eager")],
)
def test_compiled_blocks_are_one_graph_for_all_layers_and_lengths(mixer, backend):
    """Equal losses and gradients, no graph break, no compilation for another layer or length."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    model = build(mixer, mlp="none", intermediate_size=None).train()
    lengths = [torch.randint(1, SIZES["vocab_size"], (2, length)) for length in (9, 14, 33)]
    expected = [loss_and_gradients(model, model, ids) for ids in lengths]
    names = list(model.state_dict())
    compile_blocks(model, fullgraph=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for ids, of_the_model in zip(lengths, expected, strict=True):
            gradients_agree(loss_and_gradients(model, model, ids), of_the_model, 1e-5)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("mixer", ["retnet", "transformer", "hedgehog"])
def test_rotary_angles_are_one_operator_of_a_compiled_layer(mixer, tokens):
    """No compiler puts a cosine in float64 into the rotation, which has one for each channel of each head, but for a
    single token."""
    graphs, layer, x = [], layers.build(zoo.mixer(mixer), hidden_size=16, num_heads=2), torch.randn(1, tokens, 16)

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend=keep)(x)[0], layer(x)[0])
    called = [node.target for graph in graphs for node in graph.graph.nodes]
    assert called.count(torch.ops.headrace.angles.default) == (tokens > 1) and ("cos" in called) == (tokens == 1)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_decoding_equals_uncompiled():
    """Logits of a prompt and of tokens after it, with the cache."""
    model, ids = build(EXPERTS, num_hidden_layers=1).eval(), torch.randint(1, SIZES["vocab_size"], (2, 12))
    call = compiled(model, "eager")
    close(call(ids, use_cache=False).logits, model(ids, use_cache=False).logits, 1e-5)
    mine, theirs = (model(ids[:, :8]).past_key_values for _ in range(2))
    for token in ids[:, 8:].split(1, 1):
        close(call(token, past_key_values=mine).logits, model(token, past_key_values=theirs).logits, 1e-5)
    assert mine.get_seq_length() == 12


@torch.no_grad()
def test_compiled_model_has_maps():
    model, ids = build("hybrid").eval(), torch.randint(1, SIZES["vocab_size"], (2, 9))
    maps = compiled(model, "eager")(ids, output_attentions=True).attentions
    for own, expected in zip(maps, model(ids, output_attentions=True).attentions, strict=True):
        close(own, expected, 1e-5)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_model_keeps_its_own_cache():
    """The cache that a model makes by itself, of states that are parts of larger tensors: a short convolution's."""
    model, ids = build("gated-deltanet", num_hidden_layers=1).eval(), torch.randint(1, SIZES["vocab_size"], (2, 11))
    call = compiled(model, "aot_eager")
    mine, theirs = call(ids[:, :9]), model(ids[:, :9])
    for token in ids[:, 9:].split(1, 1):
        close(mine.logits, theirs.logits, 1e-5)
        mine, theirs = (c(token, past_key_values=out.past_key_values) for c, out in ((call, mine), (model, theirs)))
    close(mine.logits, theirs.logits, 1e-5)


@pytest.mark.slow
@torch.no_grad()
def test_generation_with_a_compiled_forward():
    model, ids = build("gated-deltanet", num_hidden_layers=1).eval(), torch.randint(1, SIZES["vocab_size"], (2, 6))
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(torch.compile(model, backend="eager").generate(ids, max_new_tokens=4, do_sample=False), expected)
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)


@pytest.mark.slow
def test_blocks_that_are_one_graph_generate_the_same_tokens():
    """By PyTorch's step, in place, as on a GPU, for several batch sizes."""
    model = build("gated-deltanet", num_hidden_layers=1).eval()
    set_backend(model, "torch")
    compiled = compile_blocks(copy.deepcopy(model), backend="eager", fullgraph=True)
    for batch in (3, 2):
        ids = torch.randint(1, SIZES["vocab_size"], (batch, 5))
        expected = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert torch.equal(compiled.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0), expected)


@pytest.mark.parametrize("length", [1, 9])
@torch.no_grad()
def test_quantized_layer_compiles_to_one_graph(length):
    layer, x = quantize(Mixer("gla", hidden_size=32, num_heads=2)), torch.randn(2, 9 + length, 32)
    state = layer(x[:, :9])[1]
    expected = layer(x[:, 9:], state)[0]
    # The kernel rounds inputs to 16 bits, 2^-16 of the largest, and a graph does not.
    close(compiled(layer, "aot_eager")(x[:, 9:], state)[0], expected, 2**-13)
