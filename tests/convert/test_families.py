"""Released model families: the logits, cached decoding, padding and gradients of transformers' models, and each field
of their config.json honoured or refused by name. A family is an entry of tests/families.

Both models compute in float64, unless a test is of float32.
"""

import json
from copy import deepcopy
from dataclasses import fields

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from families import dense, float64_throughout, logits, parallel, read, relative, rewrite, save, softmax, sparse
from families.every import FAMILIES, VARIANTS, described
from headrace import HeadraceCache, HeadraceConfig, InputError, load
from headrace.convert import FORMATS, export_checkpoint, import_checkpoint
from headrace.convert.describe import has_cache
from headrace.convert.fields import COMMON
from headrace.convert.files import WEIGHTS
from headrace.convert.importing import import_config
from headrace.convert.linearize import linearize
from headrace.convert.rotary import MSCALES
from headrace.convert.slots import slots

T = 12
DECODED = 24  # tokens, one at a time: the memory of attention, which grows by a quarter, grows several times
CONSTANTS = ("choice_bias", "activation.beta", "activation.eps")  # which have no gradients
FLOAT64 = 1e-12  # relative, for sums in another order
pytestmark = pytest.mark.usefixtures("no_grad")


def tokens(theirs, *shape):
    return torch.randint(1, theirs.config.vocab_size, shape)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Their model, ours and the folder of theirs, by family and variant."""
    made = {}

    def pair(kind, variant):
        if (kind, variant) not in made:
            path = tmp_path_factory.mktemp(kind)
            save(described(kind, variant), path)
            made[kind, variant] = read(path), import_checkpoint(path), path
        return made[kind, variant]

    return pair


@pytest.mark.parametrize(("kind", "variant"), VARIANTS)
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
@torch.enable_grad()
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
def test_linear_layers_within_their_blocks(kind, pairs):
    """A window that is never left is attention."""
    theirs, ours, _ = pairs(kind, "base")
    ids, layers = tokens(theirs, 2, T), [i for i, spec in enumerate(ours.config.mixers) if spec.pattern is None]
    assert relative(linearize(ours, f"lolcats(window={T})", layers)(ids).logits, logits(theirs, ids)) < FLOAT64


def test_rwkv_is_not_rescaled(tmp_path):
    """In evaluation, transformers halves the stream every `rescale_every` layers, for the range of float16. The norms'
    epsilon then weighs more, so that its logits differ from those of its training mode, which are the model's."""
    theirs = save(described("rwkv", rescale_every=1, num_hidden_layers=3), tmp_path)
    ours = import_checkpoint(tmp_path)
    ids = tokens(theirs, 2, T)
    expected, rescaled = logits(theirs.train(), ids), logits(theirs.eval(), ids)
    assert relative(ours(ids).logits, expected) < 1e-12 < relative(rescaled, expected) < 1e-3


@pytest.mark.parametrize("kind", FAMILIES)
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
        torch.testing.assert_close(after[name], before[name], rtol=1e-14, atol=1e-15)
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
        assert model.dtype is torch.bfloat16 and mlp.router.weight.dtype is mlp.choice_bias.dtype is torch.float32


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
def test_fields_are_honoured_or_refused(kind, tmp_path):
    """Each field of the class with another value: the same logits, or a refusal that names the field."""
    for place, name in enumerate(names(kind)):
        built = 0
        for i, changes in enumerate(values(kind, name)):
            path = tmp_path / f"{place} {i}"  # which the refusal names too
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


LONG = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
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
        *(("falcon_h1", {f"mamba_{name}": None}) for name in ("d_conv", "d_state", "n_groups")),
        ("nemotron_h", {"layers_block_type": []}), ("granite", {"residual_multiplier": float("inf")}),
        ("jamba", {"expert_layer_period": 0, "expert_layer_offset": -1}),
        *((kind, {"rope_parameters": {"rope_theta": 50.0} | wrong}) for kind, wrong in (
            ("llama", {"rope_type": ["yarn"]}), ("glm", {"rope_type": "default", PART: float("inf")}),
            ("llama", YARN | {"factor": "4", "original_max_position_embeddings": 32} | dict.fromkeys(MSCALES, 1.0)),
            *(("llama", LONG | {"original_max_position_embeddings": length}) for length in (None, 0, "32")),
        )),
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
    dense = read("kimi_linear", mlp_layer_types=None, first_k_dense_replace=2)  # by which their class sets a list
    assert {layer.mlp for layer in dense.stack.layers} == {"one"}
    for kind, field in (("qwen3_5_text", "full_attention_interval"), ("cohere2", "sliding_window_pattern")):
        assert read(kind, **{field: 7}).mixers == read(kind).mixers, "by layer_types"


def test_windows_by_a_pattern_are_those_of_their_class(tmp_path):
    base = {k: v for k, v in FAMILIES["gemma3_text"].base.items() if k != "layer_types"}
    theirs = save(CONFIG_MAPPING["gemma3_text"](**base, sliding_window_pattern=2), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["sliding_window_pattern"] == 2
    ids = tokens(theirs, 2, 40)
    assert relative(import_checkpoint(tmp_path)(ids).logits, logits(theirs, ids)) < FLOAT64


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("falcon", {"new_decoder_architecture": True, "multi_query": False, "num_kv_heads": 2}),
        *(("lfm3", {"layer_types": kinds}) for kinds in (["full_attention", "conv", "full_attention"], 3 * ["conv"])),
        ("deepseek_v3", {"n_shared_experts": 0}),  # whose MLP is saved as tensors without elements
        ("recurrent_gemma", {"attention_window_size": 10**5}),  # more than a tensor has elements
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_fields_that_have_no_effect_in_a_model_are_not_refused(kind, changes, tmp_path):
    theirs = save(described(kind, **changes), tmp_path)
    ids = tokens(theirs, 2, 40)
    assert relative(import_checkpoint(tmp_path)(ids).logits, logits(theirs, ids)) < FLOAT64


def test_frequencies_of_phi_moe_beyond_the_original_length(tmp_path):
    """As published, by long_factor; transformers' class keeps short_factor at any length."""
    parameters = sparse.PHI["rope_parameters"] | {"original_max_position_embeddings": 16}
    theirs = save(described("phimoe", rope_parameters=parameters), tmp_path)
    ours = import_checkpoint(tmp_path)
    rewrite(tmp_path, rope_parameters=parameters | {"short_factor": parameters["long_factor"]})
    for length, published in ((16, theirs), (28, read(tmp_path))):
        ids = tokens(theirs, 2, length)
        assert relative(ours(ids).logits, logits(published, ids)) < FLOAT64


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("bamba", {"attn_layer_indices": None}), ("lfm2", {"layer_types": 2 * ["conv"]}),
        ("qwen3_5_moe_text", {"layer_types": 2 * ["linear_attention"]}),
    ],
)  # fmt: skip
def test_formats_whose_cache_counts_by_attention(kind, changes, tmp_path):
    theirs = save(described(kind, **changes), tmp_path)
    with pytest.raises(ValueError, match="get_seq_length"), float64_throughout():
        theirs.generate(tokens(theirs, 1, 4), max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert not has_cache(kind, import_checkpoint(tmp_path).config)


# --- names of tensors that a checkpoint has and `save_pretrained` does not write --------------------------------------


VISION = {"hidden_size": 32, "intermediate_size": 32}
PIXTRAL = VISION | {"model_type": "pixtral", "num_hidden_layers": 1, "head_dim": 16}
SIGLIP = VISION | {"model_type": "siglip_vision_model", "num_hidden_layers": 1}
QWEN = VISION | {"depth": 1, "out_hidden_size": 32, "num_heads": 2}
IMAGES = {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}


@pytest.mark.parametrize(
    ("kind", "text", "vision"),
    [
        ("qwen3_5", "qwen3_5_text", QWEN), ("qwen3_5_moe", "qwen3_5_moe_text", QWEN),
        ("mistral3", "mistral", PIXTRAL | IMAGES), ("mistral3", "ministral3", PIXTRAL | IMAGES),
        ("gemma3", "gemma3_text", SIGLIP | IMAGES),
    ],
)  # fmt: skip
def test_language_model_of_a_model_that_reads_images(kind, text, vision, tmp_path):
    fields = {"text_config": described(text).to_dict(), "vision_config": vision}
    whole = CONFIG_MAPPING[kind](**fields, tie_word_embeddings=kind == "gemma3")
    with float64_throughout():
        theirs = AutoModelForImageTextToText.from_config(whole, experts_implementation="eager").eval()
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        theirs.save_pretrained(tmp_path)
    ours, ids = import_checkpoint(tmp_path), torch.randint(1, 61, (2, 40))
    assert any(name.startswith(("vision_tower.", "model.visual.")) for name in load_file(tmp_path / WEIGHTS))
    assert relative(ours(ids).logits, logits(theirs, ids)) < FLOAT64
    theirs.save_pretrained(tmp_path / "names of transformers 5", save_original_format=False)
    assert torch.equal(import_checkpoint(tmp_path / "names of transformers 5")(ids).logits, ours(ids).logits)
    assert import_config(tmp_path / "names of transformers 5").dtype is ours.dtype
    with pytest.raises(InputError, match=f"it reads text alone; expected --to {text}"):
        export_checkpoint(ours, kind, tmp_path / "back")
    export_checkpoint(ours, text, tmp_path / "back")
    assert relative(logits(read(tmp_path / "back"), ids), ours(ids).logits) < FLOAT64
    (tmp_path / "generation_config.json").unlink()
    settings = import_checkpoint(rewrite(tmp_path, eos_token_id=[1, 7], bos_token_id=3)).generation_config
    assert (settings.eos_token_id, settings.bos_token_id) == ([1, 7], 3)
    if kind == "gemma3":  # whose head is the embedding
        tensors = load_file(tmp_path / WEIGHTS)
        head = tensors["language_model.model.embed_tokens.weight"].clone()
        save_file(tensors | {"language_model.lm_head.weight": head}, tmp_path / WEIGHTS)
    if text != "ministral3":
        inner = json.loads((tmp_path / "config.json").read_text())["text_config"]
        del inner["model_type"]  # which is that of their class then
        assert torch.equal(import_checkpoint(rewrite(tmp_path, text_config=inner))(ids).logits, ours(ids).logits)


def renamed(path, folder, names, **settings):
    """A copy of a checkpoint in which names(tensors) are the tensors, with other settings in its config.json."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | settings))
    save_file(names(load_file(path / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def replaced(old, new):
    """Renames tensors."""
    return lambda tensors: {name.replace(old, new): x for name, x in tensors.items()}


def masked(module):
    """Adds masks, as files of early versions have them; in these the head of GPT-NeoX has either of its names."""
    masks = {f"{module}.bias": torch.ones(1, 1, 4, 4).bool(), f"{module}.masked_bias": torch.tensor(-1e9)}
    return lambda tensors: masks | replaced("embed_out", "lm_head")(tensors)


def predicting(name):
    """Adds a tensor of the layers of multi-token prediction, which transformers leaves out."""
    return lambda tensors: tensors | {name: torch.ones(2, 2)}


def with_head(factor):
    """Adds the tied head of GPT-NeoX."""
    return lambda tensors: tensors | {"embed_out.weight": factor * tensors["gpt_neox.embed_in.weight"]}


FIRST, THIRD = (f"model.layers.{i}.shared_transformer." for i in (1, 3))


def with_copies(tensors):
    """Adds to the third of Zamba2's layers with a shared block, of which there are two, the weights of the first."""
    return tensors | {name.replace(FIRST, THIRD): x.clone() for name, x in tensors.items() if name.startswith(FIRST)}


def with_another(tensors):
    """Adds copies of which one is wrong."""
    return with_copies(tensors) | {COPY: torch.zeros_like(with_copies(tensors)[COPY])}


BEYOND, COPY = "model.layers.2.eh_proj.weight", f"{THIRD}self_attn.q_proj.weight"
OTHER_NAMES = {  # as of a released model -> family, variant, change of its tensors
    "prediction in Qwen3-Next": ("qwen3_next", "base", predicting("mtp.fc.weight")),
    "prediction in Qwen3.5": ("qwen3_5_text", "base", predicting("mtp.fc.weight")),
    "prediction in Qwen3.5 of experts": ("qwen3_5_moe_text", "base", predicting("mtp.fc.weight")),
    "prediction in Nemotron-H": ("nemotron_h", "base", predicting("mtp.layers.0.eh_proj.weight")),
    "prediction in Ling": ("bailing_hybrid", "base", predicting(BEYOND)),
    "prediction in DeepSeek-V3": ("deepseek_v3", "base", predicting(BEYOND)),
    "prediction in GLM-4.5": ("glm4_moe", "base", predicting(BEYOND)),
    "prediction in GLM-4.7-Flash": ("glm4_moe_lite", "base", predicting(BEYOND)),
    "prediction in ERNIE 4.5": ("ernie4_5_moe", "base", predicting("model.mtp_block.0.mlp.up_proj.weight")),
    "prediction in K-EXAONE": ("exaone_moe", "base", predicting("mtp.fc.weight")),
    # transformers writes `block_sparse_moe` for the dense first layer too
    "dense layers of Kimi Linear": (
        "kimi_linear", "base", replaced("layers.0.block_sparse_moe", "layers.0.mlp")
    ),
    "no head, as in Qwen3-Embedding": (
        "llama", "tied", lambda tensors: {name.removeprefix("model."): x for name, x in tensors.items()}
    ),
    "masks in GPT-NeoX": ("gpt_neox", "base", masked("gpt_neox.layers.0.attention")),
    "masks in GPT-J": ("gptj", "base", masked("transformer.h.0.attn")),
    "masks in GPT-Neo": ("gpt_neo", "base", masked("transformer.h.0.attn.attention")),
    "masks in StarCoder": ("gpt_bigcode", "base", masked("transformer.h.0.attn")),
    "a tied head in GPT-NeoX": ("gpt_neox", "tied, without biases", with_head(1)),
    "copies of shared blocks in Zamba2": ("zamba2", "base", with_copies),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER_NAMES)
def test_other_names_and_further_tensors_make_the_same_model(case, pairs, tmp_path):
    kind, variant, names = OTHER_NAMES[case]
    _, ours, path = pairs(kind, variant)
    again = import_checkpoint(renamed(path, tmp_path / "other", names))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters(), strict=True))


UNEXPECTED = {  # the tensor that is refused -> family, variant, change of its tensors, and of its config.json
    BEYOND: ("bailing_hybrid", "base", predicting(BEYOND), {"num_nextn_predict_layers": 0}),
    "embed_out.weight": ("gpt_neox", "tied, without biases", with_head(2), {}),
    COPY: ("zamba2", "base", with_another, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", UNEXPECTED)
def test_further_tensors_of_another_model_are_refused(name, pairs, tmp_path):
    kind, variant, names, settings = UNEXPECTED[name]
    *_, path = pairs(kind, variant)
    with pytest.raises(InputError, match=f"tensor '{name}'"):
        import_checkpoint(renamed(path, tmp_path / "other", names, **settings))


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
    """Which bfloat16 weights would round, unless they are powers of 2; likewise weights that are differences from 1."""
    minimax = [("minimax", {"full_attn_alpha_factor": factor}) for factor in (2.0, 3.5)]
    for kind, changes in (*minimax, *((kind, {}) for kind in ("falcon_h1", "granite", "hyperclovax", "nemotron"))):
        path, exact = tmp_path / kind / str(changes), 2.0 in changes.values()
        AutoModelForCausalLM.from_config(described(kind, **changes)).bfloat16().save_pretrained(path)
        dtype = torch.bfloat16 if exact else torch.float32
        assert import_checkpoint(path).dtype is import_config(path).dtype is dtype, kind
