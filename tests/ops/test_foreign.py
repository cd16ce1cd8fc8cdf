"""Others agree: the op against other libraries' implementations of the same recurrence, and our layers against
others with the weights copied. A peer that is not installed skips with its reason."""

import pytest
import torch
import torch.nn.functional as F

from attention_layers import agree, randomized
from foreign_layers import COMPOSED, D, H, rwkv6
from headrace import linear_attention, zoo
from headrace.layers.linear.mixer import LinearMixer
from headrace.ops.reference import literal
from headrace.verification.verify import relative
from peers import FAMILIES, PEERS

# Some peers compute in float32 whatever they are given. An output in bfloat16 is rounded to 2⁻⁹ of its size, after
# products of numbers that are rounded so too.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 1e-5, torch.float64: 1e-10}
OURS = literal, linear_attention  # the other forms are held against the loop in test_op.py


def inputs_of(peer, seed=0):
    """Inputs of the peer's family, in the most exact dtype that it takes, or a skip that says why it is not here."""
    if (reason := peer.missing()) is not None:
        pytest.skip(reason)
    (dtype, *_), K, rows = peer.dtypes, max(8, peer.multiple), 1 if peer.source.startswith("ggml") else 2
    drawn = FAMILIES[peer.family].inputs(rows, 128, 3, K, K if peer.square else 12, dtype=dtype, seed=seed)
    return drawn, dtype


def widened(tensors):
    """A peer in bfloat16 is compared with what we compute of the same numbers in float32."""
    return {name: x.float() if x.dtype == torch.bfloat16 else x for name, x in tensors.items()}


def named(peer):
    return f"{peer.family}-{peer.name}".replace(" ", "-")


@pytest.mark.parametrize("peer", PEERS, ids=named)
def test_op_equals_other_libraries(peer):
    """Outputs, the final state and the gradient of every input that a model would train."""
    tensors, dtype = inputs_of(peer)
    theirs, their_state = peer(peer.arguments(tensors))
    trained = {name: x for name, x in tensors.items() if x.requires_grad}
    weight = torch.randn(theirs.shape)
    if peer.backward:
        their_gradients = torch.autograd.grad((theirs * weight).sum(), trained.values())
    for op in OURS:
        ours, our_state = op(**widened(tensors), **FAMILIES[peer.family].options())
        assert relative(ours, theirs) <= TOLERANCE[dtype]
        assert their_state is None or relative(our_state, their_state) <= TOLERANCE[dtype]
        if peer.backward:
            gradients = torch.autograd.grad((ours * weight).sum(), trained.values())
            for name, mine, their in zip(trained, gradients, their_gradients, strict=True):
                assert relative(mine, their) <= TOLERANCE[dtype], name


@torch.no_grad()
@pytest.mark.parametrize("peer", [peer for peer in PEERS if peer.states], ids=named)
def test_op_equals_other_libraries_from_an_initial_state(peer):
    tensors, dtype = inputs_of(peer, seed=1)
    B, _, H, V = tensors["v"].shape
    start = torch.randn(B, H, tensors["k"].shape[-1], V, dtype=dtype)
    theirs, their_state = peer(peer.arguments(tensors), start.clone())
    for op in OURS:
        start = start.to(their_state.dtype)
        ours, our_state = op(**widened(tensors), initial_state=start, **FAMILIES[peer.family].options())
        assert relative(ours, theirs) <= TOLERANCE[dtype] and relative(our_state, their_state) <= TOLERANCE[dtype]


def test_rwkv6_equals_the_package_of_its_author():
    """With its weights in ours, of which every one must have a counterpart. Layers of transformers are compared in
    whole models: tests/convert/test_families.py."""
    torch.manual_seed(0)
    theirs, weights = rwkv6()
    ours = LinearMixer(zoo.get("rwkv6"), hidden_size=D, num_heads=H, norm_eps=1e-6)
    shapes = {key: parameter.shape for key, parameter in ours.state_dict().items()}
    parts = [weights.pop(f"in_proj.{name}").reshape(-1, D) for name in ours.parts if ours.parts[name]]
    weights["in_proj.weight"] = torch.cat(parts)
    ours.load_state_dict({key: x.detach().reshape(shapes[key]) for key, x in weights.items()})
    agree(lambda x: ours(F.layer_norm(x, (D,)))[0], theirs, torch.randn(2, 70, D), 1e-5)


@pytest.mark.parametrize("name", COMPOSED)
def test_layer_equals_composed_foreign_parts(name):
    torch.manual_seed(0)
    ours = randomized(LinearMixer(zoo.get(name), hidden_size=D, num_heads=H))
    agree(lambda x: ours(x)[0], lambda x: COMPOSED[name](ours, x), torch.randn(2, 70, D), 1e-5)
