"""Each field of a foreign config.json: with a changed value the logits are still theirs, or the field is refused by
name. Both models compute in float64."""

import inspect
import json
from contextlib import contextmanager
from dataclasses import fields
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Mamba2Config
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

from headrace.hf.convert import FORMATS, export_checkpoint, import_checkpoint
from headrace.spec import MatrixSpec, ScanSpec
from headrace.utils.errors import InputError

FLASH = ("retnet", "gla", "delta_net", "gated_deltanet")
SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}
LINEAR = ["linear_attention"] * 2
CLASSES = {"llama": LlamaConfig, "mamba2": Mamba2Config, "qwen3_next": Qwen3NextConfig}
BASE = {
    "llama": SMALL | {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2},
    "mamba2": SMALL | {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    "qwen3_next": SMALL
    | {"intermediate_size": 48, "num_experts": 0, "layer_types": LINEAR, "linear_key_head_dim": 8}
    | {"linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
# A changed value of each field: of all three classes, and of each alone. Where fields hang together, several.
ALL = {
    "vocab_size": {"vocab_size": 53}, "hidden_size": {"hidden_size": 64}, "num_hidden_layers": {"num_hidden_layers": 1},
    "tie_word_embeddings": {"tie_word_embeddings": True}, "pad_token_id": {"pad_token_id": 3},
    "bos_token_id": {"bos_token_id": 5}, "eos_token_id": {"eos_token_id": [6, 7]}, "use_cache": {"use_cache": False},
    "initializer_range": {"initializer_range": 0.5}, "architectures": {"architectures": ["Another"]},
    "output_hidden_states": {"output_hidden_states": True}, "return_dict": {"return_dict": False},
    "dtype": {"dtype": "float64"}, "chunk_size_feed_forward": {"chunk_size_feed_forward": 8},
    "is_encoder_decoder": {"is_encoder_decoder": True}, "id2label": {"id2label": {0: "a"}},
    "label2id": {"label2id": {"a": 0}}, "problem_type": {"problem_type": "regression"},
    "transformers_version": {"transformers_version": "5.0.0"},
}  # fmt: skip
CHANGED = {
    "llama": ALL | {
        "intermediate_size": {"intermediate_size": 40}, "num_attention_heads": {"num_attention_heads": 2},
        "num_key_value_heads": {"num_key_value_heads": 1}, "hidden_act": {"hidden_act": "gelu"},
        "max_position_embeddings": {"max_position_embeddings": 16}, "rms_norm_eps": {"rms_norm_eps": 0.3},
        "pretraining_tp": {"pretraining_tp": 2}, "attention_bias": {"attention_bias": True},
        "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        "attention_dropout": {"attention_dropout": 0.5}, "mlp_bias": {"mlp_bias": True}, "head_dim": {"head_dim": 16},
    },
    "mamba2": ALL | {
        "hidden_size": {"hidden_size": 64, "head_dim": 32}, "num_heads": {"num_heads": 8, "head_dim": 8},
        "head_dim": {"head_dim": 32, "num_heads": 2}, "state_size": {"state_size": 4},
        "layer_norm_epsilon": {"layer_norm_epsilon": 0.3}, "expand": {"expand": 3, "num_heads": 6},
        "conv_kernel": {"conv_kernel": 3}, "n_groups": {"n_groups": 2}, "use_bias": {"use_bias": True},
        "use_conv_bias": {"use_conv_bias": False}, "hidden_act": {"hidden_act": "gelu"},
        "residual_in_fp32": {"residual_in_fp32": False}, "time_step_rank": {"time_step_rank": 3},
        "time_step_min": {"time_step_min": 0.5}, "time_step_max": {"time_step_max": 0.6},
        "time_step_floor": {"time_step_floor": 0.5}, "time_step_limit": {"time_step_limit": (0.0, 0.1)},
        "rescale_prenorm_residual": {"rescale_prenorm_residual": True}, "chunk_size": {"chunk_size": 8},
    },
    "qwen3_next": ALL | {
        "num_hidden_layers": {"num_hidden_layers": 1, "layer_types": LINEAR[:1]},
        "intermediate_size": {"intermediate_size": 40}, "num_attention_heads": {"num_attention_heads": 2},
        "num_key_value_heads": {"num_key_value_heads": 1}, "hidden_act": {"hidden_act": "gelu"},
        "max_position_embeddings": {"max_position_embeddings": 16}, "rms_norm_eps": {"rms_norm_eps": 0.3},
        "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        "attention_bias": {"attention_bias": True}, "attention_dropout": {"attention_dropout": 0.5},
        "head_dim": {"head_dim": 16}, "linear_conv_kernel_dim": {"linear_conv_kernel_dim": 3},
        "linear_key_head_dim": {"linear_key_head_dim": 4}, "linear_value_head_dim": {"linear_value_head_dim": 16},
        "linear_num_key_heads": {"linear_num_key_heads": 4}, "linear_num_value_heads": {"linear_num_value_heads": 2},
        "decoder_sparse_step": {"decoder_sparse_step": 2}, "moe_intermediate_size": {"moe_intermediate_size": 8},
        "shared_expert_intermediate_size": {"shared_expert_intermediate_size": 8},
        "num_experts_per_tok": {"num_experts_per_tok": 1}, "num_experts": {"num_experts": 2, "num_experts_per_tok": 1},
        "norm_topk_prob": {"norm_topk_prob": False}, "output_router_logits": {"output_router_logits": True},
        "router_aux_loss_coef": {"router_aux_loss_coef": 0.5}, "mlp_only_layers": {"mlp_only_layers": [0, 0]},
        "layer_types": {"layer_types": ["linear_attention", "full_attention"]},
    },
}  # fmt: skip


@contextmanager
def float64_throughout():
    """What a foreign model computes in float32 whatever it is given, it computes in float64 too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    wide = mock.patch.multiple(torch, float32=torch.float64, float=torch.float64)
    with wide, mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield
    torch.set_default_dtype(before)


@torch.no_grad()
def save(config, path):
    with float64_throughout():
        theirs = AutoModelForCausalLM.from_config(config)
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        theirs.save_pretrained(path)
    return path


@torch.no_grad()
def error(path):
    """Of our logits, relative to theirs."""
    ours = import_checkpoint(path)
    with float64_throughout():
        theirs = AutoModelForCausalLM.from_pretrained(path).eval()
        theirs.config.return_dict, theirs.config.output_router_logits = True, False  # their models need it so
        ids = torch.randint(theirs.config.vocab_size, (2, 40))
        expected = theirs(ids, use_cache=False, return_dict=True).logits
    return float((ours(ids).logits - expected).norm() / expected.norm())


def rewrite(path, without=(), **settings):
    described = json.loads((path / "config.json").read_text()) | settings
    kept = {name: value for name, value in described.items() if name not in without}
    (path / "config.json").write_text(json.dumps(kept))
    return path


ONE_MEANING = {"decoder_sparse_step", "mlp_only_layers", "time_step_limit"}  # other values are refused


def written_back(form, path, out):
    """The fields that the conversion reads: in config.json, and in that of the model converted there and back."""
    export_checkpoint(import_checkpoint(path), form, out)
    both = AutoConfig.from_pretrained(path), AutoConfig.from_pretrained(out)
    names = [name for name in FORMATS[form].read if hasattr(both[0], name) and name not in ONE_MEANING]
    return [{name: getattr(config, name) for name in names} for config in both]


def admitted(form, field):
    return field in FORMATS[form].read or field in FORMATS[form].ignored


@pytest.mark.parametrize(("form", "field"), [(form, field) for form in CHANGED for field in CHANGED[form]])
def test_config_fields_are_honoured_or_refused(form, field, tmp_path):
    path = save(CLASSES[form](**BASE[form] | CHANGED[form][field]), tmp_path / "theirs")
    try:
        assert error(path) < 1e-12 and admitted(form, field)
    except InputError as refused:
        assert f"config.json has {field}=" in str(refused) and field not in FORMATS[form].ignored
    else:
        given, written = written_back(form, path, tmp_path / "back")
        assert written == given


# What config.json may hold that no class writes today: fields it lacks, those of earlier versions, unknown ones.
EDITED = {
    "nothing that has a default": ("llama", ("rms_norm_eps", "head_dim", "hidden_act", "tie_word_embeddings"), {}),
    "a base alone": ("llama", ("rope_parameters",), {"rope_theta": 50.0}),
    "a base beside": ("llama", (), {"rope_theta": 50.0}),
    "a base within and beside": ("llama", (), {"rope_parameters": {"rope_type": "default"}, "rope_theta": 50.0}),
    "no scaling": ("llama", ("rope_parameters",), {"rope_theta": 50.0, "rope_scaling": None}),
    "another name of SiLU": ("llama", (), {"hidden_act": "swish"}),
    "settings of generation": ("llama", (), {"max_length": 4096, "temperature": 0.7, "torch_dtype": "float64"}),
    "an untied head by default": ("mamba2", ("tie_word_embeddings",), {}),
    "no layer of attention by its period": ("qwen3_next", ("layer_types",), {"full_attention_interval": 3}),
    "experts in no layer": ("qwen3_next", (), {"num_experts": 4, "decoder_sparse_step": 3}),
    "experts beside": ("qwen3_next", (), {"num_experts": 4, "mlp_only_layers": [1, 0]}),
}
REFUSED = {
    "output_gate_activation='sigmoid'": ("qwen3_next", (), {"output_gate_activation": "sigmoid"}),
    "per_layer_config={": ("llama", (), {"per_layer_config": {"1": {"rms_norm_eps": 0.5}}}),
    "quantization_config={": ("llama", (), {"quantization_config": {"bits": 4}}),
    "rope_scaling of type='linear', factor=4.0": (
        "llama", ("rope_parameters",), {"rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    ),
    "rope_scaling of rope_type='linear'": ("llama", (), {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "rope_parameters of type='linear'": ("llama", (), {"rope_parameters": {"type": "linear", "factor": 4.0}}),
    "rope_parameters of partial_rotary_factor=0.5": ("llama", (), {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    "n_groups=8; expected 1": ("mamba2", ("n_groups",), {}),
    "layer_types=['linear_attention', 'full_attention']": (
        "qwen3_next", ("layer_types",), {"full_attention_interval": 2}
    ),
    "num_experts=4; expected 0": ("qwen3_next", (), {"num_experts": 4, "mlp_only_layers": [0, 0]}),
    "has an unexpected tensor 'lm_head.weight'": ("llama", (), {"tie_word_embeddings": True}),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITED)
def test_configs_of_other_versions_are_read(edit, tmp_path):
    form, without, settings = EDITED[edit]
    assert error(rewrite(save(CLASSES[form](**BASE[form]), tmp_path), without, **settings)) < 1e-12


def test_width_that_no_ratio_gives_exactly(tmp_path):
    """58 / 56 · 56 is 58.00000000000001 in float64."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 29}
    config = Qwen3NextConfig(**BASE["qwen3_next"] | heads | {"hidden_size": 56, "linear_value_head_dim": 61})
    assert error(save(config, tmp_path)) < 1e-12
    assert ScanSpec("mamba", state_size=4, conv=4, expand=58 / 56).head_dims(56, 1)[1] == 58
    assert MatrixSpec("gla-outer", expand_k=58 / 56, expand_v=61 / 56).head_dims(56, 1) == (58, 61)


@pytest.mark.parametrize("sentence", REFUSED)
def test_unsupported_field_is_named(sentence, tmp_path):
    form, without, settings = REFUSED[sentence]
    rewrite(save(CLASSES[form](**BASE[form]), tmp_path), without, **settings)
    with pytest.raises(InputError) as refused:
        import_checkpoint(tmp_path)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("form", CLASSES)
def test_every_field_of_the_installed_library_is_known(form):
    """A new version of transformers may add fields, or change what they are where config.json has none."""
    known, defaults = FORMATS[form], {field.name: field.default for field in fields(CLASSES[form])}
    assert defaults.keys() <= CHANGED[form].keys()
    assert_known(known, defaults)


def assert_known(form, defaults):
    assert defaults.keys() <= form.read.keys() | form.only.keys() | form.ignored
    assert not form.read.keys() & form.ignored and not form.only.keys() & (form.read.keys() | form.ignored)
    ours = form.read | {name: values[0] for name, values in form.only.items()}
    assert {name: ours[name] for name in ours.keys() & defaults.keys()} == {
        name: value for name, value in defaults.items() if name in ours
    }


@pytest.mark.parametrize("form", FLASH)
def test_every_field_of_flash_linear_attention_is_known(form):
    module = pytest.importorskip(f"fla.models.{form}.configuration_{form}", exc_type=ImportError)
    signature = inspect.signature(getattr(module, FORMATS[form].architecture.replace("ForCausalLM", "Config")))
    assert_known(FORMATS[form], {p.name: p.default for p in signature.parameters.values() if p.default is not p.empty})
