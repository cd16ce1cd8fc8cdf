"""GGUF files of Llama, Qwen2, Qwen3, Arcee, Seed-OSS and Gemma 3: the logits of the model that was written, whatever
the types of its tensors."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Tokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from typer.testing import CliRunner

from headrace import InputError, load
from headrace.cli.app import app
from headrace.convert import import_gguf
from headrace.convert.checkpoint import read_config, read_tokenizer
from headrace.data import open_data
from headrace.data.tokenizer import END, train_bpe
from headrace.files.checks import read_json

gguf = pytest.importorskip("gguf", reason='pip install "headrace[gguf]"')
from headrace.convert.vocabulary import SPLITS, tokenizer_of  # noqa: E402

TRAINED = json.loads(train_bpe(["the cats and the dogs sat on the mat"] * 9, 290).backend_tokenizer.to_str())["model"]
TURNS = ["<|im_start|>", "<|im_end|>"]
TOKENS = [*sorted(TRAINED["vocab"], key=TRAINED["vocab"].get), *TURNS]
MERGES = [" ".join(pair) for pair in TRAINED["merges"]]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
SIZES = {
    "vocab_size": len(TOKENS), "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 5000.0, "rms_norm_eps": 1e-6,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
WITH_HEAD_DIM = "qwen3", "seed_oss", "gemma3"
CLASSES = {"gemma3": "gemma3_text"}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OWN_NAMES = {
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}  # fmt: skip
WIDE = {"hidden_size": 256, "intermediate_size": 256}  # the types K have blocks of 256
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")


def blocks(weight, kind):
    """A matrix in a type of tensors: random blocks with finite scales, where the package cannot quantize."""
    if kind.name not in ("Q4_K", "Q6_K"):
        return gguf.quantize(weight, kind)
    values, size = gguf.GGML_QUANT_SIZES[kind]
    drawn = np.random.default_rng(weight.size).integers(0, 256, (weight.size // values, size), np.uint8)
    scales = {"Q4_K": (0, 4), "Q6_K": (208, 210)}[kind.name]
    drawn[:, slice(*scales)] = np.full((scales[1] - scales[0]) // 2, 4e-4, np.float16).view(np.uint8)
    return drawn.reshape(len(weight), -1)


def interleaved(rows, heads):
    """The rows of q or k as llama.cpp's converter of Llama orders them: channel i of a head, then i + half of it."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def metadata(model, arch):
    c = model.config
    rope = c.rope_parameters.get("full_attention", c.rope_parameters)
    own = {
        "block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size, "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads, "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps, "rope.freq_base": rope["rope_theta"],
    }  # fmt: skip
    if arch in WITH_HEAD_DIM:
        own |= dict.fromkeys(("attention.key_length", "attention.value_length"), c.head_dim)
    if arch == "gemma3":
        own["attention.sliding_window"] = c.sliding_window
        if (local := c.rope_parameters["sliding_attention"]["rope_theta"]) != 10000.0:
            own["rope.freq_base_swa"] = local
    if rope["rope_type"] in ("linear", "yarn"):
        own |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        own["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        own |= {f"rope.scaling.yarn_{end}": rope[end] for end in ("beta_fast", "beta_slow") if end in rope}
    return {f"{arch}.{key}": value for key, value in own.items()} | VOCABULARY


VOCABULARY = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3 if token in (END, *TURNS) else 1 for token in TOKENS],
    "tokenizer.ggml.merges": MERGES, "tokenizer.ggml.bos_token_id": TOKENS.index(END),
    "tokenizer.ggml.eos_token_id": TOKENS.index(END), "tokenizer.ggml.eot_token_id": TOKENS.index("<|im_end|>"),
    "tokenizer.ggml.padding_token_id": TOKENS.index(END), "tokenizer.chat_template": TEMPLATE,
}  # fmt: skip


def written(path, values, tensors=(), arch="llama"):
    """Writes a file. values: metadata by key; tensors: (name, array, type)."""
    writer = gguf.GGUFWriter(path, arch)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in values.items():
        add.get(type(value), writer.add_array)(key, value)
    for name, array, kind in tensors:
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@torch.no_grad()
def release(path, arch="llama", kind="F32", more=(), changes=None, **config):
    """Writes a random model, whose matrices have a type. Returns it with the values that the file has.

    more: further tensors; changes: of the metadata."""
    kind, f32 = (getattr(gguf.GGMLQuantizationType, name) for name in (kind, "F32"))
    sizes = SIZES | ({"head_dim": 16} if arch in WITH_HEAD_DIM else {})
    described, tensors = CONFIG_MAPPING[CLASSES.get(arch, arch)](**sizes | config), []
    model = AutoModelForCausalLM.from_config(described).eval()
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
        its = kind if parameter.dim() == 2 else f32
        array = blocks(parameter.numpy(), its)
        parameter.copy_(torch.tensor(gguf.dequantize(array, its)))
        for theirs, ours in (NAMES | OWN_NAMES.get(arch, {})).items():
            name = name.replace(theirs, ours)
        if arch == "gemma3" and name.endswith("norm.weight"):
            array = array + 1
        part = name.split(".")[-2]
        tensors.append(
            (name, interleaved(array, heads[part]) if arch in ("llama", "arcee") and part in heads else array, its)
        )
    written(path, metadata(model, arch) | (changes or {}), [*tensors, *more], arch)
    return model


def differs(ours, theirs, length=40):
    ids = torch.randint(len(TOKENS), (2, length))
    with torch.no_grad():
        expected = theirs(ids, use_cache=False).logits
        return float((ours(ids).logits - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_of_tensors_keeps_its_values(kind, tmp_path):
    sizes = WIDE if kind.endswith("K") else {}
    theirs = release(tmp_path / "model.gguf", kind=kind, tie_word_embeddings=kind == "Q4_1", **sizes)
    ours, _ = import_gguf(str(tmp_path / "model.gguf"))
    assert ours.dtype == torch.float32 and differs(ours, theirs) < 1e-5


GEMMA = {"num_hidden_layers": 7, "sliding_window": 8}
VARIANTS = {
    "qwen2": {"arch": "qwen2"},
    "qwen3": {"arch": "qwen3", "head_dim": 32},
    "arcee": {"arch": "arcee", "mlp_bias": True, "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0,
              "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 0.5}},
    "seed_oss": {"arch": "seed_oss", "head_dim": 32},
    "seed_oss with other biases": {"arch": "seed_oss", "attention_bias": False, "attention_out_bias": True},
    "gemma3": {"arch": "gemma3", "head_dim": 32, "query_pre_attn_scalar": 32} | GEMMA,
    "gemma3 of 27B": GEMMA | {"arch": "gemma3", "head_dim": 32, "query_pre_attn_scalar": 16, "num_hidden_layers": 62},
    "gemma3, linear": {"arch": "gemma3", "query_pre_attn_scalar": 16, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}} | GEMMA,
    "gemma3, a base of the windows": {"arch": "gemma3", "query_pre_attn_scalar": 16, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}} | GEMMA,
    "biases": {"attention_bias": True, "mlp_bias": True},
    "a head size of its own": {"head_dim": 32, "changes": {"llama.attention.key_length": 32,
                               "llama.attention.value_length": 32, "llama.rope.dimension_count": 32}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    "yarn": {"arch": "qwen2", "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
             "original_max_position_embeddings": 64}},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_have_equal_logits(variant, tmp_path):
    theirs = release(tmp_path / "model.gguf", **VARIANTS[variant])
    ours, _ = import_gguf(tmp_path / "model.gguf")
    assert differs(ours, theirs) < 1e-5


def test_factors_of_rotary_frequencies_are_those_of_llama_3(tmp_path):
    rope = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    rotations = 8192 * 5e5 ** -(torch.arange(32, dtype=torch.float64) / 32) / (2 * torch.pi)
    kept = ((rotations - 1) / (4 - 1)).clamp(0, 1)
    factors = 1 / (kept + (1 - kept) / 32)
    assert ((factors > 1) & (factors < 32)).any()
    tensor = ("rope_freqs.weight", factors.float().numpy(), gguf.GGMLQuantizationType.F32)
    theirs = release(tmp_path / "model.gguf", rope_parameters=rope, max_position_embeddings=9000, more=[tensor], **WIDE)
    ours, _ = import_gguf(tmp_path / "model.gguf")
    assert ours.config.converted_from["rope_parameters"] == rope and differs(ours, theirs, 200) < 1e-5
    other = (tensor[0], tensor[1] ** 1.01, tensor[2])
    release(tmp_path / "other.gguf", rope_parameters=rope, more=[other], **WIDE)
    with pytest.raises(InputError, match=r"the factors in 'rope_freqs.weight' are not those of Llama 3"):
        import_gguf(tmp_path / "other.gguf")
    release(tmp_path / "both.gguf", more=[tensor], changes={"llama.rope.scaling.factor": 2.0}, **WIDE)
    with pytest.raises(InputError, match=r"is 'linear'; expected none beside 'rope_freqs.weight'"):
        import_gguf(tmp_path / "both.gguf")


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])  # which it knows
def test_transformers_reads_the_file_alike(arch, tmp_path):
    of_its_reader = {"qwen3": {"head_dim": 128}, "gemma3": {"head_dim": 256}}  # whatever the file has
    widths = of_its_reader.get(arch, {})
    release(tmp_path / "model.gguf", arch, "Q8_0", **widths)
    ours, _ = import_gguf(tmp_path / "model.gguf")
    assert differs(ours, AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").eval()) < 1e-5


def test_command_writes_model_tokenizer_and_settings_of_generation(tmp_path, run_command):
    theirs = release(tmp_path / "model.gguf", kind="F16")
    for source, output, to in (("model.gguf", "ours", ()), ("ours", "back", ("--to", "llama"))):
        assert run_command("convert", tmp_path / source, "--output", tmp_path / output, *to).code == 0
    ours, tokenizer = load(tmp_path / "ours"), read_tokenizer(tmp_path / "ours")
    end, turn = TOKENS.index(END), TOKENS.index("<|im_end|>")
    settings = ours.generation_config
    assert (settings.eos_token_id, settings.pad_token_id) == ([end, turn], end) and differs(ours, theirs) < 1e-5
    assert differs(AutoModelForCausalLM.from_pretrained(tmp_path / "back"), theirs) < 1e-5
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "the cats"}], return_dict=False)
    assert ids[0] == TOKENS.index("<|im_start|>") and ids[-1] == turn
    assert tokenizer.decode(ids) == "<|im_start|>the cats<|im_end|>"


def test_precision_is_that_of_the_option(tmp_path):
    release(tmp_path / "model.gguf", kind="Q8_0", num_hidden_layers=1)
    assert import_gguf(tmp_path / "model.gguf", torch.bfloat16)[0].dtype == torch.bfloat16


# --- tokenizers ------------------------------------------------------------------------------------------------------

TEXT = "It's 12345,  67 café\n\n ok"
PIECES = {
    "gpt-2": ["It", "'s", " 12345", ",", " ", " 67", " café", "\n\n", " ok"],
    "smollm": ["It", "'s", " ", *"12345", ",", "  ", *"67", " café", "\n\n", " ok"],
    "llama-bpe": ["It", "'s", " ", "123", "45", ",", " ", " ", "67", " café", "\n\n", " ok"],
    "qwen2": ["It", "'s", " ", *"12345", ",", " ", " ", *"67", " café", "\n\n", " ok"],
    "deepseek-r1-qwen": ["It", "'s", " ", *"12345", ",", " ", " ", *"67", " café", "\n\n", " ok"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_text_splits_by_the_name_in_the_file(pre):
    tokenizer = tokenizer_of(VOCABULARY | {"tokenizer.ggml.pre": pre})
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[slice(*span)] for _, span in pieces] == PIECES[pre]
    ids, beginning = tokenizer(TEXT + "<|im_end|>").input_ids, END if pre == "llama-bpe" else ""
    assert ids[-1] == TOKENS.index("<|im_end|>") and tokenizer.decode(ids) == f"{beginning}{TEXT}<|im_end|>"


def test_qwen2_tokenizes_as_its_own_tokenizer():
    ours = tokenizer_of(VOCABULARY | {"tokenizer.ggml.pre": "qwen2"})
    merges = [tuple(merge.split()) for merge in MERGES]
    theirs = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(TOKENS)}, merges=merges)
    for text in (TEXT, "the cats sat", "cafe\u0301 の", " \n the\tmat"):
        assert ours(text).input_ids == theirs(text).input_ids


def test_tokens_of_llama_3_stay_whole():
    tokens = [*TOKENS, "dogcat"]
    values = VOCABULARY | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * len(tokens)}
    whole = tokenizer_of(values | {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False})
    assert whole.tokenize("dogcat") == ["dogcat"] and len(tokenizer_of(values).tokenize("dogcat")) > 1


def test_sentencepiece_tokenizes_as_in_transformers(tmp_path):
    words = ["▁t", "he", "▁the", "▁c", "at", "▁cat", "▁cats", "▁s", "▁sat", "▁on", "on"]
    letters = [*"▁abcdefghijklmnopqrstuvwxyz"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(words) + len(letters))]
    values = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    path = written(tmp_path / "model.gguf", {"llama.block_count": 1} | values)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name), tokenizer_of(values)
    for text in ("the cats sat on", "é\n the  cat", "xyz"):
        ids = ours(text).input_ids
        assert ids == theirs(text).input_ids and ours.decode(ids, skip_special_tokens=True) == text
    # SentencePiece puts a space before every text; transformers' reader not before one that begins with a space.
    assert ours.tokenize(" the cat") == ["▁", "▁the", "▁cat"]
    bare = tokenizer_of(values | {"tokenizer.ggml.add_space_prefix": False})
    for text, expected in (("the cat", ["t", "he", "▁cat"]), (" the cat", ["▁the", "▁cat"])):
        assert bare.tokenize(text) == expected and bare.decode(bare(text).input_ids, skip_special_tokens=True) == text


# --- bad input -------------------------------------------------------------------------------------------------------

MISTAKES = {
    "an architecture": (
        {"general.architecture": "phi3"},
        "its architecture is 'phi3'; expected llama, qwen2, qwen3, arcee, seed_oss, gemma3",
    ),
    "a part": ({"split.count": 3}, "it is one of 3 parts of a model; join them by llama-gguf-split --merge"),
    "a key": ({"llama.expert_count": 8}, "it has llama.expert_count=8, which may change what the model computes"),
    "a value": ({"llama.attention.head_count": [4, 4]}, r"'attention.head_count' is \[4, 4\], not an integer"),
    "no value": ({"llama.block_count": None}, "the metadata of llama has no 'block_count'"),
    "part of a rotation": ({"llama.rope.dimension_count": 8}, "its llama.rope.dimension_count is 8; expected 16"),
    "a rotation": ({"llama.rope.scaling.type": "longrope"}, "its rope.scaling.type is 'longrope'; expected none"),
    "layers": ({"llama.block_count": 3}, "it has no tensor 'model.layers.1"),
    "no tokenizer": ({"tokenizer.ggml.model": None}, "it has no tokenizer"),
    "a tokenizer": ({"tokenizer.ggml.model": "bert"}, "its tokenizer is 'bert'; expected gpt2"),
    "a split": ({"tokenizer.ggml.pre": "tekken"}, "its tokenizer splits texts as 'tekken'; expected one of gpt-2, "),
    "a token": ({"tokenizer.ggml.eos_token_id": 999}, "its eos_token_id is 999; expected one of 279 tokens"),
    "merges": ({"tokenizer.ggml.merges": ["x"]}, "its tokenizer cannot be read: "),
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The metadata and the tensors of a file."""
    path = tmp_path_factory.mktemp("small") / "model.gguf"
    model = release(path, num_hidden_layers=1)
    read = gguf.GGUFReader(path)
    return metadata(model, "llama"), [(x.name, np.array(x.data), x.tensor_type) for x in read.tensors]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused_in_a_sentence(mistake, small, tmp_path):
    changes, message = MISTAKES[mistake]
    values = {key: value for key, value in (small[0] | changes).items() if value is not None}
    arch = values.pop("general.architecture", "llama")
    path = written(tmp_path / "model.gguf", values, small[1], arch)
    with pytest.raises(InputError, match=f"checkpoint '{path}': {message}") as refused:
        import_gguf(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("share", [0, 0.0001, 0.01, 0.2, 0.99])
def test_truncated_file_is_refused(share, small, tmp_path):
    whole = written(tmp_path / "whole.gguf", *small).read_bytes()
    (tmp_path / "model.gguf").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(InputError, match="it is not a GGUF file, or not a complete one: ") as refused:
        import_gguf(tmp_path / "model.gguf")
    assert "\n" not in str(refused.value)


def test_type_without_a_reader_is_refused(small, tmp_path):
    kind = gguf.GGMLQuantizationType.I8
    path = written(tmp_path / "model.gguf", small[0], [*small[1], ("blk.0.x", np.zeros((2, 4), np.int8), kind)])
    with pytest.raises(InputError, match=r"tensor 'blk.0.x' has the type I8: "):
        import_gguf(path)


def test_every_command_takes_a_file_for_a_checkpoint(tmp_path, monkeypatch):
    """It answers as the folder does that `convert` makes of it."""
    monkeypatch.chdir(tmp_path)
    release(tmp_path / "model.gguf", max_position_embeddings=256)
    (tmp_path / "text.txt").write_text("the dogs and the cats sat on the mat. " * 300)

    def run(*arguments):
        done = CliRunner().invoke(app, [str(x) for x in arguments])
        assert done.exit_code == 0, (arguments, done.output, done.exception)
        return done.stdout

    run("convert", "model.gguf", "--output", "folder")
    both = "model.gguf", "folder"
    ours, converted = (read_config(x) for x in both)
    run("convert", "model.gguf", "--to", "llama", "--output", "theirs")
    theirs = AutoModelForCausalLM.from_pretrained("theirs")
    assert theirs.generation_config.eos_token_id == import_gguf("model.gguf")[0].generation_config.eos_token_id
    assert ours.stack == converted.stack and ours.dtype == converted.dtype and ours.vocab_size == converted.vocab_size
    tokens = ("--prompt", "the cats", "--temperature", "0", "--max-new-tokens", "4", "--json")
    assert len({str(json.loads(run("generate", x, *tokens))["tokens"]) for x in both}) == 1
    for x in both:
        run("prepare", "text.txt", "--tokenizer", x, "--length", 32, "--held-out", "0.2", "--output", f"{x}-data")
    assert len({str(open_data(tmp_path / f"{x}-data").identity) for x in both}) == 1
    data = "--data", "folder-data"
    run("linearize", "model.gguf", *data, "--keep", "none", "--steps", 1, "--rows", 1, "--output", "linear")
    run("train", "laptop-5m", "mixer=checkpoint", "weights=linear", "teacher=model.gguf", "tokens=32",
        "batch_tokens=32", "micro_batch=1", *data, "--output", "whole")  # fmt: skip
    run("linearize", "model.gguf", *data, "--output", "linear", "--beside", "whole/model", "--beside", "model.gguf")
    report = read_json(tmp_path / "linear" / "linearize.json")
    assert report["beside"]["model.gguf"] == pytest.approx(report["nats"]["original"], rel=1e-5)
    run("bench", "--mixers", "./model.gguf", "--what", "memory", "--output", "bench")


def test_an_evaluation_takes_a_file_for_a_checkpoint(small, tmp_path):
    pytest.importorskip("lm_eval", reason='pip install "headrace[eval]"')
    from headrace.evaluation.checkpoint import fingerprint, read_checkpoint

    path = written(tmp_path / "model.gguf", *small)
    read = read_checkpoint(str(path), "cpu", 1)
    assert read.tokenizer("cats").input_ids == read_tokenizer(path)("cats").input_ids and read.trained_length
    before = fingerprint(str(path))
    written(path, small[0] | {"llama.rope.freq_base": 77.0}, small[1])
    assert fingerprint(str(path)) != before


def test_an_export_names_the_conversion(small, tmp_path, monkeypatch):
    """As a folder of ONNX has files of a tokenizer, of which a GGUF file has none."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "model.gguf", *small)
    done = CliRunner().invoke(app, ["export", "model.gguf", "--to", "onnx", "--output", "x"])
    assert isinstance(done.exception, InputError)
    told = "'model.gguf' is a GGUF file; convert it first: headrace convert model.gguf --output FOLDER"
    assert str(done.exception) == told
