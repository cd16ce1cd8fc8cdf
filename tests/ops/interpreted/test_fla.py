"""The backend "fla" against the literal loop in float64: outputs, final states and all gradients."""

import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fla", reason="fla-core is not installed")

import fla_shims

from equation import DECAYS, Way, assert_same, detached, inputs
from headrace import InputError, linear_attention
from headrace.extra.fla import op

fla_shims.install()
T, H, K, V = 70, 2, 16, 24  # a chunk of 64 tokens and a part of the next
# Four times the worst over four seeds: outputs and states 5.0e-7 and 7.4e-4, gradients 3.2e-6 and 1.0e-3.
FLA = Way({"backend": "fla"}, torch.float32, 2e-6, 1.3e-5, T)
HALF = FLA._replace(dtype=torch.float16, tolerance=3e-3, gradient_tolerance=4e-3)
PACKED = torch.tensor([0, 5, 5, 37, 70])  # the second sequence is empty


def arguments(decay, **options):
    heads = 2 * H if decay == "fixed" else H  # a number for each, in whose gradients cancels what tokens add
    return inputs(decay, **{"rows": 1, "tokens": T, "heads": heads, "key": K, "value": V} | options)


def call(**changes):
    """linear_attention on the same float32 arguments, without gradients, each time."""
    torch.manual_seed(0)
    return linear_attention(**detached(arguments("scalar")) | changes, backend="fla")


DELTA = {"rule": "delta"}
CALLS = {decay: (decay, {}, {}) for decay in DECAYS} | {  # decay and other options of `arguments`, settings of the op
    "without gates and state": ("scalar", {"gates": False, "state": False}, {}),
    "shared keys": ("scalar", {"heads": 4, "groups": 2}, {}),
    "grouped queries": ("scalar", {"heads": 1, "queries": 2}, DELTA),
    "grouped queries without gates": ("scalar", {"heads": 1, "queries": 2, "gates": False}, DELTA),
    "bonus": ("vector", {"heads": 1, "bonus": True}, {}),
    "normalizer": ("none", {"normalize": True}, {"normalize": True}),
    "delta, fixed": ("fixed", {}, DELTA),
    "delta, scalar": ("scalar", {}, DELTA),
    "delta, vector": ("vector", {"heads": 1}, DELTA),
    "packed": ("vector", {"heads": 1, "n": 4}, {"cu_seqlens": PACKED}),
    "packed, delta": ("scalar", {"groups": 1, "n": 4}, {"cu_seqlens": PACKED} | DELTA),
}


@pytest.mark.parametrize("name", CALLS)
def test_equation(name):
    decay, options, settings = CALLS[name]
    assert_same(arguments(decay, **options), FLA, **settings)


def test_delta_rule_without_decay():
    assert_same(arguments("none"), HALF, rule="delta")


def test_a_fixed_decay_without_gradient():
    """It has a kernel of its own."""
    fixed = -torch.rand(H)
    learned = call(log_decay=fixed.clone().requires_grad_())
    for x, y in zip(call(log_decay=fixed), learned, strict=True):
        torch.testing.assert_close(x, y)


def test_a_decay_to_nothing():
    """−∞ starts a new sequence."""
    plain = arguments("scalar", state=False)
    with torch.no_grad():
        plain["log_decay"][:, 40] = -torch.inf
    cut = {name: x[:, 40:] for name, x in plain.items()}
    whole, _ = linear_attention(**detached(plain), backend="fla")
    rest, _ = linear_attention(**cut, backend="torch")
    # FLA sums base-2 logarithms in float32, and those from 128 to 256 have steps of 2⁻¹⁶.
    assert (whole[:, 40:] - rest).abs().max() <= 2**-16 * rest.abs().max()


@pytest.mark.parametrize("decay", ["scalar", "vector"])
def test_keys_shared_by_heads_are_not_repeated(decay, monkeypatch):
    monkeypatch.setattr(op, "_per_head", None)
    assert_same(arguments(decay, gates=False, groups=1), FLA, rule="delta")


@pytest.mark.parametrize("packed", [False, True])
def test_flash_qla_computes_what_fla_gives_to_it(packed, monkeypatch):
    """The package stands for the loop here. Its arguments are those that FLA would call it with on Hopper."""
    calls = []

    def chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, cu_seqlens, **more):
        calls.append(more)
        wide = {"scale": scale, "log_decay": g, "beta": beta, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
        out, state = linear_attention(q.float(), k.float(), v.float(), **wide, rule="delta", backend="torch")
        return out.to(v.dtype), state

    chosen = import_module("fla.ops.gated_delta_rule.backends.flash_qla")
    monkeypatch.setattr(chosen, "IS_NVIDIA_HOPPER", True)
    monkeypatch.setattr(chosen.FlashQLABackend, "is_available", classmethod(lambda cls: True))
    fake = SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
    monkeypatch.setitem(sys.modules, "flash_qla", fake)
    n = {"n": 4} if packed else {}
    assert_same(arguments("scalar", key=128, value=128, **n), HALF, PACKED if packed else None, rule="delta")
    assert calls and all(more["output_final_state"] for more in calls)


def test_bounds_changed_in_place_are_read_again():
    bounds = torch.tensor([0, 30, 70])
    call(cu_seqlens=bounds, initial_state=None)
    bounds[1] = 10
    changed, _ = call(cu_seqlens=bounds, initial_state=None)
    expected, _ = call(cu_seqlens=torch.tensor([0, 10, 70]), initial_state=None)
    assert torch.equal(changed, expected)


@pytest.mark.parametrize("bounds", [[0, 5, 69], [0, 40, 30, 70], [1, 70]])
def test_bounds_that_do_not_fit(bounds):
    with pytest.raises(InputError, match="expected 0 = c_0"):
        call(cu_seqlens=torch.tensor(bounds), initial_state=None)


def test_second_derivatives_are_refused():
    v = torch.randn(1, T, H, V, requires_grad=True)
    for result in call(v=v):
        with pytest.raises(InputError, match="backend='fla' has no second derivative"):
            torch.autograd.grad(result.square().sum(), v, create_graph=True, retain_graph=True)


def test_results_may_be_changed_in_place():
    v = torch.randn(1, T, H, V, requires_grad=True)
    plain, changed = (torch.autograd.grad(f(call(v=v)[0]).sum(), v)[0] for f in (lambda x: 2 * x, lambda x: x.mul_(2)))
    assert torch.equal(plain, changed)


def long(size: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(1, 2, H, size, dtype=dtype) for name in "qkv"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (long(16, torch.float64), "it takes bfloat16, float16 and float32, and v is torch.float64"),
        (long(8), "it takes B ≥ 1 and K, V ≥ 16, and they are 1, 8 and 8"),
        (long(17, torch.float16), "it takes even K and V in torch.float16, and they are 17 and 17"),
        (long(272) | {"rule": "delta"}, "it takes K up to 256 under rule='delta', and K is 272"),
        (long(16) | {"rule": "delta"}, "it takes bfloat16 and float16 for rule='delta' without decay"),
        ({"chunk_size": 32}, "its chunks have 64 tokens, and chunk_size is 32"),
    ],
)
def test_refusals(changes, reason):
    if "v" in changes:
        changes = dict.fromkeys(("log_decay", "beta", "read_gate", "write_gate", "initial_state")) | changes
    with pytest.raises(InputError, match=f"backend='fla' cannot run here: {reason}"):
        call(**changes)


def test_transforms_take_another_backend():
    x = torch.randn(3, 1, T, 2, K)
    with pytest.raises(InputError, match=r"it has no rules for torch\.func"):
        torch.func.vmap(lambda v: linear_attention(x[0], x[0], v, backend="fla")[0])(x)
