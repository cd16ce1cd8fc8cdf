"""Who may write into a state: nobody without permission; with it, the same numbers, in the same memory.

And what a state may be: of this mixer, of these sequences, in any precision.
"""

import subprocess
import sys
import warnings

import pytest
import torch

from headrace import mixers, zoo
from headrace.hf import HeadraceConfig, HeadraceForCausalLM

D, H = 32, 4
ZOO = zoo.names()


def layer(name, dtype=torch.float32):
    """With no weight at its first value, many of which are zero."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of gates that cannot act
        made = mixers.build(zoo.get(name), hidden_size=D, num_heads=H, layer_idx=1, num_layers=3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return made.to(dtype)


def model(name, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": D, "num_hidden_layers": 2, "num_heads": H, "intermediate_size": 16}
    made = HeadraceForCausalLM(HeadraceConfig(mixer=name, **sizes, **changes)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def in_float64(state):
    """A copy of it."""
    return type(state)(*(x if x is None else x.double() if x.is_floating_point() else x.clone() for x in state))


def tensors(state):
    return [x for x in state if isinstance(x, torch.Tensor)]


def same(a, b):
    return all(map(torch.equal, tensors(a), tensors(b)))


def storages(state):
    """Bytes of everything that a state's tensors may point into."""
    return [bytes(x.untyped_storage()) for x in tensors(state)]


# --- a cache that may not be written into -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ZOO, "jamba", "zamba", "gpt"])
@torch.no_grad()
def test_use_cache_false_leaves_the_cache_as_it_is(name):
    made, ids = model(name), torch.randint(1, 50, (2, 12))
    cache = made(ids[:, :8], use_cache=True).past_key_values
    made(ids[:, 8:9], past_key_values=cache)  # after which states are the cache's own
    before = [storages(state) for state in cache.states]
    for piece in (ids[:, 9:10], ids[:, 9:12]):
        first, again = (made(piece, past_key_values=cache, use_cache=False).logits for _ in range(2))
        assert torch.equal(first, again)
    assert [storages(state) for state in cache.states] == before and cache.get_seq_length() == 9


def run_alone(script):
    """In a process of its own: what writes where it should not may end it."""
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=__file__.rpartition("/")[0], capture_output=True, text=True,
        env={"MALLOC_CHECK_": "3", "PYTHONPATH": "."},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", ["softmax-gated-deltanet", "mamba2", "softmax-gla", "rwkv6", "retnet", "transformer"])
def test_a_prompt_in_bfloat16_then_tokens_in_float32(name):
    run_alone(f"""
import torch
from test_state import in_float64, model
torch.set_num_threads(1)
made, ids = model({name!r}), torch.randint(1, 50, (2, 40))
exact = model({name!r}).double()
with torch.no_grad():
    with torch.autocast("cpu", torch.bfloat16):
        cache = made(ids[:, :8], use_cache=True).past_key_values
    wide = made(ids[:, :8], use_cache=True).past_key_values
    wide.states = [in_float64(state) for state in cache.states]
    for token in ids[:, 8:].split(1, 1):
        found = made(token, past_key_values=cache).logits
        expected = exact(token, past_key_values=wide).logits
        assert (found - expected).norm() < 1e-5 * expected.norm(), (found - expected).norm() / expected.norm()
""")
