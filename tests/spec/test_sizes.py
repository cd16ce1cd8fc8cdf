"""The heads of the named mixers at a hidden size: their number and sizes in the papers and released models."""

import json
import warnings

import pytest
import torch

import tiny
from headrace import GateWarning, HeadraceConfig, HeadraceForCausalLM, InputError, Mixer, linear_attention, zoo
from headrace.convert import export_checkpoint, import_checkpoint
from headrace.spec.mixer import heads_of_width

# (heads, keys, values) at a hidden size of 1,024 in a model whose num_heads is 4.
PUBLISHED = {
    "mamba2": (32, 128, 64), "log-linear-mamba2": (32, 128, 64), "mamba3": (32, 128, 64),
    "rwkv5": (16, 64, 64), "rwkv6": (16, 64, 64), "rwkv7": (16, 64, 64), "based": (16, 16, 64),
    "kda": (8, 128, 128), "gated-deltanet-2": (8, 128, 128), "hgrn2": (8, 128, 128), "mesa": (8, 128, 128),
    "deltanet": (8, 128, 128), "negative-deltanet": (8, 128, 128), "deltaproduct": (8, 128, 128),
    "lightning-attention": (8, 128, 128), "delta-fast-weights": (8, 128, 128),
    "log-linear-gated-deltanet": (4, 192, 384),
}  # fmt: skip
# Without a size of their own: num_heads heads, of which arXiv 2602.01744 has four.
FOLLOWING = {
    "linear-attention": (256, 256), "hedgehog": (256, 256), "lolcats": (256, 256), "taylor-softmax": (16, 256),
    "retnet": (256, 512), "xpos-retnet": (256, 512),
    "gla": (128, 256), "mlstm": (128, 256), "simple-gla": (256, 256),
    "gated-deltanet": (192, 384), "negative-gated-deltanet": (192, 384),
    "gated-deltaproduct": (192, 384), "residual-delta": (192, 384), "comba": (192, 384),
}  # fmt: skip


def sizes(name: str, hidden_size: int, num_heads: int) -> tuple[int, int, int]:
    spec = zoo.get(name)
    return spec.num_heads(hidden_size, num_heads), *spec.head_dims(hidden_size, num_heads)


def test_each_linear_mixer_has_the_heads_of_its_paper_or_those_of_the_model():
    own = {name: sizes(name, 1024, 4) for name in zoo.LINEAR if sizes(name, 1024, 4) == sizes(name, 1024, 16)}
    assert own == {name: dims for name, dims in PUBLISHED.items() if name != "rwkv7"}
    assert {name: sizes(name, 1024, 4) for name in zoo.LINEAR if name not in own} == {
        name: (4, *dims) for name, dims in FOLLOWING.items()
    }
    assert sizes("rwkv7", 1024, 4) == PUBLISHED["rwkv7"]


# Columns of a memory that are not the values of one level: a normalizer, the keys of mesa, and 14 levels.
COLUMNS = {"based": 65, "mesa": 2 * 128, "log-linear-mamba2": 14 * 64, "log-linear-gated-deltanet": 14 * 384}


@pytest.mark.parametrize("name", PUBLISHED)
def test_its_softmax_version_and_its_state_have_these_heads(name):
    if name != "rwkv7":
        assert sizes(f"softmax-{name}", 1024, 4) == PUBLISHED[name]
    heads, _, values = PUBLISHED[name]
    memory = zoo.get(name).state_shapes(1024, 4)["memory"]
    assert memory[0] == heads and memory[2] == COLUMNS.get(name, values)


def test_sizes_at_the_widths_of_released_models():
    for width in (768, 1024, 1536, 2048, 2560):
        assert zoo.get("mamba2").state_shapes(width, 4)["memory"] == (width // 32, 128, 64)
    assert [sizes("mlstm", width, 4) for width in (2048, 4096)] == [(4, 256, 512), (8, 256, 512)]
    assert sizes("gated-deltanet-2", 2304, 4) == (18, 128, 128)
    assert sizes("log-linear-gated-deltanet", 1536, 4) == (6, 192, 384)


def test_slots_of_gated_slot_attention_and_abc_are_64():
    assert [zoo.get(name).state_shapes(1024, 4)["memory"][:2] for name in ("gsa", "abc")] == [(4, 64), (4, 64)]


def test_number_of_heads_follows_from_the_nearest_width_that_divides():
    def at(total):
        return heads_of_width(None, 128, total, 3)

    assert [at(total) for total in (512, 640, 1024, 4096)] == [4, 5, 8, 32]
    assert [at(total) for total in (520, 534, 576, 1000)] == [4, 6, 4, 8]  # heads of 130, 89, 144 and 125
    assert [at(total) for total in (16, 128, 256, 511)] == [3, 3, 3, 3]  # too narrow for four heads
    with pytest.raises(InputError, match=r"^heads of width 128 for 1018 channels; expected a multiple of 128, or a"):
        at(1018)  # 2 · 509


def test_explicit_sizes_take_the_place_of_published_ones():
    assert sizes("mamba2(heads.count=4)", 1024, 4) == (4, 1024, 512)
    assert sizes("mamba2(heads.width=none)", 1024, 8) == (8, 512, 256)
    assert sizes("mamba2(heads.width=128, heads.key_dim=64)", 1024, 4) == (16, 64, 128)
    assert sizes("rwkv7(count=8)", 1024, 4) == (8, 128, 128) and sizes("gla(heads.width=64)", 1024, 4) == (16, 32, 64)


def test_narrow_model_has_its_own_number_of_heads_which_compete():
    assert [sizes(name, 32, 4)[0] for name in ("kda", "mamba2", "rwkv6", "rwkv7")] == [4, 4, 4, 4]
    with warnings.catch_warnings():
        warnings.simplefilter("error", GateWarning)
        Mixer("softmax-kda", hidden_size=32, num_heads=4)
        Mixer("softmax-mamba2", hidden_size=128, num_heads=1)  # four heads
    with pytest.warns(GateWarning, match="over num_heads=1 head is always 1"):
        Mixer("softmax-kda", hidden_size=128, num_heads=1)


@pytest.mark.parametrize("name", ("mamba2", "softmax-mamba2"))
def test_keys_that_heads_share_are_not_copied_per_head(name):
    layer, seen = Mixer(name, hidden_size=128, num_heads=2), []

    def op(q, k, v, **rest):
        seen.append((q.shape[2:], k.shape[2:], v.shape[2:]))
        return linear_attention(q, k, v, **rest)

    layer.op = op
    layer(torch.randn(1, 5, 128))
    assert seen == [((1, 128), (1, 128), (4, 64))] and layer.parts["q"] == layer.parts["k"] == 128


@pytest.mark.parametrize(
    ("format", "mixer", "width", "fields"),
    [
        ("mamba2", "mamba2", 128, {"num_heads": 4, "head_dim": 64, "state_size": 128, "n_groups": 1}),
        ("delta_net", "deltanet", 512, {"num_heads": 4, "expand_k": 1.0, "expand_v": 1.0}),
    ],
)
def test_published_sizes_are_written_to_foreign_checkpoints(tmp_path, format, mixer, width, fields):
    mlp = {"mlp": "none", "intermediate_size": None} if format == "mamba2" else {}
    sizes = tiny.SIZES | {"hidden_size": width, "num_hidden_layers": 1, "num_heads": 2} | mlp
    config = HeadraceConfig(mixer=mixer, **sizes)
    model = HeadraceForCausalLM(config).eval()
    export_checkpoint(model, format, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert {name: written[name] for name in fields} == fields
    again, ids = import_checkpoint(tmp_path).eval(), torch.arange(7)[None]
    tiny.close(again(input_ids=ids).logits, model(input_ids=ids).logits, 1e-5)
