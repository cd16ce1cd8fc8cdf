"""What a spec is given is checked: every field of every record, in Python as in JSON."""

import dataclasses
import math
import pickle
from functools import partial
from types import UnionType
from typing import Union, get_args, get_origin, get_type_hints

import pytest
import torch

from headrace import HeadraceConfig, InputError, Mixer, layers, zoo
from headrace.extra import capped, clamped, growing, late_norm, sparsemixer
from headrace.extra.specs import matrix as matrix_spec
from headrace.extra.specs import scan as scan_spec
from headrace.extra.specs.matrix import MatrixSpec
from headrace.extra.specs.scan import ScanSpec
from headrace.history.models import ModelSizes
from headrace.history.specs import encoder_decoder as model_spec
from headrace.history.specs import softmax_rnn as softmax_rnn_spec
from headrace.history.specs import stack as whole_spec
from headrace.history.specs.softmax_rnn import SoftmaxRNNSpec
from headrace.history.specs.stack import TransformerSpec
from headrace.layers.blocks.block import Sizes
from headrace.spec import (
    AttentionSpec,
    Competition,
    Decay,
    Heads,
    Inputs,
    MixerSpec,
    Pattern,
    Read,
    Write,
    from_json,
    to_json,
)
from headrace.spec import attention as attention_spec
from headrace.spec import decay as decay_spec
from headrace.spec import linear as spec
from headrace.spec import stack as stack
from headrace.spec.stack import Decoder, Experts, Layer

MODULES = (
    attention_spec, capped, clamped, decay_spec, growing, late_norm, matrix_spec, model_spec, scan_spec,
    softmax_rnn_spec, sparsemixer, spec, stack, whole_spec,
)  # fmt: skip
NEEDED = {  # by the records that have fields without a default
    Pattern: (3,), ScanSpec: ("mamba", 4, 4), MatrixSpec: ("gla-outer",), Layer: (AttentionSpec(),),
    Decoder: ((Layer(AttentionSpec()),),), Sizes: (8, 2, None), ModelSizes: (11,),
}  # fmt: skip
RECORDS = [
    Sizes, ModelSizes,
    *(c for m in MODULES for c in vars(m).values() if dataclasses.is_dataclass(c) and c.__module__ == m.__name__),
]  # fmt: skip
FIELDS = [(record, field.name) for record in RECORDS for field in dataclasses.fields(record)]
THINGS = [True, 1, 1.5, math.nan, math.inf, "nonsense", None, {}, ["x"], object(), torch.ones(2)]


def is_a(value, hint):
    options = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)
    return type(value) in options or (float in options and type(value) is int)


@pytest.mark.parametrize(("record", "name"), FIELDS, ids=lambda x: getattr(x, "__name__", x))
def test_every_field_of_every_record_checks_its_type(record, name):
    good = record(*NEEDED.get(record, ()))
    wrong = [x for x in THINGS if not is_a(x, get_type_hints(record)[name])]
    assert len(wrong) >= len(THINGS) - 5
    for value in [*wrong, math.nan, math.inf]:
        with pytest.raises(InputError, match=rf"{record.__name__}\.{name}.* expected "):
            dataclasses.replace(good, **{name: value})


RANGES = [
    (Heads, "expand_k", [0, -1.0]), (Heads, "expand_v", [0.0, -0.5]), (Heads, "qk_groups", [0, -2]),
    (Heads, "count", [0, -1]), (Heads, "key_dim", [0, -8]), (Inputs, "conv", [-1, 1]), (Decay, "rank", [0, -16]),
    (Write, "residual_chunk", [0, -1]), (Competition, "temperature", [0, -1.0]),
    (Competition, "memories_per_head", [0, -1]),
    (AttentionSpec, "kv_heads", [0, -1]), (AttentionSpec, "count", [0]), (AttentionSpec, "buckets", [3, 0, -4]),
    (Pattern, "window", [0, -1]), (Pattern, "first", [-1]), (Pattern, "random", [-1]), (Pattern, "block", [0]),
    (Pattern, "last", [-1]),
    (ScanSpec, "state_size", [0, -4]), (ScanSpec, "conv", [1, 0, -1]), (ScanSpec, "expand", [0, -1]),
    (ScanSpec, "rank", [0]), (MatrixSpec, "rank", [0, -1]), (MatrixSpec, "count", [0]),
    (MatrixSpec, "expand_k", [0]), (MatrixSpec, "expand_v", [-1.0]), (SoftmaxRNNSpec, "order", [-1]),
    (model_spec.Alignment, "reach", [0, -1]), (Experts, "count", [0, -1]), (Experts, "chosen", [0]),
    (Experts, "balance", [-0.1]), (TransformerSpec, "label_smoothing", [-0.1, 1.1]),
    (Sizes, "hidden_size", [0]), (Sizes, "num_heads", [-1]), (Sizes, "rope_theta", [0.0]),
    (ModelSizes, "vocab_size", [0]), (ModelSizes, "num_layers", [0]), (ModelSizes, "norm_eps", [-1e-6]),
]  # fmt: skip


@pytest.mark.parametrize(("record", "name", "values"), RANGES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_out_of_range_values_are_refused(record, name, values):
    good = record(*NEEDED.get(record, ()))
    for value in values:
        with pytest.raises(InputError, match=rf"{name}=.*expected"):
            dataclasses.replace(good, **{name: value})


def test_ints_become_floats_and_lists_tuples():
    assert type(Heads(expand_v=2).expand_v) is float and to_json(Heads(expand_v=2)) == to_json(Heads(expand_v=2.0))
    made = Decoder([Layer(zoo.get("gla"))])
    assert type(made.layers) is tuple and hash(made) == hash(from_json(to_json(made)))
    with pytest.raises(InputError, match="at least one layer"):
        Decoder(())


def test_json_and_python_refuse_the_same_values():
    data = to_json(zoo.get("jamba"))
    data["layers"][3]["mixer"]["expand"] = "wide"
    with pytest.raises(InputError, match=r"layers\.3\.mixer\.expand='wide' is not allowed; expected finite float"):
        from_json(data)
    wrong = "read.norm=rsm", "heads.count=1.5", "heads.count=0", "inputs.rotary=1", "competition.memories_per_head=true"
    for change in wrong:
        with pytest.raises(InputError, match=change.split("=")[0]):
            zoo.get(f"softmax-gla({change})")
    with pytest.raises(InputError, match="temperature"):
        from_json(to_json(zoo.get("softmax-gla")) | {"competition": {"temperature": math.nan}})


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({}, "mixer lacks the field 'type'; expected one of linear, "),
        ({"read": {"gate": "silu"}}, "mixer lacks the field 'type'; expected one of linear, "),
        ({"type": "scan"}, "scan lacks the field 'kind'; expected a value for it"),
        ({"type": ["scan"]}, r"mixer type \['scan'\] is unknown"),
        ({"type": "decoder", "layers": [{}]}, r"decoder\.layers\.0 lacks the field 'mixer'"),
        ({"type": "decoder", "layers": [{"mixer": 3}]}, r"decoder\.layers\.0\.mixer=3 is not allowed"),
        ([], r"mixer=\[\]; expected a dict"),
        (None, "mixer=None; expected a dict"),
    ],
)
def test_invalid_json_is_refused(data, sentence):
    with pytest.raises(InputError, match=sentence):
        from_json(data)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Mixer(Layer(zoo.get("gla")), hidden_size=32), r"mixer=Layer\(.*… is a Layer; expected the mixer"),
        (lambda: Mixer("gpt", hidden_size=32), "mixer='gpt' is a Decoder; expected the mixer of one layer"),
        (lambda: zoo.get("gpt+gla"), r"'gpt\+gla' names a model whose blocks have a style of their own"),
        (lambda: zoo.compete("gla"), "spec='gla'; expected the spec of a linear mixer"),
        (lambda: zoo.compete(zoo.get("transformer")), "; expected the spec of a linear mixer"),
        (lambda: zoo.get("softmax-paper-softmax-gla"), "is unknown; the nearest names are paper-softmax-gla"),
        (lambda: Read(scale="on"), r"^Read\.scale='on' is not allowed; expected one of key, one$"),
        (lambda: MixerSpec(Heads(expand_k=1e-9)).head_dims(32, 4), "num_heads=4 does not divide"),
    ],
)
def test_what_is_no_mixer_is_refused(make, sentence):
    with pytest.raises(InputError, match=sentence):
        make()


def test_expressions_may_have_several_lines():
    assert zoo.get("gla(\n  heads.count=2,\n  decay.rank=3\n)") == zoo.get("gla(heads.count=2, decay.rank=3)")


@pytest.mark.parametrize("name", [*zoo.names(), *zoo.MODELS])
def test_every_spec_survives_json_and_pickle(name):
    made = zoo.get(name)
    assert from_json(to_json(made)) == made == pickle.loads(pickle.dumps(made))


SIZES = [("num_heads", 0), ("num_heads", -4), ("num_heads", 4.0), ("hidden_size", 0), ("hidden_size", True)]


@pytest.mark.parametrize(("size", "value"), SIZES)
@pytest.mark.parametrize("name", [*zoo.names(), *zoo.MODELS])
def test_invalid_sizes_are_refused(name, size, value):
    made, sizes = zoo.get(name), {"hidden_size": 32, "num_heads": 4} | {size: value}
    users = [made.head_dims]
    if name in zoo.names():
        users += [partial(layers.build, made), partial(HeadraceConfig, mixer=made, vocab_size=8, num_hidden_layers=1)]
    for user in users:
        with pytest.raises(InputError, match=f"{size}={value}; expected a positive integer"):
            user(**sizes)


def test_a_gate_of_v_per_channel_is_a_gate():
    assert zoo.get("gated-deltanet-2(read.gate=none)").gated and not zoo.get("deltanet").gated
