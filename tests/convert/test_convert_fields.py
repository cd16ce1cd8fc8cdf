"""What a foreign config.json may hold that no class writes today. Both models compute in float64."""

import inspect
import json

import pytest
import torch

from families import logits, read, relative, rewrite, save
from families.every import FAMILIES, described
from groups import refused
from headrace.convert import FORMATS, import_checkpoint
from headrace.convert.fields import Fields
from headrace.extra.specs.matrix import MatrixSpec
from headrace.extra.specs.scan import ScanSpec
from headrace.utils.errors import InputError

# The formats of flash-linear-attention -> fields that have no default that can be converted.
FLASH: dict[str, dict] = {
    "retnet": {}, "gla": {}, "delta_net": {}, "gated_deltanet": {}, "kda": {}, "hgrn2": {"use_lower_bound": False},
    "gsa": {}, "linear_attn": {"feature_map": "elu"}, "gated_deltaproduct": {}, "rwkv6": {}, "rwkv7": {},
    "transformer": {}, "forgetting_transformer": {}, "mamba3": {},
    "log_linear_mamba2": {},
}  # fmt: skip
VARIANTS = {"qwen3_next": "linear layers alone"}


@torch.no_grad()
def error(path):
    """Of our logits, relative to theirs."""
    theirs = read(path)
    ids = torch.randint(theirs.config.vocab_size, (2, 40))
    return relative(import_checkpoint(path)(ids).logits, logits(theirs, ids))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# What config.json may hold that no class writes today: fields it lacks, those of earlier versions, unknown ones.
EDITED = {
    "nothing that has a default": ("llama", ("rms_norm_eps", "head_dim", "hidden_act", "tie_word_embeddings"), {}),
    "a base alone": ("llama", ("rope_parameters",), {"rope_theta": 50.0}),
    "a base beside": ("llama", (), {"rope_theta": 50.0}),
    "a base that is written out": ("llama", ("rope_parameters",), {"rope_theta": 10**11}),
    "a base within and beside": ("llama", (), {"rope_parameters": {"rope_type": "default"}, "rope_theta": 50.0}),
    "no scaling": ("llama", ("rope_parameters",), {"rope_theta": 50.0, "rope_scaling": None}),
    "entries of positions that transformers does not read": (
        "llama", (), {"rope_parameters": YARN | {"finetuned": True, "attn_factor": 0.9, "rope_theta": 50.0}}
    ),
    "the factor of another kind of positions": ("llama", (), {"rope_parameters": {"rope_theta": 50.0, "factor": 2.0}}),
    "no truncation": ("llama", (), {"rope_parameters": YARN | {"truncate": None, "rope_theta": 50.0}}),
    "an original length beside": (
        "llama", (), {"rope_parameters": YARN | {"rope_theta": 50.0}, "original_max_position_embeddings": 8}
    ),
    "an original length beside those of kinds of layers": (
        "olmo3", (), {
            "rope_parameters": {"full_attention": YARN | {"rope_theta": 50.0}, "sliding_attention": None},
            "original_max_position_embeddings": 8,
        }
    ),
    "epsilons of other models beside": ("llama", (), {"norm_eps": 0.5, "layer_norm_epsilon": 0.5}),
    "another name of SiLU": ("llama", (), {"hidden_act": "swish"}),
    "fields that transformers does not read": (
        "llama", (), {"is_llama_config": True, "rope_interleaved": True, "output_gate_activation": "sigmoid"}
    ),
    "groups of heads that the class does not have": ("gpt_neox", (), {"num_key_value_heads": 2}),
    "fields of other models as if they were absent": (
        "llama", (), {"is_causal": True, "sliding_window": None, "quantization_config": None}
    ),
    "settings of generation": ("llama", (), {"max_length": 4096, "temperature": 0.7, "torch_dtype": "float64"}),
    "an untied head by default": ("mamba2", ("tie_word_embeddings",), {}),
    "no layer of attention by its period": ("qwen3_next", ("layer_types",), {"full_attention_interval": 3}),
    "no layers of prediction": ("qwen3_next", (), {"mtp_num_hidden_layers": 0}),
    "experts in no layer": ("qwen3_next", (), {"num_experts": 4, "decoder_sparse_step": 3}),
    "experts beside": ("qwen3_next", (), {"num_experts": 4, "mlp_only_layers": [1, 0]}),
}  # fmt: skip
REFUSED = {
    # which transformers reads of every model, whether its class has them or not
    "is_causal=False": ("llama", (), {"is_causal": False}),
    "head_dim=16; expected None": ("gpt_neox", (), {"head_dim": 16}),  # of the rotation alone
    "head_dim=4; expected None": ("stablelm", (), {"head_dim": 4}),
    "sliding_window=4": ("llama", (), {"sliding_window": 4}),
    "per_layer_config={": ("llama", (), {"per_layer_config": {"1": {"rms_norm_eps": 0.5}}}),
    "quantization_config={": ("llama", (), {"quantization_config": {"bits": 4}}),
    # which flash-linear-attention has under the same model_type
    "norm_eps=1e-06": ("mamba2", (), {"norm_eps": 1e-6}),
    "dt_limit=[0.0, 0.1]": ("mamba2", (), {"dt_limit": [0.0, 0.1]}),
    "config.json has num_key_value_heads=3, num_attention_heads=4: kv_heads=3 does not divide num_heads=4": (
        "llama", (), {"num_key_value_heads": 3}
    ),
    "num_heads': TypeError: Field 'num_heads' expected int, got str (value: 'a')": ("mamba2", (), {"num_heads": "a"}),
    "n_groups=8; expected a divisor of the number of heads, 4": ("mamba2", ("n_groups",), {}),
    "config.json has num_experts=4, num_experts_per_tok=10: experts.chosen=10 exceeds experts.count=4": (
        "qwen3_next", (), {"num_experts": 4, "num_experts_per_tok": 10, "mlp_only_layers": [0, 0]}
    ),
    "config.json has router_aux_loss_coef=-1.0: Experts.balance=-1.0; expected at least 0": (
        "qwen3_next", (), {"num_experts": 4, "output_router_logits": True, "router_aux_loss_coef": -1.0}
    ),
    "'lm_head.weight' is not the embedding, with which config.json ties it; expected tie_word_embeddings=false": (
        "llama", (), {"tie_word_embeddings": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITED)
def test_configs_of_other_versions_are_read(edit, tmp_path):
    form, without, settings = EDITED[edit]
    save(described(form, VARIANTS.get(form, "base")), tmp_path)
    assert error(rewrite(tmp_path, without, **settings)) < 1e-12


def test_width_that_no_ratio_gives_exactly(tmp_path):
    """58 / 56 · 56 is 58.00000000000001 in float64."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    widths = {"hidden_size": 56, "linear_key_head_dim": 29, "linear_value_head_dim": 61}
    save(described("qwen3_next", VARIANTS["qwen3_next"], **heads, **widths), tmp_path)
    assert error(tmp_path) < 1e-12
    assert ScanSpec("mamba", state_size=4, conv=4, expand=58 / 56).head_dims(56, 1)[1] == 58
    assert MatrixSpec("gla-outer", expand_k=58 / 56, expand_v=61 / 56).head_dims(56, 1) == (58, 61)


@pytest.mark.parametrize("sentence", REFUSED)
def test_unsupported_field_is_named(sentence, tmp_path):
    form, without, settings = REFUSED[sentence]
    save(described(form, VARIANTS.get(form, "base")), tmp_path)
    rewrite(tmp_path, without, **settings)
    assert sentence in refused(lambda: import_checkpoint(tmp_path))


def test_width_that_is_null_is_refused():
    with pytest.raises(InputError, match="intermediate_size=None; expected an integer of at least 1"):
        FORMATS["mamba"].model({"model_type": "mamba", "num_hidden_layers": 1, "intermediate_size": None})


def test_field_of_the_class_passes_at_its_default_alone(monkeypatch):
    """Such as one that a new version of transformers adds."""
    monkeypatch.setattr(Fields, "ignore", lambda self, *names: None)  # the conversion then does not know pretraining_tp
    config = {"model_type": "llama"} | FAMILIES["llama"].base
    assert FORMATS["llama"].model(config)[1].passed == {}
    assert FORMATS["llama"].model(config | {"pretraining_tp": 1})[1].passed == {"pretraining_tp": 1}
    for value in (2, None):
        with pytest.raises(InputError, match=f"pretraining_tp={value}.* --ignore pretraining_tp"):
            FORMATS["llama"].model(config | {"pretraining_tp": value})


def test_passed_and_ignored_fields_are_told(tmp_path, run_command):
    save(described("llama"), tmp_path)
    path = rewrite(tmp_path, is_llama_config=True, quantization_config={"bits": 4})
    told = run_command("convert", path, "--output", tmp_path / "ours", "--ignore", "quantization_config").err
    assert "passed by in config.json" in told and "is_llama_config=True" in told and "quantization" not in told
    assert "quantization_config" not in json.loads((tmp_path / "ours" / "config.json").read_text())["converted_from"]
    with pytest.raises(InputError, match="'bits'; expected a field"):
        import_checkpoint(path, ignore=["bits"])


@pytest.mark.parametrize("form", FLASH)
def test_every_field_of_flash_linear_attention_is_known(form):
    module = pytest.importorskip(f"fla.models.{form}.configuration_{form}", exc_type=ImportError)
    signature = inspect.signature(getattr(module, FORMATS[form].architecture.replace("ForCausalLM", "Config")))
    defaults = {p.name: p.default for p in signature.parameters.values() if p.default is not p.empty}
    assert {name: FORMATS[form].defaults[name] for name in FORMATS[form].defaults.keys() & defaults} == {
        name: value for name, value in defaults.items() if name in FORMATS[form].defaults
    }
    FORMATS[form].model({"model_type": form} | defaults | FLASH[form])
