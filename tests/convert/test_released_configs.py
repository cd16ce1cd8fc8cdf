"""Released configurations, with all of their fields: equal logits with transformers' own model, or the one reason.

released.json has fields and numbers of each, and says whether they are from memory or from a copy of the file. Sizes
and lists of layers are replaced by those of tests/families and the entry's own `small`. Both compute in float64.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from families import float64_throughout
from families.every import FAMILIES
from headrace import HeadraceConfig, HeadraceForCausalLM, InputError, load
from headrace.convert import FORMATS, import_checkpoint
from headrace.convert.slots import slots
from headrace.verification.verify import relative

RELEASED = {entry["name"]: entry for entry in json.loads(Path(__file__).with_name("released.json").read_text())}
CONVERTED = [name for name, entry in RELEASED.items() if entry["config"]["model_type"] in FAMILIES]
LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types", "attn_layer_indices", "block_types")
DEPTH = ("num_hidden_layers", "n_layer", "full_attention_interval", "hybrid_layer_ids", *LAYERS)
LONGER = {"jamba": {"num_hidden_layers": 6}}  # the first whose attention is at its released place
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def config_of(described):
    if (kind := described["model_type"]) not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    return CONFIG_MAPPING[kind].from_dict(described)


def small(entry):
    """The fields of a released config.json, at small sizes."""
    config = entry["config"]
    base = FAMILIES[config["model_type"]].base if config["model_type"] in FAMILIES else {}
    sizes = {name: value for name, value in base.items() if type(value) is int or name in LAYERS}
    ids = {name: value for name, value in IDS.items() if config.get(name) is not None}
    changed = config | sizes | ids | entry.get("small", {})
    return {name: value for name, value in changed.items() if value is not None or config.get(name, 0) is None}


@torch.no_grad()
def save(described, path):
    """Writes a model with random weights, and the config.json. Returns the model."""
    with float64_throughout():
        config = config_of(json.loads(json.dumps(described)))
        config._experts_implementation = "eager"
        theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
        for name, value in theirs.state_dict().items():
            if FORMATS[described["model_type"]].holds(name):
                torch.nn.init.normal_(value, std=0.3)
        theirs.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(described))
    return theirs


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")  # which older files have
@pytest.mark.parametrize("name", CONVERTED)
@torch.no_grad()
def test_released_configuration(name, tmp_path):
    described, ids = small(RELEASED[name]), torch.randint(3, 61, (2, 20))
    theirs = save(described, tmp_path)
    if reason := RELEASED[name].get("reason"):
        with pytest.raises(InputError, match=reason):
            import_checkpoint(tmp_path)
        return
    with float64_throughout():
        expected = theirs(ids, use_cache=False, return_dict=True).logits
    assert (import_checkpoint(tmp_path)(ids).logits - expected).norm() < 1e-12 * expected.norm()


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")
@pytest.mark.parametrize("name", [name for name in CONVERTED if "reason" not in RELEASED[name]])
def test_released_sizes_have_their_parameters(name):
    """In few layers, of each kind."""
    described = RELEASED[name]["config"]
    kind = described["model_type"]
    fewer = FAMILIES[kind].base | RELEASED[name].get("small", {}) | LONGER.get(kind, {})
    config = config_of(described | {field: fewer[field] for field in DEPTH if field in fewer})
    model, _ = FORMATS[kind].model(json.loads(config.to_json_string(use_diff=False)))
    with torch.device("meta"):
        theirs, ours = AutoModelForCausalLM.from_config(config), HeadraceForCausalLM(HeadraceConfig(**model.arguments))
    assert slots(ours).keys() == model.views.keys()
    trained = [p for p in theirs.parameters() if p.requires_grad]  # without ERNIE's biases of experts
    unread = 2 * described["hidden_size"] if kind == "opt" else 0  # rows of the table of positions, for padding
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in trained) - unread


@pytest.mark.parametrize("name", [name for name in RELEASED if name not in CONVERTED])
def test_released_configuration_of_flash_linear_attention(name, tmp_path):
    pytest.importorskip("einops", reason="flash-linear-attention's references need it")
    from test_convert_flash import BASE, error, save

    config = RELEASED[name]["config"]
    form = config["model_type"]
    save(form, tmp_path, **{name: x for name, x in config.items() if name not in {"model_type", *BASE[form]}})
    assert error(tmp_path) < 1e-12


SIZES = {"vocab_size": 29, "hidden_size": 32, "num_hidden_layers": 2}
UNTIED, WIDTH, EPSILON = {"tie_word_embeddings": False}, {"intermediate_size": 48}, {"norm_eps": 1e-5}
HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 12}
NAMED = {  # model_type -> (its sizes, the fields of a HeadraceConfig by the manual, "Names of other libraries")
    "llama": ({"num_attention_heads": 4, **WIDTH}, {"mixer": "transformer", **UNTIED, **WIDTH}),
    "mamba": ({}, {"mixer": "mamba", "mlp": "none", **EPSILON}),
    "mamba2": (
        {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
        {"mixer": "mamba2(heads.width=16, heads.key_dim=8)", "mlp": "none", **UNTIED, **EPSILON},
    ),
    "rwkv": (
        {"attention_hidden_size": 32, "intermediate_size": 128},
        {
            "mixer": "rwkv4", "intermediate_size": 128, **UNTIED, **EPSILON,
            "style": {"norm": "layer", "bias": True, "mlp": "rwkv4", "embedding_norm": True},
        },
    ),
    "qwen3_next": (
        {"num_experts": 0, "layer_types": ["linear_attention"] * 2, **HEADS, **WIDTH},
        {"mixer": "gated-deltanet", "style": {"norm": "rms-offset"}, **UNTIED, **WIDTH},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
@torch.no_grad()
def test_fields_that_the_manual_names_give_the_function_of_a_model(name, tmp_path):
    sizes, fields = NAMED[name]
    theirs, ids = save({"model_type": name, **SIZES, **sizes}, tmp_path), torch.randint(29, (2, 9))
    ours = HeadraceForCausalLM(HeadraceConfig(**SIZES, **fields)).double().eval()
    ours.load_state_dict(load(tmp_path).state_dict())
    with float64_throughout():
        expected = theirs(ids, use_cache=False).logits
    assert relative(ours(ids).logits, expected) < 1e-10
