"""How a model begins, is saved, loaded and configured, and what is said when a file or an argument is wrong."""

import dataclasses
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, modeling_utils
from transformers.utils import PushToHubMixin

from headrace import InputError, Mixer, load, zoo
from headrace.hf import HeadraceConfig, HeadraceForCausalLM, HeadracePreTrainedModel
from headrace.hf.config import TRANSFORMERS
from headrace.layers.base import SelfInitialized
from headrace.layers.linear.competition import HeadCompetition
from headrace.spec import to_json
from headrace.utils.integrity import CHECKSUMS, record
from tiny import SIZES, build, config, covering, in_memory, tokens

# --- beginnings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.LINEAR)
def test_softmax_variant_starts_as_its_backbone(name):
    """Gates draw no random numbers and begin at exactly 1: every other weight and every logit is as it was."""
    models = []
    for mixer in (name, f"softmax-{name}"):
        torch.manual_seed(3)
        models.append(HeadraceForCausalLM(config(mixer, num_heads=2 if name == "gla" else 4)).eval())
    plain, gated = (m.state_dict() for m in models)
    for key in plain:
        assert torch.equal(plain[key], gated[key]), key
    new = gated.keys() - plain.keys()
    assert len(new) == 4 and all("competition" in key and not gated[key].any() for key in new)
    ids = tokens(2)
    assert torch.equal(models[0](ids).logits, models[1](ids).logits)


def test_initial_values_are_as_published():
    model = HeadraceForCausalLM(config("mamba2", hidden_size=128, initializer_range=0.05))
    mixer = model.model.backbone.layers[0].mixer
    for weight in (mixer.in_proj.weight, model.get_input_embeddings().weight):
        assert abs(weight.std().item() - 0.05) < 0.005
    assert mixer.conv.weight.std() > 0.2 and mixer.norm_weight.eq(1).all()


# Layer 1 of 3 with 8 channels: half of the depth lies before it, two thirds from it on. i: a channel.
ZIGZAG = (0.0, 0.1, -0.1)
RWKV = {
    "rwkv4": {
        "log_rate": lambda i: -5 + 8 * (i / 7) ** 1.35,
        "bonus": lambda i: math.log(0.3) + 5 * ZIGZAG[i % 3],
        "mix": lambda i: [(i / 8) ** (1 / 3), (i / 8) ** (2 / 3), (i / 8) ** (2 / 3) + 0.15],
    },
    "rwkv6": {
        "decay.bias": lambda i: -6 + 5 * (i / 7) ** 1.35,
        "bonus": lambda i: 0.5 * (1 - i / 7) + ZIGZAG[i % 3],
        "shift.base": lambda i: 1 - (i / 8) ** (2 / 3),
        "shift.offset": lambda i: [1 - (i / 8) ** p - x for p, x in zip(POWERS6, (0, 0, 0.15, 0, 0), strict=True)],
        "norm_weight": lambda i: (2 / 3) ** 0.7,
    },
    "rwkv7": {
        "decay_bias": lambda i: -5.5 + 6 * (i / 7) ** (1 + 0.5**0.3) + 2.5 * WITHIN[i % 4],
        "rate_bias": lambda i: -0.19 + 0.3 * WITHIN[i % 4] + 0.4 * (i / 7 - 0.5),
        "k_read": lambda i: 0.71 - 0.1 * (i / 7 - 0.5),
        "mix": lambda i: [1 - (i / 8) ** (p * 2 / 3) for p in (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)],
        "norm_weight": lambda i: (2 / 3) ** 0.7,
    },
}
POWERS6 = (2 / 3, 2 / 3, 2 / 3, 1 / 3, 1 / 3)
WITHIN = (-1.0, -1 / 9, 1 / 9, 1.0)  # x |x| of four channels of a head evenly from −1 to 1


@pytest.mark.parametrize("name", RWKV)
def test_rwkv_initializes_like_the_authors_code(name):
    layer = Mixer(name, hidden_size=8, num_heads=2, layer_idx=1, num_layers=3)
    for parameter, initial in RWKV[name].items():
        expected = torch.stack([torch.tensor(initial(i)) for i in range(8)], -1)
        torch.testing.assert_close(layer.get_parameter(parameter).view_as(expected), expected, msg=parameter)


@pytest.mark.parametrize("name", zoo.names())
def test_every_parameter_is_initialized(name):
    """Also in storage that was never written: how a model begins that was built on the meta device."""
    with torch.device("meta"):
        model = HeadraceForCausalLM(config(name))
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.constant_(p, torch.nan)
    for module in model.modules():
        module._is_hf_initialized = False
    model.init_weights()
    assert [name for name, p in model.named_parameters() if not p.isfinite().all()] == []


@pytest.mark.parametrize("name", ["based", "softmax-taylor-softmax"])
def test_weights_are_assigned_to_a_model_on_the_meta_device(name):
    model = build(name).eval()
    with torch.device("meta"):
        filled = HeadraceForCausalLM(model.config).eval()
    filled.load_state_dict(model.state_dict(), assign=True)
    ids = tokens(2)
    assert torch.equal(filled(ids).logits, model(ids).logits)


def test_unsaved_buffers_are_rebuilt(tmp_path):
    """transformers builds a model without storage: what is not in the checkpoint is whatever was in memory, unless
    `reset_parameters` sets it. And it must set nothing that was loaded."""

    class Table(SelfInitialized):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.empty(1000), persistent=False)
            self.weight = nn.Parameter(torch.empty(3))
            self.reset_parameters()

        def reset_parameters(self):
            self.table.copy_(torch.arange(1000))
            nn.init.zeros_(self.weight)

    class Model(HeadracePreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.part = Table()
            self.post_init()

    model = Model(config("gla"))
    nn.init.ones_(model.part.weight)
    model.save_pretrained(tmp_path)
    part = Model.from_pretrained(tmp_path).part
    assert torch.equal(part.table, torch.arange(1000.0)) and part.weight.eq(1).all()


# --- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mixer", "dtype"),
    [*((name, torch.float32) for name in covering(zoo.names())), ("hybrid", torch.bfloat16)],
    ids=str,
)
def test_save_and_load_are_bit_exact(tmp_path, mixer, dtype):
    model = build(mixer).to(dtype)
    model.save_pretrained(tmp_path)
    again, ids = in_memory(load(tmp_path)), tokens(2)
    assert again.dtype == dtype and not again.training and again.config.mixers == model.config.mixers
    assert all(torch.equal(x, again.state_dict()[key]) for key, x in model.state_dict().items())
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_weights_on_the_disk_change_nothing(tmp_path):
    """As `device_map="auto"` leaves them where memory is short: accelerate's hooks copy lists given to modules."""
    model, ids = HeadraceForCausalLM(config(["mamba2", "transformer"])).eval(), tokens(2)
    model.save_pretrained(tmp_path / "model")
    places = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "disk"}
    away = HeadraceForCausalLM.from_pretrained(tmp_path / "model", **places)
    every = {"output_hidden_states": True, "output_attentions": True}
    expected, actual = (each(ids, **every) for each in (model, away))
    for name in ("logits", "hidden_states", "attentions"):
        torch.testing.assert_close(actual[name], expected[name])
    greedy = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(away.generate(ids, **greedy), model.generate(ids, **greedy))


def test_the_hub_gets_the_checksums_of_the_weights_that_it_gets(tmp_path, monkeypatch):
    """Also by `save_pretrained`, which uploads before it returns: an earlier upload may have left others there."""
    uploaded, api = [], SimpleNamespace(create_repo=lambda name, **_: SimpleNamespace(repo_id=name))
    monkeypatch.setattr(modeling_utils, "hf_api", lambda: api)
    monkeypatch.setattr(modeling_utils, "create_and_tag_model_card", lambda *_, **__: SimpleNamespace(save=str))
    upload = lambda self, folder, *_, **__: uploaded.append((Path(folder) / CHECKSUMS).read_text())  # noqa: E731
    monkeypatch.setattr(PushToHubMixin, "_upload_modified_files", upload)
    model = build("gla")
    model.save_pretrained(tmp_path)
    torch.nn.init.ones_(model.lm_head.weight)
    model.save_pretrained(tmp_path, push_to_hub=True)
    assert json.loads(uploaded[0]) == record(tmp_path, "*.safetensors")


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_saved_once(tmp_path, tied):
    build("gla", tie_word_embeddings=tied).save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied
    again = load(tmp_path)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied


def test_gates_can_be_added_to_a_trained_backbone(tmp_path):
    build("gated-deltanet").save_pretrained(tmp_path)
    gated = HeadraceForCausalLM.from_pretrained(tmp_path, config=config("softmax-gated-deltanet"))
    ids = tokens(2)
    assert torch.equal(in_memory(gated)(ids).logits, in_memory(load(tmp_path))(ids).logits)
    assert sum(isinstance(m, HeadCompetition) for m in gated.modules()) == 4


def test_stored_spec_overrides_the_zoo(tmp_path, monkeypatch):
    """Whatever becomes of a name in the zoo."""
    before = config(["gla", "softmax-gla(competition.activation=sigmoid)"])
    before.save_pretrained(tmp_path)
    monkeypatch.setitem(zoo.LINEAR, "gla", zoo.LINEAR["retnet"])
    assert HeadraceConfig.from_pretrained(tmp_path).mixers == before.mixers
    stored = json.loads((tmp_path / "config.json").read_text("utf-8"))["mixer"]
    assert stored == [to_json(spec) for spec in before.mixers]


def without(key):
    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        del tensors[key]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return damage


def configured(**changes):
    def damage(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **changes}))

    return damage


DAMAGE = {
    "no folder": lambda f: [p.unlink() for p in f.iterdir()],
    "no weights": lambda f: (f / "model.safetensors").unlink(),
    "cut weights": lambda f: os.truncate(f / "model.safetensors", 5000),
    "cut header": lambda f: os.truncate(f / "model.safetensors", 4),
    "no weights in the file": lambda f: (f / "model.safetensors").write_bytes(b"x" * 999),
    "a pickle": lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
    "a tensor is missing": without("model.backbone.norm.weight"),
    "cut config": lambda f: os.truncate(f / "config.json", 100),
    "binary config": lambda f: (f / "config.json").write_bytes(b"\xff\x00"),
    "a list for config": lambda f: (f / "config.json").write_text("[]"), "another width": configured(hidden_size=64),
    "no width": configured(hidden_size="wide"), "another depth": configured(num_hidden_layers=1),
    "unknown mixer": configured(mixer={"type": "linear", "decay": {"kind": "forgetful"}}),
    "another model": configured(model_type="llama"), "no model": configured(model_type="headrice"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_broken_checkpoint_is_one_sentence(tmp_path, damage):
    build("gla").save_pretrained(tmp_path)
    DAMAGE[damage](tmp_path)
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    sentence = str(caught.value)
    assert str(tmp_path) in sentence and "\n" not in sentence and len(sentence) < 400


# --- configuration ------------------------------------------------------------------------------------------------


def test_mixers_repeat_over_layers():
    gla, full = zoo.get("gla"), zoo.get("transformer")
    assert config(gla, num_hidden_layers=3).mixers == [gla] * 3 and config(to_json(gla)).mixers == [gla] * 2
    assert config(["gla", "transformer"], num_hidden_layers=4).mixers == [gla, full, gla, full]
    assert config("gla", num_heads=None, num_attention_heads=8).num_heads == 8
    assert config("gla", num_heads=8, num_attention_heads=8).num_heads == 8
    assert HeadraceConfig(mixer="gla").num_heads == 4
    assert config("gla", mlp="none", intermediate_size=None).sizes.intermediate_size is None
    assert config("gla", intermediate_size=None).intermediate_size == 96


WRONG = {
    "mixer 'glaa' is unknown; the nearest names are": {"mixer": "glaa"},
    "mixer=3; expected a name": {"mixer": 3},
    "num_heads=4 and num_attention_heads=2; expected one number of heads": {"num_heads": 4, "num_attention_heads": 2},
    "lists 2 mixers for num_hidden_layers=3; expected a number that divides it": {
        "mixer": ["gla", "gla"], "num_hidden_layers": 3,
    },
    "lists 0 mixers": {"mixer": []},
    "num_heads=5 does not divide": {"num_heads": 5},
    "num_heads=0; expected a positive integer": {"num_heads": 0},
    "hidden_size='wide'; expected a positive integer": {"hidden_size": "wide", "intermediate_size": None},
    "style.mlp='tanh' is not allowed; expected one of swiglu, geglu": {"mlp": "tanh"},
    "mlp='none' has no width": {"mlp": "none", "intermediate_size": 3},
    "no field 'num_layers'; did you mean 'num_hidden_layers'": {"num_layers": 3},
    "no field 'n_layer'; did you mean 'num_hidden_layers'": {"n_layer": 3, "n_embd": 64},
    "no field 'n_embd'; did you mean 'hidden_size'": {"n_embd": 64},
    "no field 'rope_scaling'; did you mean 'rope_theta'": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "no field 'per_layer_config'; did you mean 'mixer'": {"per_layer_config": {"1": {"num_heads": 2}}},
    "no field 'd_ff'; did you mean 'intermediate_size'": {"d_ff": 128},
    "no field 'expand_k'; did you mean 'mixer'": {"expand_k": 0.5},
    "no field 'temperature'": {"temperature": 0.7},
    "dtype='no'; expected a dtype of PyTorch": {"dtype": "no"},
    "dtype='half precision'; expected a dtype": {"torch_dtype": "half precision"},
    "hidden_size=None; expected a positive integer": {"hidden_size": None},
    "num_heads=True; expected a positive integer": {"num_heads": True},
    "max_position_embeddings=0; expected a positive integer": {"max_position_embeddings": 0},
    "norm_eps=nan; expected a positive number": {"norm_eps": float("nan")},
    "rope_theta='10000'; expected a positive number": {"rope_theta": "10000"},
    "output_attentions=1; expected True or False": {"output_attentions": 1},
    "num_labels=1048577; expected 0 to 1048576": {"num_labels": 2**20 + 1},
    "tie_word_embeddings='false'; expected True or False": {"tie_word_embeddings": "false"},
    "HeadraceConfig has no field 'attn_mode'\n": {"attn_mode": "chunk"},  # which is unlike all: the end of the sentence
}  # fmt: skip


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_configurations_are_refused(sentence):
    with pytest.raises(InputError) as caught:
        HeadraceConfig(**{**SIZES, "mixer": "gla", **WRONG[sentence]})
    assert sentence in f"{caught.value}\n"


def test_fields_of_transformers_are_accepted():
    """A new version of it may keep more."""
    own = {field.name for field in dataclasses.fields(PreTrainedConfig)} | PreTrainedConfig().to_dict().keys()
    assert own <= TRANSFORMERS
    given = {"num_labels": 3, "architectures": ["A"], "torch_dtype": "float32", "auto_map": {}, "name_or_path": "here"}
    assert config("gla", **given).num_labels == 3


CHANGES = {
    "mixer": ({"mixer": "retnet"}, lambda c: c.mixers == [zoo.get("retnet")] * 2),
    "heads": ({"num_attention_heads": 2}, lambda c: c.num_heads == 2),
    "style": ({"style": {"norm": "layer", "mlp": "gelu"}}, lambda c: (c.sizes.style.norm, c.mlp) == ("layer", "gelu")),
    "mlp": ({"mlp": "gelu"}, lambda c: c.sizes.style.mlp == "gelu"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("read", [HeadraceConfig.from_pretrained, AutoConfig.from_pretrained])
def test_stored_config_is_replaced_as_a_whole(tmp_path, read, change):
    config("gla").save_pretrained(tmp_path)
    changes, holds = CHANGES[change]
    assert holds(read(tmp_path, **changes))


def test_fields_changed_in_place_are_read():
    """The specs of a config are read once for each JSON that they have."""
    changed = config("gla")
    before = changed.stack
    changed.mixer["heads"]["expand_v"] = 2.0
    changed.style["norm"] = "layer"
    assert changed.stack is not before is config("gla").stack
    assert changed.mixers == [zoo.get("gla(heads.expand_v=2.0)")] * 2
    assert changed.sizes.style.norm == changed.stack.style.norm == "layer"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"mlp": "gelu"}, "mlp='gelu' and style.mlp='swiglu' in a config; expected one, of a new config"),
        ({"style": {"mlp": "gelu"}}, "mlp='swiglu' and style.mlp='gelu' in a config"),
        ({"mixer": zoo.get("retnet")}, "mixer='MixerSpec(.*; expected a dict as to_json returns it"),
    ],
)
def test_a_field_that_is_set_later_is_stored_or_refused(change, sentence):
    """Otherwise the model would be another than the one that is loaded, or could not be saved."""
    config = HeadraceConfig(mixer="gla", vocab_size=29, hidden_size=16, num_hidden_layers=1)
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(InputError, match=sentence.replace("(", r"\(")):
        HeadraceForCausalLM(config)


def test_changes_of_a_stored_config_are_checked(tmp_path):
    build("gla").save_pretrained(tmp_path)
    with pytest.raises(InputError, match="num_heads=-1; expected a positive integer"):
        HeadraceForCausalLM.from_pretrained(tmp_path, num_heads=-1)
    with pytest.raises(InputError, match="num_heads=1 and num_attention_heads=2; expected one number"):
        HeadraceForCausalLM.from_pretrained(tmp_path, num_heads=1, num_attention_heads=2)
    configured(output_gate_activation="sigmoid")(tmp_path)
    with pytest.raises(InputError, match="no field 'output_gate_activation'"):
        load(tmp_path)
