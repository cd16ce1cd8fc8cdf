"""Checkpoints of flash-linear-attention: each field of config.json with a changed value gives the logits of its models
as they are written out in flash_models.py, or is refused by name. Both compute in float64."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_convert_fields import FLASH

import flash_models
import tiny
from families import float64_throughout
from headrace import HeadraceForCausalLM, InputError
from headrace.convert import FORMATS, export_checkpoint, import_checkpoint
from headrace.convert.describe import DESCRIPTIONS
from headrace.convert.flash import mlp_width

pytest.importorskip("einops", reason="flash-linear-attention's references need it")
SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "intermediate_size": 40}
OWN = {
    "gated_deltanet": {"head_dim": 8}, "kda": {"head_dim": 8}, "gated_deltaproduct": {"head_dim": 8},
    "hgrn2": {"expand_ratio": 8, "num_heads": None}, "mamba3": {"state_size": 12, "head_dim": 16},
    "log_linear_mamba2": {"state_size": 12, "head_dim": 16},
    "rwkv7": {"head_dim": 8, "decay_low_rank_dim": 5, "a_low_rank_dim": 5, "gate_low_rank_dim": 6},
}  # fmt: skip
BASE = {form: SMALL | fixed | OWN.get(form, {}) for form, fixed in FLASH.items()}
for unknown in ("num_heads", "intermediate_size"):
    for form in ("mamba3", "log_linear_mamba2"):
        del BASE[form][unknown]
ALL = {
    "vocab_size": 53, "hidden_size": 64, "num_hidden_layers": 1, "hidden_ratio": 3, "intermediate_size": None,
    "norm_eps": 0.3, "tie_word_embeddings": True, "num_heads": 2, "hidden_act": "powlu", "fuse_norm": False,
    "attn": {"layers": [0], "num_heads": 2}, "attnres_block_size": 2, "conv_size": 3, "expand_v": 0.5,
    "output_gate_activation": "sigmoid", "attention_bias": True, "use_rope": True, "rms_norm_eps": 0.3,
    "elementwise_affine": False,
}  # fmt: skip
# Fields that change no logits.
IDLE = {
    "max_position_embeddings": 16, "pad_token_id": 3, "bos_token_id": 5, "eos_token_id": 6, "initializer_range": 0.5,
    "attn_mode": "fused_recurrent", "fuse_swiglu": False, "fuse_cross_entropy": False, "use_cache": False,
    "fuse_linear_cross_entropy": True, "use_l2warp": True,
}  # fmt: skip
NORM_AND_GATE = {
    "num_kv_heads": 2, "feature_map": "relu", "use_output_gate": False, "use_short_conv": True, "expand_k": 0.5,
}  # fmt: skip
DELTA = {"allow_neg_eigval": True, "use_short_conv": False}
CHANGED = {
    "retnet": ALL | NORM_AND_GATE,
    "gla": ALL | NORM_AND_GATE | {"expand_k": 1.0, "clamp_min": -0.1, "use_gk": False, "use_gv": True},
    "delta_net": ALL | DELTA | {"expand_k": 0.5, "use_gate": True, "use_beta": False, "use_output_norm": False,
                                "qk_norm": "sum", "qk_activation": "relu", "num_kv_heads": 2},
    "gated_deltanet": ALL | DELTA | {"head_dim": 4, "num_v_heads": 8, "use_gate": False},
    "kda": ALL | DELTA | {"head_dim": 4, "num_v_heads": 8, "safe_gate": True, "lower_bound": -5.0},
    "hgrn2": ALL | {"expand_ratio": 4, "use_short_conv": True, "use_lower_bound": True},
    "gsa": ALL | {"num_kv_heads": 2, "num_slots": None, "exapnd_k": 0.5, "expand_k": 2.0, "exapnd_v": 2.0,
                  "use_short_conv": True, "feature_map": "relu", "gate_logit_normalizer": 16, "use_norm": False,
                  "gate_low_rank_dim": 4, "use_output_gate": True, "clamp_min": 0.1},
    "linear_attn": ALL | {"num_kv_heads": 2, "expand_k": 0.5, "feature_map": "relu", "tie_feature_map_qk": True,
                          "norm_q": True, "norm_k": True, "norm_feature_map": True},
    "gated_deltaproduct": ALL | DELTA | {"head_dim": 4, "use_output_gate": False, "use_forget_gate": True,
                                         "num_householder": 3, "use_gate": False},
    "rwkv6": ALL | {"expand_k": 1.0, "gate_low_rank_dim": 8, "proj_low_rank_dim": 16, "norm_first": False,
                    "norm_bias": False, "num_kv_heads": 2},
    "rwkv7": ALL | {"head_dim": 4, "num_heads": 5, "decay_low_rank_dim": 8, "a_low_rank_dim": 8, "gate_low_rank_dim": 8,
                    "v_low_rank_dim": 8, "norm_first": False, "norm_bias": False, "value_dim": [32, 64]},
    "forgetting_transformer": ALL | {"num_kv_heads": 2, "qkv_bias": True, "qk_norm": True, "use_output_gate": True,
                                     "window_size": 7},
    "transformer": ALL | {"num_kv_heads": 2, "qkv_bias": True, "qk_norm": True, "window_size": 7, "rope_theta": 50.0},
    "log_linear_mamba2": ALL | {
        "head_dim": 8, "state_size": 10, "expand": 3, "n_groups": 2, "use_bias": True, "use_conv_bias": False,
        "conv_kernel": 3, "rmsnorm": False, "norm_before_gate": True, "D_has_hdim": True, "dt_limit": [0.1, 0.5],
        "residual_in_fp32": True, "chunk_size": 32, "num_heads": 3,
    },
    "mamba3": ALL | {"head_dim": 8, "state_size": 10, "expand": 3, "n_groups": 2, "use_bias": True, "is_mimo": True,
                     "rope_fraction": 1.0, "A_floor": 1e-2, "is_outproj_norm": True, "mimo_rank": 2, "chunk_size": 16},
}  # fmt: skip
ATTENTION = {
    "layers": [1], "num_heads": 8, "num_kv_heads": 2, "qkv_bias": True, "window_size": 9, "rope_theta": 50.0,
}  # fmt: skip
INFINITE = [0.0, {"__float__": "Infinity"}]  # as transformers writes the number
# Fields that are honoured together with others alone.
TOGETHER = [
    *((form, IDLE) for form in FLASH),
    ("mamba3", {"is_outproj_norm": True, "n_groups": 4, "use_bias": True, "num_heads": 4}),
    ("mamba3", {"state_size": 5, "rope_fraction": 1.0}),
    ("log_linear_mamba2", {"n_groups": 4, "rmsnorm": False, "use_bias": True, "num_heads": 4, "dt_limit": INFINITE}),
    ("kda", {"safe_gate": True, "lower_bound": -5, "expand_v": 2.0, "num_v_heads": 8, "allow_neg_eigval": True}),
    ("hgrn2", {"expand_ratio": None, "num_heads": 2}),
    ("gated_deltanet", {"num_hidden_layers": 3, "attn": ATTENTION}),
    ("rwkv6", {"num_hidden_layers": 3, "attn": ATTENTION}),
    ("retnet", {"num_hidden_layers": 3, "attn": [ATTENTION | {"layers": [2]}, {"layers": [0], "num_heads": 4}]}),
    ("rwkv7", {"decay_low_rank_dim": 4, "a_low_rank_dim": 4, "v_low_rank_dim": 3, "norm_bias": False}),
    ("rwkv7", {"num_hidden_layers": 4, "value_dim": 4 * [32], "norm_eps": 1e-3, "head_dim": 16}),
    ("rwkv7", {"num_hidden_layers": 1, "value_dim": 32, "hidden_ratio": None, "intermediate_size": None}),
    ("gated_deltaproduct", {"num_householder": 2, "use_forget_gate": True, "allow_neg_eigval": True}),
    ("forgetting_transformer", {"use_output_gate": True, "num_kv_heads": 2}),
    ("transformer", {"qk_norm": True, "norm_eps": 1e-5, "window_size": 9, "num_kv_heads": 1, "qkv_bias": True}),
    # fields that their classes had once, at values that change nothing
    ("transformer", {"attention_bias": False, "norm_eps": 1e-4, "rms_norm_eps": 1e-4}),
    ("delta_net", {"use_rope": False}),
    ("gsa", {"use_rope": False, "gate_low_rank_dim": None}),
    ("gated_deltaproduct", {"use_gate": True}),
]


def save(form, path, **settings):
    """config.json with random tensors that fit it."""
    described = {"model_type": form} | BASE[form] | settings
    save_file(drawn(described), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(described))


def complete(described):
    return {"proj_low_rank_dim": 32} | FORMATS[described["model_type"]].defaults | described


def drawn(described):
    with float64_throughout():
        return flash_models.drawn(complete(described))


@torch.no_grad()
def error(path):
    """Of our logits, relative to those of the model as it is written out."""
    described, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    ids, ours = torch.randint(described["vocab_size"], (2, 40)), import_checkpoint(path)
    with float64_throughout():
        expected = flash_models.logits(complete(described), tensors, ids)
    return float((ours(ids).logits - expected).norm() / expected.norm())


def test_more_heads_than_channels_are_refused():
    described = complete({"model_type": "hgrn2"} | BASE["hgrn2"] | {"expand_ratio": None, "num_heads": 1000})
    with pytest.raises(InputError, match=r"config\.json has expand_ratio=None; expected a number, or None with"):
        FORMATS["hgrn2"].model(described)


@pytest.mark.parametrize(("form", "field"), [(form, field) for form in FLASH for field in CHANGED[form]])
def test_config_fields_are_honoured_or_refused(form, field, tmp_path):
    changed = {field: CHANGED[form][field]}
    try:
        FORMATS[form].model({"model_type": form} | BASE[form] | changed)
    except InputError as refused:
        assert f"config.json has {field}=" in str(refused)
        return
    save(form, tmp_path, **changed)
    assert error(tmp_path) < 1e-12


@pytest.mark.parametrize(("form", "settings"), TOGETHER)
def test_fields_are_honoured_together(form, settings, tmp_path):
    save(form, tmp_path, **settings)
    assert error(tmp_path) < 1e-12


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"layers": [2]}, r"config.json has attn=.*; expected layers below num_hidden_layers=2, each once"),
        ({"layers": [0, 0]}, r"config.json has attn=.*; expected layers below num_hidden_layers=2, each once"),
        ({"qk_norm": True}, "and no other entries than layers, num_heads, num_kv_heads, qkv_bias, window_size, rope_"),
        ({"num_heads": 2.0}, "'num_heads' is 2.0, not an integer"),
    ],
)
def test_wrong_attention_layers_are_refused(wrong, sentence):
    with pytest.raises(InputError, match=sentence):
        FORMATS["gla"].model({"model_type": "gla"} | BASE["gla"] | {"attn": ATTENTION | {"layers": [0]} | wrong})


@pytest.mark.parametrize("form", FLASH)
def test_every_field_is_covered(form):
    _, known = FORMATS[form].model({"model_type": form} | BASE[form])
    assert known.read | known.fixed <= CHANGED[form].keys() | IDLE.keys()


@pytest.mark.parametrize("form", [form for form in FLASH if form in DESCRIPTIONS])
def test_exported_model_gives_the_same_logits(form, tmp_path):
    mixer = {
        "delta_net": "deltanet(read.gate=silu, heads.width=none)",
        "gated_deltanet": "gated-deltanet(heads.qk_groups=2)",
        "transformer": "transformer(kv_heads=2, bias=qkv)",
        "kda": "kda(heads.width=none)",
        "forgetting_transformer": "fox(kv_heads=2)",
        "mamba3": "mamba3(heads.width=none, heads.qk_groups=2)",
        "log_linear_mamba2": "log-linear-mamba2(heads.width=none, heads.qk_groups=2, read.norm=rms-groups)",
    }
    sizes = {"hidden_size": 64, "max_position_embeddings": 4096, "tie_word_embeddings": False}
    sizes["initializer_range"] = None  # the default: the other formats do not keep it
    if form == "mamba3":
        sizes |= {"norm_eps": 1e-5, "style": {"mlp": "none"}, "intermediate_size": None}
    if form == "log_linear_mamba2":
        sizes["intermediate_size"] = 256
    if form in ("mamba3", "log_linear_mamba2"):
        del sizes["max_position_embeddings"]
    ours = tiny.trained(HeadraceForCausalLM(tiny.config(mixer.get(form, form), **sizes)))
    export_checkpoint(ours, form, tmp_path / "theirs")
    assert error(tmp_path / "theirs") < 1e-12
    described = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert load_file(tmp_path / "theirs" / "model.safetensors").keys() == drawn(described).keys()
    again = import_checkpoint(tmp_path / "theirs")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))
    assert again.config.converted_from["model_type"] == form
    assert again.config.to_dict() | {"converted_from": None} == ours.config.to_dict()


def test_sums_have_float32_at_least(tmp_path):
    """Of RWKV-6 one weight is 1 minus another."""
    save("rwkv6", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: x.bfloat16() for name, x in tensors.items()}, tmp_path / "model.safetensors")
    mix = import_checkpoint(tmp_path).model.backbone.layers[0].mlp.mix
    assert torch.equal(1 - mix[1], tensors["model.layers.0.ffn.key.mu"].bfloat16().float())


@pytest.mark.parametrize("form", FLASH)
def test_imported_model_goes_back(form, tmp_path):
    save(form, tmp_path)
    export_checkpoint(import_checkpoint(tmp_path), form, tmp_path / "back")
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "back"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-15)  # of one shape, which their class asks for


@pytest.mark.parametrize(
    ("hidden", "ratio", "width"), [(2048, 4, 5632), (1024, 4, 2816), (2560, None, 6912), (512, 3, 1024)]
)
def test_the_default_mlp_width_of_fla(hidden, ratio, width):
    """2/3 · ratio · hidden, rounded up to 256: the widths of its published 340M, 1.3B and 2.7B models."""
    c = {"intermediate_size": None, "hidden_size": hidden, "hidden_ratio": ratio}
    assert mlp_width(c) == width and mlp_width(c | {"intermediate_size": 7}) == 7
