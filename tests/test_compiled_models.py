"""torch.compile(model, fullgraph=True): logits, losses, gradients and decoding are those of the model itself."""

import shutil

import pytest
import torch

from headrace.hf import HeadraceForCausalLM
from tiny import SIZES, close, config

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what its compiler does itself


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
    return [loss, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixer", "backend"),
    [("softmax-gla", "aot_eager"), ("transformer", "aot_eager"), ("experts", "aot_eager"), ("softmax-gla", "inductor")],
)
def test_training(mixer, backend):
    """With labels, where experts have a loss of their own. The C++ compiler takes most of the time, for each layer, and
    so does tracing every expert's products: both have one, all others two."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    changes = {"num_hidden_layers": 1} if backend == "inductor" or mixer == "experts" else {}
    model, ids = build(mixer, **changes).train(), torch.randint(1, SIZES["vocab_size"], (2, 9))
    found = loss_and_gradients(model, compiled(model, backend), ids)
    for mine, theirs in zip(found, loss_and_gradients(model, model, ids), strict=True):
        close(mine, theirs, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["softmax-gla", "transformer", "experts"])
@torch.no_grad()
def test_decoding(mixer):
    """Logits of a prompt and of tokens after it, with the cache."""
    model, ids = build(mixer, num_hidden_layers=1).eval(), torch.randint(1, SIZES["vocab_size"], (2, 12))
    call = compiled(model, "aot_eager")
    close(call(ids, use_cache=False).logits, model(ids, use_cache=False).logits, 1e-5)
    mine, theirs = (model(ids[:, :8]).past_key_values for _ in range(2))
    for token in ids[:, 8:].split(1, 1):
        close(call(token, past_key_values=mine).logits, model(token, past_key_values=theirs).logits, 1e-5)
    assert mine.get_seq_length() == 12
