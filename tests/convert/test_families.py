"""Released model families: the logits, cached decoding, padding and gradients of transformers' models, and each field
of their config.json honoured or refused by name. A family is an entry of tests/families.

Both models compute in float64, unless a test is of float32.
"""

import json
from copy import deepcopy
from dataclasses import fields

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from families import (
    Family,
    delta,
    dense,
    float64_throughout,
    hybrid,
    logits,
    parallel,
    read,
    recurrent,
    relative,
    save,
    softmax,
    sparse,
)
from headrace import load
from headrace.convert import FORMATS, export_checkpoint, import_checkpoint
from headrace.convert.describe import has_cache
from headrace.convert.fields import COMMON
from headrace.convert.files import WEIGHTS
from headrace.convert.linearize import linearize
from headrace.convert.slots import slots
from headrace.hf import HeadraceCache, HeadraceConfig
from headrace.utils.errors import InputError

FAMILIES: dict[str, Family] = softmax.FAMILIES | parallel.FAMILIES | recurrent.FAMILIES
FAMILIES |= delta.FAMILIES | hybrid.FAMILIES | dense.FAMILIES | sparse.FAMILIES
VARIANTS = [(kind, name) for kind, family in FAMILIES.items() for name in ("base", *family.variants)]
T = 12
DECODED = 24  # tokens, one at a time: the memory of attention, which grows by a quarter, grows several times
CONSTANTS = ("choice_bias", "activation.beta", "activation.eps")  # which have no gradients
FLOAT64 = 1e-12  # relative, for sums in another order


def described(kind, **changes):
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    return CONFIG_MAPPING[kind](**deepcopy(FAMILIES[kind].base | changes))  # which some classes change


def tokens(theirs, *shape):
    return torch.randint(1, theirs.config.vocab_size, shape)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Their model, ours and the folder of theirs, by family and variant."""
    made = {}

    def pair(kind, variant):
        if (kind, variant) not in made:
            changes = FAMILIES[kind].variants.get(variant, {})
            path = tmp_path_factory.mktemp(kind)
            save(described(kind, **changes), path)
            made[kind, variant] = read(path), import_checkpoint(path), path
        return made[kind, variant]

    return pair


@pytest.mark.parametrize(("kind", "variant"), VARIANTS)
@torch.no_grad()
def test_logits_equal_theirs(kind, variant, pairs):
    theirs, ours, path = pairs(kind, variant)
    ids = tokens(theirs, 2, 28)
    expected = logits(theirs, ids)
    assert relative(ours(ids).logits, expected) < FLOAT64
    # In float32 their own error, beside float64, is the measure where weights this large amplify rounding.
    single = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    own_error = relative(single(ids, use_cache=False, return_dict=True).logits, expected)
    ours, cache = deepcopy(ours).float(), HeadraceCache()  # whose single tokens the native kernels compute
    pieces = [ours(part, past_key_values=cache, use_cache=True).logits for part in ids.split([20, *[1] * 8], 1)]
    for computed in (ours(ids).logits, torch.cat(pieces, 1)):
        assert relative(computed, expected) < max(1e-5, 4 * own_error)


@pytest.mark.parametrize(("kind", "variant"), VARIANTS)
@torch.no_grad()
def test_cached_decoding_and_padding_equal_their_logits(kind, variant, pairs):
    """Tokens one at a time with the cache, after a prompt that is padded on the left in one row."""
    theirs, ours, _ = pairs(kind, variant)
    ids, padding, cache = tokens(theirs, 2, T + DECODED), 3, HeadraceCache()
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    pieces = [slice(0, T), *(slice(t, t + 1) for t in range(T, T + DECODED))]
    decoded = [
        ours(ids[:, piece], attention_mask=mask[:, : piece.stop], past_key_values=cache, use_cache=True).logits
        for piece in pieces
    ]
    for row, start in enumerate((padding, 0)):
        whole = logits(theirs, ids[row : row + 1, start:])
        assert relative(torch.cat(decoded, 1)[row : row + 1, start:], whole) < 10 * FLOAT64


@pytest.mark.parametrize(("kind", "variant"), VARIANTS)
def test_gradients_equal_theirs(kind, variant, pairs, tmp_path):
    """Of a weighted sum of the logits."""
    *models, path = pairs(kind, variant)
    theirs, ours = map(deepcopy, models)
    ids = tokens(theirs, 2, T)
    weights = torch.randn(2, T, theirs.config.vocab_size, dtype=torch.float64)
    (logits(theirs, ids) * weights).sum().backward()
    (ours(ids).logits * weights).sum().backward()
    for parameter in (*theirs.parameters(), *ours.parameters()):  # so that `save` and `slots` split the gradients
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    theirs.save_pretrained(tmp_path)
    model, _ = FORMATS[kind].model(json.loads((path / "config.json").read_text()))
    foreign = load_file(tmp_path / "model.safetensors")
    whole = max(float(gradient.norm()) for gradient in foreign.values())
    for name, gradient in slots(ours).items():
        if not name.endswith(CONSTANTS):
            view = model.views[name]
            expected = view.rows(foreign[view.name]).reshape(gradient.shape)
            assert (view.factor * gradient - expected).norm() <= 1e-9 * expected.norm() + 1e-13 * whole, name


@pytest.mark.parametrize(
    "kind", [*parallel.FAMILIES, *(kind for kind in dense.FAMILIES if kind not in ("vaultgemma", "ministral3"))]
)
@torch.no_grad()
def test_linear_layers_within_their_blocks(kind, pairs):
    """A window that is never left is attention."""
    theirs, ours, _ = pairs(kind, "base")
    ids, layers = tokens(theirs, 2, T), [i for i, spec in enumerate(ours.config.mixers) if spec.pattern is None]
    assert relative(linearize(ours, f"lolcats(window={T})", layers)(ids).logits, logits(theirs, ids)) < FLOAT64


@torch.no_grad()
def test_rwkv_is_not_rescaled(tmp_path):
    """In evaluation, transformers halves the stream every `rescale_every` layers, for the range of float16. The norms'
    epsilon then weighs more, so that its logits differ from those of its training mode, which are the model's."""
    theirs = save(described("rwkv", rescale_every=1, num_hidden_layers=3), tmp_path)
    ours = import_checkpoint(tmp_path)
    ids = tokens(theirs, 2, T)
    expected, rescaled = logits(theirs.train(), ids), logits(theirs.eval(), ids)
    assert relative(ours(ids).logits, expected) < 1e-12 < relative(rescaled, expected) < 1e-3


@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_saved_and_converted_back_models_are_the_same(kind, pairs, tmp_path):
    theirs, ours, path = pairs(kind, "base")
    ours.save_pretrained(tmp_path / "ours")
    again = load(tmp_path / "ours")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters(), strict=True))
    export_checkpoint(again, kind, tmp_path / "back")
    before, after = load_file(path / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    if kind == "opt":  # whose padding has positions of its own
        before["model.decoder.embed_positions.weight"][:2] = 0
    weights = {name for name in before if FORMATS[kind].holds(name)}
    assert weights == after.keys()
    for name in weights:
        torch.testing.assert_close(after[name].view_as(before[name]), before[name], rtol=1e-14, atol=1e-15)
    ids = tokens(theirs, 1, T)
    assert relative(logits(read(tmp_path / "back"), ids), logits(theirs, ids)) < FLOAT64


def test_routers_keep_float32(pairs, tmp_path):
    """As transformers keeps them, in a model in bfloat16."""
    _, _, path = pairs("nemotron_h", "base")
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(tmp_path / "theirs")
    ours = import_checkpoint(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    for model in (ours, load(tmp_path / "ours")):
        mlp = model.model.backbone.layers[0].mlp
        assert model.dtype is torch.bfloat16
        assert mlp.router.weight.dtype is mlp.choice_bias.dtype is torch.float32


# --- fields ----------------------------------------------------------------------------------------------------------


def values(kind, name):
    """Dicts of fields in which the field `name` has another value than in the base."""
    family = FAMILIES[kind]
    if name in family.fields:
        listed = family.fields[name]
    else:
        value = getattr(described(kind), name)
        by_type = {
            bool: [value is False], int: [2 * value, value + 1, value // 2] if type(value) is int else [],
            float: [value / 2 + 0.1] if type(value) is float else [], str: ["gelu", "relu"], type(None): [1, True, 0.5],
        }  # fmt: skip
        listed = by_type.get(type(value), [])
    return [each if isinstance(each, dict) else {name: each} for each in listed]


def names(kind):
    """The fields of transformers' class, without those of all classes."""
    known = {field.name for field in fields(CONFIG_MAPPING[kind])}
    return sorted(known - COMMON - {"model_type"})


@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_fields_are_honoured_or_refused(kind, tmp_path):
    """Each field of the class with another value: the same logits, or a refusal that names the field."""
    for name in names(kind):
        built = 0
        for i, changes in enumerate(values(kind, name)):
            path = tmp_path / f"{name}{i}"
            try:
                theirs = save(described(kind, **changes), path)
                ids = tokens(theirs, 2, 40)
                expected = logits(theirs, ids)
            except Exception:  # their class or model has no such value
                continue
            built += 1
            try:
                error = relative(import_checkpoint(path)(ids).logits, expected)
            except InputError as refused:
                assert any(field in str(refused) for field in changes), (name, changes, refused)
            else:
                assert error < FLOAT64, (name, changes, error)
            if name not in FAMILIES[kind].fields:
                break  # one of the guesses is enough
        assert built, f"no other value of {name} makes a model; list some in the family's `fields`"


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_field_is_accounted_for(kind):
    """A new version of transformers may add fields: each is read, refused or named as one that the logits ignore."""
    _, known = FORMATS[kind].model(json.loads(described(kind).to_json_string(use_diff=False)))
    own = {CONFIG_MAPPING[kind].attribute_map.get(field.name, field.name) for field in fields(CONFIG_MAPPING[kind])}
    assert own <= COMMON | known.read | known.fixed | known.ignored


def by_kind(**changes):
    own = {"rope_type": "default", "rope_theta": 50.0} | changes
    return {"rope_parameters": {"full_attention": own, "sliding_attention": own}}


YARN, PART = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "mscale_all_dim": "x"}, "partial_rotary_factor"


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("deepseek_v3", {"rope_parameters": YARN | {"original_max_position_embeddings": 32}}),
        ("glm4_moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, PART: "x"}}),
        ("deepseek_v3", {"num_nextn_predict_layers": "x"}), ("deepseek_v3", {"first_k_dense_replace": None}),
        ("dots1", {"n_shared_experts": None}), ("ernie4_5_moe", {"moe_layer_interval": None}),
        ("ernie4_5_moe", {"moe_norm_min": None}), ("ernie4_5_moe", {"moe_layer_start_index": -1}),
        ("gemma3_text", by_kind(rope_theta=None)), ("lfm3", by_kind(rope_theta=[1.0])),
        ("lfm3", by_kind(rope_type="proportional", partial_rotary_factor=None)),
        ("olmo3", by_kind(rope_type="yarn", factor=2.0, original_max_position_embeddings=16, truncate=False)),
        ("falcon_h1", {"ssm_multipliers": [1.0]}), ("falcon_h1", {"mlp_multipliers": [1.0, 1.0, 1.0]}),
        ("hunyuan_v1_dense", softmax.rope("dynamic", factor=1.0, alpha=1e300)),
    ],
)  # fmt: skip
def test_values_of_another_type_are_named(kind, changes):
    fields = json.loads(described(kind).to_json_string(use_diff=False)) | changes
    with pytest.raises(InputError, match=f"config.json has {next(iter(changes))}="):
        FORMATS[kind].model(fields)


def test_values_that_transformers_takes_too():
    def read(kind, **changes):
        fields = json.loads(described(kind).to_json_string(use_diff=False)) | changes
        return HeadraceConfig(**FORMATS[kind].model(fields)[0].arguments)

    windows = {mixer.pattern.window for mixer in read("mistral", layer_types=None, sliding_window=5).mixers}
    assert windows == {5}, "of every layer"
    assert read("gpt_bigcode", activation_function="gelu_fast").sizes.style.mlp == "gelu-tanh"


@torch.no_grad()
def test_windows_by_a_pattern_are_those_of_their_class(tmp_path):
    base = {k: v for k, v in FAMILIES["gemma3_text"].base.items() if k != "layer_types"}
    theirs = save(CONFIG_MAPPING["gemma3_text"](**base, sliding_window_pattern=2), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["sliding_window_pattern"] == 2
    ids = tokens(theirs, 2, 40)
    assert relative(import_checkpoint(tmp_path)(ids).logits, logits(theirs, ids)) < FLOAT64


@torch.no_grad()
def test_frequencies_of_phi_moe_beyond_the_original_length(tmp_path):
    """As published, by long_factor; transformers' class keeps short_factor at any length."""
    parameters = sparse.PHI["rope_parameters"] | {"original_max_position_embeddings": 16}
    theirs = save(described("phimoe", rope_parameters=parameters), tmp_path)
    ours = import_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["short_factor"] = config["rope_parameters"]["long_factor"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for length, published in ((16, theirs), (28, read(tmp_path))):
        ids = tokens(theirs, 2, length)
        assert relative(ours(ids).logits, logits(published, ids)) < FLOAT64


@pytest.mark.parametrize(
    ("kind", "changes"), [("bamba", {"attn_layer_indices": None}), ("lfm2", {"layer_types": 2 * ["conv"]})]
)
@torch.no_grad()
def test_formats_whose_cache_counts_by_attention(kind, changes, tmp_path):
    theirs = save(described(kind, **changes), tmp_path)
    with pytest.raises(ValueError, match="get_seq_length"), float64_throughout():
        theirs.generate(tokens(theirs, 1, 4), max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert not has_cache(kind, import_checkpoint(tmp_path).config)


# --- names of tensors that a checkpoint has and `save_pretrained` does not write --------------------------------------


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
@torch.no_grad()
def test_language_model_of_several_parts(kind, tmp_path):
    """Qwen3.5 with its vision tower, which is left out."""
    fields = FAMILIES[f"{kind}_text"].base
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    whole = CONFIG_MAPPING[kind](text_config=fields, vision_config=vision)
    with float64_throughout():
        theirs = AutoModelForImageTextToText.from_config(whole, experts_implementation="eager").eval()
        theirs.save_pretrained(tmp_path)
    ours, ids = import_checkpoint(tmp_path), tokens(theirs.model.language_model, 2, 40)
    assert any(name.startswith("model.visual.") for name in load_file(tmp_path / "model.safetensors"))
    assert relative(ours(ids).logits, logits(theirs, ids)) < 1e-12
    assert ours.config.converted_from["model_type"] == f"{kind}_text"
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": [1, 7], "bos_token_id": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = import_checkpoint(tmp_path)
    assert (again.generation_config.eos_token_id, again.generation_config.bos_token_id) == ([1, 7], 3)
    with pytest.raises(InputError, match=f"it reads text alone; expected --to {kind}_text"):
        export_checkpoint(ours, kind, tmp_path / "back")


PREDICTING = {  # by family: a tensor of the layers of multi-token prediction, which transformers leaves out
    "qwen3_next": "mtp.fc.weight", "qwen3_5_text": "mtp.fc.weight", "qwen3_5_moe_text": "mtp.fc.weight",
    "nemotron_h": "mtp.layers.0.eh_proj.weight", "bailing_hybrid": "model.layers.2.eh_proj.weight",
    "deepseek_v3": "model.layers.2.eh_proj.weight", "glm4_moe": "model.layers.2.eh_proj.weight",
    "ernie4_5_moe": "model.mtp_block.0.mlp.up_proj.weight", "exaone_moe": "mtp.fc.weight",
    "glm4_moe_lite": "model.layers.2.eh_proj.weight",
}  # fmt: skip


@pytest.mark.parametrize("kind", PREDICTING)
def test_layers_that_predict_further_tokens_are_left_out(kind, pairs, tmp_path):
    _, ours, path = pairs(kind, "base")
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    save_file(load_file(path / "model.safetensors") | {PREDICTING[kind]: torch.ones(2, 2)}, tmp_path / WEIGHTS)
    again = import_checkpoint(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters(), strict=True))


def test_layers_beyond_those_of_the_config_are_refused(pairs, tmp_path):
    _, _, path = pairs("bailing_hybrid", "base")
    fields = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    name = PREDICTING["bailing_hybrid"]
    save_file(load_file(path / "model.safetensors") | {name: torch.ones(2, 2)}, tmp_path / WEIGHTS)
    with pytest.raises(InputError, match=f"unexpected tensor '{name}'"):
        import_checkpoint(tmp_path)


@torch.no_grad()
def test_experts_in_one_tensor(tmp_path):
    """As the experts of Qwen3.5 were released, below the prefix of the language model."""
    with float64_throughout():
        theirs = AutoModelForCausalLM.from_config(described("qwen3_5_moe_text"), experts_implementation="eager").eval()
        theirs.save_pretrained(tmp_path, save_original_format=False)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    fields = {"model_type": "qwen3_5_moe", "text_config": json.loads((tmp_path / "config.json").read_text())}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file(tensors, tmp_path / "model.safetensors")
    ids = tokens(theirs, 2, T)
    assert relative(import_checkpoint(tmp_path)(ids).logits, logits(theirs, ids)) < FLOAT64
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    for wrong in (tensors[name][:-1], tensors[name][:, :-1], torch.ones(2, 2)):
        save_file(tensors | {name: wrong.contiguous()}, tmp_path / "model.safetensors")
        with pytest.raises(InputError, match=r"it has no tensor 'model.layers.0.mlp.experts.\d.gate_proj.weight'"):
            import_checkpoint(tmp_path)


def test_factors_are_folded_into_float32(tmp_path):
    """MiniMax's, which bfloat16 weights would round, unless they are powers of 2."""
    for factor, dtype in ((3.5, torch.float32), (2.0, torch.bfloat16)):
        theirs = AutoModelForCausalLM.from_config(described("minimax", full_attn_alpha_factor=factor))
        theirs.bfloat16().save_pretrained(tmp_path / str(factor))
        assert import_checkpoint(tmp_path / str(factor)).dtype is dtype


@torch.no_grad()
def test_dense_layers_have_the_names_of_the_released_model(pairs, tmp_path):
    """Kimi Linear's first layer has `mlp`; transformers writes `block_sparse_moe` for it too."""
    theirs, ours, path = pairs("kimi_linear", "base")
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    renamed = {
        name.replace("layers.0.block_sparse_moe", "layers.0.mlp"): x
        for name, x in load_file(path / "model.safetensors").items()
    }
    save_file(renamed, tmp_path / "model.safetensors")
    ids = tokens(theirs, 1, T)
    assert torch.equal(import_checkpoint(tmp_path)(ids).logits, ours(ids).logits)


def renamed(path, folder, names):
    """A copy of a checkpoint in which names(tensors) are the tensors."""
    folder.mkdir()
    (folder / "config.json").write_text((path / "config.json").read_text())
    save_file(names(load_file(path / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("kind", "prefix"), [("qwen3", "model."), ("gpt2", "transformer.")])
@torch.no_grad()
def test_names_of_a_model_without_its_head(kind, prefix, pairs, tmp_path):
    """As Qwen3-Embedding was released."""
    path = tmp_path / "whole"
    theirs = save(described(kind, tie_word_embeddings=True), path)
    folder = renamed(path, tmp_path / "base", lambda each: {n.removeprefix(prefix): x for n, x in each.items()})
    ids = tokens(theirs, 2, T)
    assert relative(import_checkpoint(folder)(ids).logits, logits(theirs, ids)) < FLOAT64


@pytest.mark.parametrize(
    ("kind", "module"),
    [("gpt_neox", "gpt_neox.layers.0.attention"), ("gptj", "transformer.h.0.attn"),
     ("gpt_neo", "transformer.h.0.attn.attention"), ("gpt_bigcode", "transformer.h.0.attn")],
)  # fmt: skip
@torch.no_grad()
def test_masks_beside_the_weights_are_left_out(kind, module, pairs, tmp_path):
    """As files of early versions have them; in these the head of GPT-NeoX has either of its names."""
    _, ours, path = pairs(kind, "base")
    masks = {f"{module}.bias": torch.ones(1, 1, 4, 4).bool(), f"{module}.masked_bias": torch.tensor(-1e9)}

    def early(tensors):
        return masks | {name.replace("embed_out", "lm_head"): x for name, x in tensors.items()}

    again = import_checkpoint(renamed(path, tmp_path / "early", early))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters(), strict=True))


def test_a_tied_head_of_gpt_neox_may_be_stored(pairs, tmp_path):
    _, ours, path = pairs("gpt_neox", "tied, without biases")
    head, embedding = "embed_out.weight", "gpt_neox.embed_in.weight"
    again = import_checkpoint(renamed(path, tmp_path / "copy", lambda each: each | {head: each[embedding].clone()}))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters(), strict=True))
    other = renamed(path, tmp_path / "other", lambda each: each | {head: 2 * each[embedding]})
    with pytest.raises(InputError, match=f"unexpected tensor '{head}'"):
        import_checkpoint(other)


@torch.no_grad()
def test_copies_of_shared_blocks(pairs, tmp_path):
    """Each of three layers has all of the two blocks' weights: the third those of the first block."""
    theirs, ours, path = pairs("zamba2", "base")
    first, third = (f"model.layers.{i}.shared_transformer." for i in (1, 3))

    def copied(tensors):
        return tensors | {n.replace(first, third): x.clone() for n, x in tensors.items() if n.startswith(first)}

    ids = tokens(theirs, 2, T)
    again = import_checkpoint(renamed(path, tmp_path / "copies", copied))
    assert torch.equal(again(ids).logits, ours(ids).logits)
    name = f"{third}self_attn.q_proj.weight"
    other = renamed(path, tmp_path / "other", lambda each: copied(each) | {name: torch.zeros_like(copied(each)[name])})
    with pytest.raises(InputError, match=f"unexpected tensor '{name}'"):
        import_checkpoint(other)
