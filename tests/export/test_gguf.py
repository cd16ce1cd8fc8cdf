"""GGUF: llama.cpp computes the logits and the tokens of headrace for the models of which it has an architecture."""

import json

import pytest
import torch
import torch.nn.functional as F
from tokenizers.processors import TemplateProcessing

import tiny
from headrace import InputError
from headrace.convert.checkpoint import read_tokenizer
from headrace.data.tokenizer import byte_level, train_bpe
from released import release

GGUFReader = getattr(pytest.importorskip("gguf"), "GGUFReader")  # noqa: B009
gguf = pytest.importorskip("headrace.export.gguf", reason='pip install "headrace[gguf]"', exc_type=ImportError)

SIZES = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 64}
MODELS = {
    "gated-deltanet(heads.expand_k=1.0, heads.expand_v=1.0)": {"num_heads": 4},
    "gated-deltanet(heads.expand_k=2.0, heads.expand_v=2.0, heads.qk_groups=2, inputs.conv=3)": {"num_heads": 4},
    "mamba2": {"num_heads": 4, "mlp": "none", "intermediate_size": None},
    "rwkv7": {"num_heads": 2},
}
TEXT = "The cat's 123 dogs — ünï?  sat\n on <|endoftext|> it"


def saved(folder, mixer, tokenizer=None, **changes):
    model = tiny.build(mixer, **SIZES | changes).float()
    tiny.saved(model, folder, tokenizer)
    return model


@pytest.mark.parametrize("mixer", MODELS)
@torch.no_grad()
def test_llama_cpp_gives_the_same_logits(mixer, tmp_path):
    """In pieces, so that states are carried. The logits are up to 15; with sums in another order, those in float32
    differed by up to 1.3e-4."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python (it builds llama.cpp)")
    (tmp_path / "out").mkdir()
    model = saved(tmp_path, mixer, **MODELS[mixer])
    gguf.export(tmp_path, tmp_path / "out")
    llama = llama_cpp.Llama(str(tmp_path / "out" / gguf.NAME), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    ids = torch.randint(0, 300, (50,))
    for piece in ids.split([1, 30, 1, 18]):
        llama.eval(piece.tolist())
    torch.testing.assert_close(torch.tensor(llama.scores[:50]), model(ids[None]).logits[0], rtol=0, atol=1e-3)


def computed(tensors, ids, heads, eps=1e-6):
    """The logits [T, vocabulary] of Mamba-2 from its tensors, token by token, as llama.cpp computes them."""

    def normed(x, weight):
        return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    x = tensors["token_embd.weight"][ids]
    for i in range(2):
        own = {name.removeprefix(f"blk.{i}."): tensor for name, tensor in tensors.items()}
        conv, inner = own["ssm_conv1d.weight"], own["ssm_out.weight"].shape[1]
        size, width = (conv.shape[0] - inner) // 2, conv.shape[1]
        z, xBC, dt = (normed(x, own["attn_norm.weight"]) @ own["ssm_in.weight"].T).split([inner, len(conv), heads], -1)
        before = F.pad(xBC, (0, 0, width - 1, 0)).unfold(0, width, 1)
        v, B, C = F.silu((before * conv).sum(-1) + own["ssm_conv1d.bias"]).split([inner, size, size], -1)
        v, dt, y, state = v.unflatten(-1, (heads, -1)), F.softplus(dt + own["ssm_dt.bias"])[..., None, None], [], 0
        for t in range(len(ids)):
            state = state * (dt[t] * own["ssm_a"][..., None]).exp() + dt[t] * v[t][..., None] * B[t]
            y.append((state @ C[t] + own["ssm_d"] * v[t]).flatten())
        x = x + normed(torch.stack(y) * F.silu(z), own["ssm_norm.weight"][0]) @ own["ssm_out.weight"].T
    return normed(x, tensors["output_norm.weight"]) @ tensors["output.weight"].T


@torch.no_grad()
def test_tensors_of_mamba2_give_the_logits(tmp_path):
    """Without llama.cpp."""
    (tmp_path / "out").mkdir()
    model, ids = saved(tmp_path, "mamba2", **MODELS["mamba2"]), torch.randint(0, 300, (9,))
    gguf.export(tmp_path, tmp_path / "out")
    tensors = {x.name: torch.tensor(x.data).double() for x in GGUFReader(tmp_path / "out" / gguf.NAME).tensors}
    tiny.close(computed(tensors, ids, heads=4), model.double()(ids[None]).logits[0], 1e-5)


@pytest.mark.parametrize("tokenizer", [byte_level(), train_bpe(["the cats and the dogs sat on the mat"] * 9, 290)])
def test_llama_cpp_tokenizes_alike(tokenizer, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python (it builds llama.cpp)")
    (tmp_path / "out").mkdir()
    saved(tmp_path, "mamba2", tokenizer, **MODELS["mamba2"])
    gguf.export(tmp_path, tmp_path / "out")
    llama = llama_cpp.Llama(str(tmp_path / "out" / gguf.NAME), n_ctx=64, vocab_only=True, verbose=False)
    expected = read_tokenizer(tmp_path)(TEXT)["input_ids"]
    assert llama.tokenize(TEXT.encode(), add_bos=False, special=True) == expected
    assert llama.detokenize(expected, special=True).decode() == TEXT and llama.token_eos() == tokenizer.eos_token_id


@pytest.mark.parametrize(
    "mixer, changes, reason",
    [
        ("softmax-gated-deltanet", {}, "no architecture for head competition; expected gated-deltanet, mamba2, rwkv7"),
        ("gla", {}, "cannot write layer 0 of the model, which has gla; expected gated-deltanet, mamba2"),
        ("hybrid", {}, "llama.cpp has no architecture for head competition"),
        ("gated-deltanet", {}, "key dimension 24 and value dimension 48 per head; llama.cpp needs equal ones"),
        ("mamba2", {}, "with mamba2: expected style.mlp='none'"),
        ("mamba2(heads.qk_groups=2)", MODELS["mamba2"], "heads.qk_groups=2; llama.cpp needs 1"),
        ("rwkv7", {"num_heads": 4}, "head dimension 32; llama.cpp computes rwkv7 only for 64"),
    ],
)  # fmt: skip
def test_unsupported_models_are_refused(mixer, changes, reason, tmp_path):
    saved(tmp_path, mixer, **changes)
    with pytest.raises(InputError, match=reason):
        gguf.export(tmp_path, tmp_path)


def test_unsupported_files_are_refused(tmp_path):
    """A released model with its way back, a tokenizer that splits otherwise, and weights that would be rounded."""
    reason = "layer 1 of the model, which has AttentionSpec; .* or `headrace convert --to qwen3_5_text`"
    with pytest.raises(InputError, match=reason):
        gguf.export(release("qwen3_5_text", tmp_path / "released"), tmp_path)
    model, path = saved(tmp_path, "rwkv7", num_heads=2), tmp_path / "tokenizer.json"
    own = path.read_text()
    for at, changes in (("pre_tokenizer", {"use_regex": False}), ("model", {"end_of_word_suffix": "Ġ"})):
        other = json.loads(own)
        other[at] |= changes
        path.write_text(json.dumps(other))
        with pytest.raises(InputError, match="gguf needs a tokenizer of byte-level BPE that splits text as GPT-2's"):
            gguf.export(tmp_path, tmp_path)
    model.double().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="the weights are float64, which --to gguf would round to float32"):
        gguf.export(tmp_path, tmp_path)


def test_file_has_the_tokens_that_the_tokenizer_adds(tmp_path):
    """To its vocabulary, where no text may be split across one, and to a text."""
    (tmp_path / "out").mkdir()
    tokenizer = byte_level()
    tokenizer.add_tokens(["two words"])
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    bos = ("<s>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", "<s> $A $B", [bos])
    saved(tmp_path, "mamba2", tokenizer, **MODELS["mamba2"])
    gguf.export(tmp_path, tmp_path / "out")
    fields = GGUFReader(tmp_path / "out" / gguf.NAME).fields
    written = {name.removeprefix("tokenizer.ggml."): field.contents() for name, field in fields.items()}
    assert (written["bos_token_id"], written["add_bos_token"], written["add_eos_token"]) == (bos[1], True, False)
    assert fields["tokenizer.chat_template"].contents() == "{{ messages }}"
    assert fields["tokenizer.chat_template.tools"].contents() == "{{ tools }}"
    kinds = dict(zip(written["tokens"], written["token_type"], strict=True))
    assert (kinds["a"], kinds["two words"], kinds["<s>"]) == (1, 4, 3), "normal, defined by a user, control"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$A", "$A $B", [])
    tokenizer.save_pretrained(tmp_path)
    gguf.export(tmp_path, tmp_path / "out")
    fields = GGUFReader(tmp_path / "out" / gguf.NAME).fields
    found = [fields[f"tokenizer.ggml.{name}"].contents() for name in ("bos_token_id", "add_bos_token")]
    assert found == [bos[1], False], "which a chat template may add"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> <s> $A", "<s> $A $B", [bos])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"llama\.cpp adds bos .* and eos .* alone"):
        gguf.export(tmp_path, tmp_path / "out")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="needs a tokenizer with an eos token"):
        gguf.export(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("norm_eps", [1e-6, 3e-4])
def test_file_stores_epsilon_and_sizes(norm_eps, tmp_path):
    (tmp_path / "out").mkdir()
    saved(tmp_path, "mamba2", **MODELS["mamba2"], norm_eps=norm_eps, max_position_embeddings=77)
    gguf.export(tmp_path, tmp_path / "out")
    fields = GGUFReader(tmp_path / "out" / gguf.NAME).fields
    written = {name.removeprefix("mamba2."): field.contents() for name, field in fields.items()}
    assert written["attention.layer_norm_rms_epsilon"] == pytest.approx(norm_eps)
    assert (written["context_length"], written["embedding_length"], written["block_count"]) == (77, 128, 2)
