"""Each decay is declared once: what spec/decay.py says is what its class computes, specs name and C++ knows."""

import math
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from equation import skip_if_missing
from headrace.layers import decays
from headrace.ops.native import layer as native_layer
from headrace.spec.decay import DECAYS, Decay, DecayShape
from headrace.utils.errors import InputError

NATIVE = Path(__file__).parent.parent / "native"


def test_every_decay_of_a_spec_has_a_class():
    assert ["none", *DECAYS] == list(get_args(get_type_hints(Decay)["kind"]))
    assert list(DECAYS) == list(decays.DECAYS)


@pytest.mark.parametrize("kind", DECAYS)
def test_a_decay_is_as_declared(kind):
    B, T, H, K = 2, 5, 3, 4
    shapes = {DecayShape.FIXED: (H,), DecayShape.SCALAR: (B, T, H), DecayShape.VECTOR: (B, T, H, K)}
    declared, decay = DECAYS[kind], decays.DECAYS[kind](Decay(kind), H, K, 0.5)
    x = torch.randn(B, T, decay.in_features)
    log_decay = decay(x)
    assert log_decay.shape == shapes[declared.shape] and (log_decay <= 0).all()
    assert declared.fixed == torch.equal(decay(x.flip(1)), log_decay)
    assert declared.fixed == (decay.in_features == 0)
    assert declared.paper.startswith("https://arxiv.org/abs/")


@pytest.mark.parametrize(("kind", "numbers"), [("softplus", 400), ("softplus-vector", 1600)])
def test_first_step_sizes_lie_between_the_bounds_of_the_spec(kind, numbers):
    for low, high in ((1e-3, 1e-1), (1e-5, 1e-3)):
        decay = decays.DECAYS[kind](Decay(kind, dt_min=low, dt_max=high), 400, 4, 0.0)
        dt = torch.nn.functional.softplus(decay.dt_bias.double())
        assert dt.numel() == numbers and low * 0.999 <= dt.min() <= dt.max() <= high * 1.001
        middle = dt.log().mean().item()  # of a uniform distribution of width w the standard deviation is w / √12
        assert middle == pytest.approx(math.log(low * high) / 2, abs=5 * math.log(high / low) / (12 * numbers) ** 0.5)


def test_step_sizes_are_of_softplus_decays():
    with pytest.raises(InputError, match=r"dt_min=1e-05 and dt_max=0.001 are step sizes, which decay.kind='sigmoid'"):
        Decay("sigmoid", dt_min=1e-5, dt_max=1e-3)
    with pytest.raises(InputError, match=r"dt_min=0.1 exceeds dt_max=0.01"):
        Decay("softplus", dt_min=0.1, dt_max=0.01)


def test_the_shapes_have_the_numbers_of_the_header():
    enum = re.search(r"enum hr_decay \{(.*?)\}", (NATIVE / "headrace.h").read_text("utf-8"))
    numbers = {name: int(number) for name, number in re.findall(r"HR_DECAY_(\w+) = (\d+)", enum[1])}
    assert numbers == {shape.name: shape.value for shape in DecayShape}


def test_the_kinds_of_the_native_library_are_those_that_declare_it():
    skip_if_missing("native")
    assert native_layer.KINDS["decay"] == ["none", *(kind for kind, decay in DECAYS.items() if decay.native)]


def test_the_native_library_gives_each_kind_its_declared_shape():
    """A fixed decay is one number per head in the step of a single token."""
    body = re.search(r"hr_decay shape\(.*?\n\}", (NATIVE / "kinds.h").read_text("utf-8"), re.DOTALL)[0]
    found, waiting = {}, []
    for kind, shape in re.findall(r"case decay::(\w+):(?: return HR_DECAY_(\w+);)?", body):
        waiting.append(kind)
        if shape:
            found |= dict.fromkeys(waiting, shape)
            waiting = []
    per_head = {DecayShape.FIXED: "SCALAR"}
    declared = {k.replace("-", "_"): per_head.get(d.shape, d.shape.name) for k, d in DECAYS.items() if d.native}
    assert found == {"none": "NONE"} | declared
