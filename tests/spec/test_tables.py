"""Rows of packages that the core does not import are there when they are asked for, and a stranger adds the same."""

import subprocess
import sys
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
import torch

import fresh
import headrace
from headrace import InputError, zoo
from headrace.extra.specs import matrix, scan
from headrace.layers.linear.decays import DECAYS
from headrace.layers.linear.features import FEATURE_MAPS, QK_NORMS
from headrace.layers.linear.mixer import LinearMixer
from headrace.layers.linear.readout import Skip
from headrace.layers.linear.stage import STAGES
from headrace.layers.linear.token import TOKENS
from headrace.ops.backends.base import PLUGGED
from headrace.ops.parallel import context
from headrace.ops.parallel.context import PARALLEL
from headrace.spec import MixerSpec, Spec, attention, from_json, linear, serialize, stack, to_json
from headrace.spec.mixer import Facts, ModelSpec
from headrace.spec.stack import Decoder, Layer
from headrace.utils.tables import OFFERS, Table

TABLES = {
    table.name: table
    for table in (
        *zoo.TABLES.values(), zoo.MODELS, serialize.TYPES, scan.KINDS, matrix.KINDS, attention.LAYERS, stack.MLPS,
        stack.SHARED, linear.RULES, linear.LAYERS, DECAYS, FEATURE_MAPS, QK_NORMS, STAGES, TOKENS, PLUGGED,
        PARALLEL,
    )
}  # fmt: skip


def test_every_row_that_a_module_offers_is_there():
    assert OFFERS.keys() <= TABLES.keys()
    for name, rows in OFFERS.items():
        assert all(TABLES[name][row] for row in rows)


def test_a_package_is_imported_when_a_name_of_it_is_asked_for():
    check = """
import sys
from headrace import zoo
asked = lambda: {name for name in ("torch", "headrace.history.zoo", "headrace.extra.scan") if name in sys.modules}
zoo.get("softmax-gla"), zoo.get("transformer")
assert len(zoo.names()) > 80 and "mesa" in zoo.LINEAR and asked() == set()
assert zoo.get("s4d") and asked() == {"headrace.history.zoo"}
assert zoo.get({"type": "matrix", "kind": "gsa"}).state_shapes(64, 4) and "headrace.extra.slots" in sys.modules
assert "headrace.extra.mesa" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_a_model_imports_the_plug_ins_that_it_has():
    """Of a model without one, backends alone; of one with experts and a window, these two."""
    check = """
import sys
import torch
from headrace.hf import HeadraceConfig, HeadraceForCausalLM
def imported(*mixers, **settings):
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2, "num_heads": 2}
    model, ids = HeadraceForCausalLM(HeadraceConfig(mixer=mixers, **sizes, **settings)), torch.zeros(1, 4, dtype=int)
    model.train()(ids, labels=ids).loss.backward()
    return {name.split(".")[2] for name in sys.modules if name.startswith("headrace.extra.")} - {"fla", "onnx_node"}
assert imported("softmax-gla", "transformer") == set()
layer = {"type": "layer", "mixer": {"type": "attention", "pattern": {"window": 2}}, "mlp": "experts"}
assert imported(layer, "gla", style={"experts": {"count": 4}}) == {"moe", "pattern", "gathered"}
from headrace import layers, zoo
from headrace.layers.linear.features import FEATURE_MAPS, QK_NORMS
for table, row, change in (FEATURE_MAPS, "dpfp-1", "feature_map=dpfp-1"), (QK_NORMS, "sum", "qk_norm=sum"):
    sys.modules.pop("headrace.extra.fast_weights", None), table.rows.pop(row, None)
    layers.build(zoo.get(f"linear-attention(inputs.{change})"), hidden_size=8, num_heads=2)
    assert row in table.rows  # a forward that is compiled could not import it
"""
    fresh.output(check)


def test_context_parallelism_has_the_address_of_its_reference():
    assert context.SequenceShard.__name__ in PARALLEL and context.context_parallel is headrace.context_parallel
    with pytest.raises(AttributeError, match=r"module 'headrace.ops.parallel.context' has no attribute 'Shard'"):
        context.Shard  # noqa: B018


def test_a_table_lists_what_is_offered_and_has_no_other_rows():
    table = Table("none", {"a": 1})
    with patch.dict(OFFERS, {"none": {"b": "this"}}):
        assert [*table] == ["a", "b"] and len(table) == 2 and "b" in table and "c" not in table
        with pytest.raises(KeyError):
            table["b"]  # of a module without the row
        assert table.get("c") is None and table.rows == {"a": 1}


def test_the_order_of_a_table_does_not_depend_on_what_was_imported():
    table = Table("none", {"a": 1})
    with patch.dict(OFFERS, {"none": dict.fromkeys("bc", "this")}):
        for row in "dcb":  # one of a stranger, and the module's last row first
            table[row] = 1
        assert [*table] == ["a", "b", "c", "d"]


@dataclass(frozen=True)
class TwiceSpec(MixerSpec):
    """A stranger's: a linear mixer with a field and a stage of its own."""

    twice: bool = True

    facts = Facts(f"{__name__}.TwiceMixer")

    def _objections(self):
        yield from super()._objections()
        yield self.read.bonus, "twice with read.bonus=True"


class Twice(Skip):
    field = "twice"
    values = (True,)

    def build(self, mixer):
        """Nothing."""

    def reset(self, mixer):
        """Nothing."""

    def __call__(self, mixer, t):
        t.out = 2 * t.out


class TwiceMixer(LinearMixer):
    READOUT = *LinearMixer.READOUT[:-1], Twice, LinearMixer.READOUT[-1]


@dataclass(frozen=True)
class WholeSpec(ModelSpec):
    """A stranger's whole model."""

    size: int = 3

    builder = "a function"


@dataclass(frozen=True)
class NestedSpec(WholeSpec):
    mixer: Spec = field(default_factory=lambda: TwiceSpec())


def test_a_stranger_registers_whole_models():
    with patch.dict(zoo.MODELS), patch.dict(serialize.TYPES):
        headrace.register_model("whole", WholeSpec())
        assert zoo.get("whole(size=4)") == WholeSpec(4) == from_json(to_json(WholeSpec(4)))
        known = [*serialize.TYPES.rows]
        for model in (Decoder((Layer(TwiceSpec()),)), NestedSpec()):
            with pytest.raises(InputError, match=r"model 'nested' cannot be .* lacks .*\(register_mixer adds others\)"):
                headrace.register_model("nested", model)
        assert "nested" not in zoo.MODELS and [*serialize.TYPES.rows] == known


def test_a_stranger_registers_a_spec_of_a_class_of_its_own():
    with patch.dict(zoo.LINEAR), patch.dict(serialize.TYPES), patch.dict(zoo.PAPERS):
        headrace.register_mixer("twice", TwiceSpec(), paper="https://example.org")
        assert zoo.get("twice(twice=false)") == TwiceSpec(twice=False) == from_json(to_json(TwiceSpec(twice=False)))
        assert zoo.PAPERS["twice"] == "https://example.org" and zoo.get("softmax-twice").competition is not None
        with pytest.raises(InputError, match="twice with"):
            zoo.get("twice(read.bonus=true)")
        x, y = torch.randn(1, 5, 8), []
        for name in ("twice", "twice(twice=false)"):
            torch.manual_seed(0)
            y.append(headrace.Mixer(name, hidden_size=8, num_heads=2)(x)[0])
        torch.testing.assert_close(y[0], 2 * y[1])
    assert "twice" not in zoo.names()
    with pytest.raises(InputError, match="'twice' is of the plug-in that registers it, and the loaded plug-ins"):
        from_json({"type": "module:twice"})
