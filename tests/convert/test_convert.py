"""Checkpoints of other libraries: their files, and what is wrong with them. Logits are compared in test_families.py."""

import json
import shutil

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config

import tiny
from families import rewrite, save
from families.every import described
from groups import refused
from headrace import HeadraceForCausalLM, InputError, load
from headrace.convert import FORMATS, export_checkpoint, import_checkpoint
from headrace.convert.checkpoint import fetched, read_config, read_tokenizer
from headrace.convert.linearize import linearize
from headrace.convert.retrofit import retrofit
from headrace.convert.vocabulary import GPT2, _cl100k

THEIRS = {"llama": "tied", "mamba2": "base", "qwen3_next": "linear layers alone"}


def random(model):
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.fixture
def checkpoint(tmp_path):
    def save(name):
        theirs = random(AutoModelForCausalLM.from_config(described(name, THEIRS[name])))
        theirs.save_pretrained(tmp_path / "theirs")
        return theirs, tmp_path / "theirs"

    return save


@torch.no_grad()
def test_own_model_is_written_with_the_norms_of_qwen3_next(tmp_path):
    ours = tiny.trained(HeadraceForCausalLM(tiny.config("gated-deltanet", hidden_size=64, tie_word_embeddings=False)))
    export_checkpoint(ours, "qwen3_next", tmp_path)
    again, ids = import_checkpoint(tmp_path), torch.randint(29, (2, 20))
    torch.testing.assert_close(again(ids).logits, ours(ids).logits, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_model_that_was_changed_is_written_as_it_is(checkpoint, tmp_path):
    """With more tokens, and a head of its own, than the checkpoint that it came from."""
    _, path = checkpoint("llama")
    rewrite(path, torch_dtype="float32", auto_map={"AutoConfig": "code.Config"})
    import_checkpoint(path).save_pretrained(tmp_path / "ours")
    ours = HeadraceForCausalLM.from_pretrained(tmp_path / "ours", tie_word_embeddings=False).eval()
    ours.resize_token_embeddings(70)
    random(ours.lm_head)
    ours.config.eos_token_id = 69
    export_checkpoint(ours, "llama", tmp_path / "back")
    theirs, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval(), torch.randint(70, (2, 20))
    assert (theirs(ids).logits - ours(ids).logits).norm() < 1e-5 * ours(ids).logits.norm()
    assert theirs.config.eos_token_id == 69
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert not {"torch_dtype", "auto_map"} & written.keys(), "of the original folder"


@pytest.mark.parametrize("kind", ["default", "dynamic"])
def test_longest_sequence_after_training_is_written_unless_frequencies_depend_on_it(kind, checkpoint, tmp_path):
    _, path = checkpoint("llama")
    rope = {"rope_type": kind, "rope_theta": 1e4, **({"factor": 2.0} if kind == "dynamic" else {})}
    ours = import_checkpoint(rewrite(path, max_position_embeddings=64, rope_parameters=rope))
    ours.config.max_position_embeddings = 256
    export_checkpoint(ours, "llama", tmp_path / "back")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["max_position_embeddings"] == (256 if kind == "default" else 64)


def test_other_name_of_tied_weights_is_not_overlooked(tmp_path):
    save(described("lfm2"), tmp_path)
    ours = import_checkpoint(tmp_path)
    ours.config.converted_from["tie_embedding"], ours.config.tie_word_embeddings = True, False
    with pytest.raises(InputError, match="tie_word_embeddings is false here and true there"):
        export_checkpoint(ours, "lfm2", tmp_path / "back")


@torch.no_grad()
def test_offset_norms_keep_the_digits_of_bfloat16(checkpoint, tmp_path):
    """1 plus a weight near 0 would round to 1."""
    _, path = checkpoint("qwen3_next")
    retyped(path, lambda name, x: (x / 300).bfloat16() if "layernorm" in name else x.bfloat16())
    export_checkpoint(import_checkpoint(path), "qwen3_next", tmp_path / "back")
    before, after = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / "back"))
    assert all(torch.equal(before[name], after[name]) for name in before)


MISTAKES = {
    "several heads": ({"model_type": "zamba"}, "model_type='zamba', which is not converted, as it has Mamba layers"),
    "capped gates": ({"model_type": "xlstm"}, "as it has a cap on the logits of mLSTM's gates"),
    "the text of several streams": ({"model_type": "qwen4_exp_text"}, "as it has several residual streams"),
    "ours": ({"model_type": "headrace"}, "is one of headrace already; expected another, or --to FORMAT"),
    "another model": ({"model_type": "bloom"}, "model_type='bloom'; expected headrace or one of the"),
    "a bias": ({"attention_bias": True}, "has no tensor 'model.layers.0.self_attn.q_proj.bias'"),
    "scaled positions": (
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0}}, "has rope_parameters={"
    ),
    "other widths": ({"intermediate_size": 32}, "which does not fit"),
    "more layers": ({"num_hidden_layers": 3}, "has no tensor 'model.layers.2"),
    "no end": ({"rms_norm_eps": float("inf")}, "has rms_norm_eps=Infinity; expected at most 1.79"),
    "no layers": ({"num_hidden_layers": 0}, "has num_hidden_layers=0; expected at least 1"),
    "fewer layers": ({"num_hidden_layers": 1}, "has an unexpected tensor 'model.layers.1"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_user_errors_are_refused(checkpoint, mistake):
    _, path = checkpoint("llama")
    settings, sentence = MISTAKES[mistake]
    rewrite(path, **settings)
    assert sentence in refused(lambda: import_checkpoint(path))


@pytest.mark.parametrize(
    "mixer",
    [
        "gqa(bias=true, head_dim=12)", "transformer(rope.kind=yarn, rope.original=8, rope.factor=4, rope.slow=0.5)",
        "transformer(rope.kind=llama3, rope.original=8, rope.factor=4, rope.fast=4)",
        "transformer(rope.kind=dynamic, rope.original=2048, rope.factor=2)",
    ],
)  # fmt: skip
@torch.no_grad()
def test_our_softmax_attention_becomes_llama(mixer, tmp_path):
    ours = random(HeadraceForCausalLM(tiny.config(mixer)))
    export_checkpoint(ours, "llama", tmp_path)
    theirs, ids = AutoModelForCausalLM.from_pretrained(tmp_path), torch.randint(1, 20, (2, 30))
    expected = ours(ids).logits
    assert (theirs(ids).logits - expected).norm() / expected.norm() < 1e-5


def test_checkpoints_of_a_bare_model_with_masks_are_read(tmp_path):
    """As GPT-2 was released: without the name of the model in the names, and with causal masks among the tensors."""
    config = GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1)
    theirs = random(AutoModelForCausalLM.from_config(config))
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    for dtype in (torch.float32, torch.float64, torch.bool):
        masks = {f"h.{i}.attn.{name}": torch.ones(1).to(dtype) for i in range(2) for name in ("bias", "masked_bias")}
        save_file(bare | masks, tmp_path / "model.safetensors")
        ours, ids = import_checkpoint(tmp_path), torch.randint(61, (2, 30))
        assert ours.dtype is torch.float32  # of the weights alone
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-4)


def retyped(path, change):
    tensors = load_file(path / "model.safetensors")
    save_file({name: change(name, tensor).contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")


def test_mixed_precision_tensors_keep_their_values(checkpoint):
    """A layer's decay is kept in float32 by libraries that keep everything else in bfloat16; here in a piece of its
    own, the last."""
    _, path = checkpoint("mamba2")
    steps = {name: x for name, x in load_file(path / "model.safetensors").items() if name.endswith("dt_bias")}
    retyped(path, lambda name, x: x.bfloat16())
    in_pieces(path, lambda name: name in steps)
    save_file(steps, path / "part1.safetensors")
    result = {name: x for name, x in import_checkpoint(path).named_parameters() if name.endswith("dt_bias")}
    assert [x.tolist() for x in result.values()] == [steps[name].tolist() for name in sorted(steps)]


def test_precision_can_be_chosen(checkpoint, tmp_path, run_command):
    _, path = checkpoint("llama")
    assert import_checkpoint(path, torch.bfloat16).dtype is torch.bfloat16
    assert run_command("convert", path, "--output", tmp_path / "ours", "--dtype", "bfloat16").code == 0
    assert load(tmp_path / "ours").dtype is torch.bfloat16
    wrong = run_command("convert", path, "--output", tmp_path / "out", "--dtype", "half")
    assert wrong.code == 2 and "--dtype 'half'; expected one of float64, float32" in wrong.err


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_config_has_the_precision_of_the_model(checkpoint, dtype):
    """Which config.json may not say: here it says float32."""
    _, path = checkpoint("llama")
    retyped(path, lambda name, x: x.to(dtype))
    assert read_config(path).dtype is import_checkpoint(path).dtype is dtype
    (path / "model.safetensors").unlink()
    assert read_config(path).dtype is None


def test_config_has_the_constants_of_the_precision(tmp_path):
    """Gemma's factor of the embeddings is rounded to the dtype of the weights, which config.json may lack."""
    AutoModelForCausalLM.from_config(described("gemma")).bfloat16().save_pretrained(tmp_path)
    config = read_config(rewrite(tmp_path, without=["dtype"]))
    model = import_checkpoint(tmp_path)
    assert config.sizes == model.config.sizes
    sentence = refused(lambda: export_checkpoint(model.float(), "gemma", tmp_path / "back"))
    assert "expected model.to(torch.bfloat16)" in sentence
    export_checkpoint(model.bfloat16(), "gemma", tmp_path / "back")


TENSORS = {
    "which does not fit [32, 48]": lambda name, x: x.T if name.endswith("down_proj.weight") else x,
    "has dtype torch.int8; expected one of float64": lambda name, x: x.to(torch.int8),
}


@pytest.mark.parametrize("sentence", TENSORS)
def test_wrong_tensors_are_refused(checkpoint, sentence):
    _, path = checkpoint("llama")
    retyped(path, TENSORS[sentence])
    assert sentence in refused(lambda: import_checkpoint(path))


def test_pickled_weights_are_not_read(checkpoint):
    _, path = checkpoint("llama")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    assert "no model.safetensors.index.json; expected its weights in safetensors" in refused(lambda: load(path))


def test_no_model_type_is_not_taken_for_a_word(checkpoint):
    _, path = checkpoint("llama")
    ends = {"": "converted", ', "ssm_cfg": {}': "as state-spaces/mamba-130m-hf is for state-spaces/mamba-130m"}
    for fields, end in ends.items():
        (path / "config.json").write_text(f'{{"d_model": 32{fields}}}')
        sentence = refused(lambda: load(path))
        assert "has model_type=None; expected headrace or one of" in sentence and sentence.endswith(end)
    (path / "config.json").write_text("[]")
    assert "it is [], not an object" in refused(lambda: import_checkpoint(path))


OTHERS = ["transformer(count=2)", "gemma2", "mamba", "rwkv7", "softmax-rnn-norm", "residual-delta", "gpt", "jamba",
          "bigbird", "deltanet(inputs.conv=0)", "mamba2(heads.qk_groups=2)", "mamba2(heads.expand_v=1.5)"]  # fmt: skip


@pytest.mark.parametrize("mixer", OTHERS)
def test_formats_refuse_unsupported_models(tmp_path, mixer):
    """Nor does another error come of it."""
    config = tiny.config(mixer, mlp="none" if "mamba2" in mixer else None, intermediate_size=None)
    model = HeadraceForCausalLM(config)
    for form in FORMATS:
        with pytest.raises(InputError, match=f"--to '{form}' cannot represent this model"):
            export_checkpoint(model, form, tmp_path / form)


def test_a_layer_of_another_kind_is_named(checkpoint, tmp_path):
    _, path = checkpoint("llama")
    with pytest.raises(InputError, match="layer 0 has a mixer of type 'linear'; expected 'attention'"):
        export_checkpoint(linearize(import_checkpoint(path), "gla"), "llama", tmp_path / "back")


def test_unsupported_fields_are_named(tmp_path):
    for mixer, form, sentence in (
        ("softmax-gla", "gla", "no other library has its head competition"),
        ("gla", "retnet", "rotary is false here and true there"),
        ("gla", "delta_net", "in this format its config.json has conv_size=0; expected at least 2"),
        (["gla", "transformer"], "gla", "layer 1 has a mixer of type 'attention'; expected 'linear'"),
        ("rwkv6", "llama", "layer 0 has a mixer of type 'linear'; expected 'attention'"),
    ):
        with pytest.raises(InputError, match=f"--to '{form}' cannot represent this model: {sentence}"):
            export_checkpoint(HeadraceForCausalLM(tiny.config(mixer)), form, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="--to 't5' is unknown"):
        export_checkpoint(HeadraceForCausalLM(tiny.config("gla")), "t5", tmp_path / "out")


def in_pieces(path, second):
    """The checkpoint in two files; second(name): whether a tensor is in the second."""
    whole = load_file(path / "model.safetensors")
    weight_map = {name: f"part{int(second(name))}.safetensors" for name in whole}
    for part in set(weight_map.values()):
        save_file({name: x for name, x in whole.items() if weight_map[name] == part}, path / part)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_sharded_checkpoint_is_read(checkpoint):
    _, path = checkpoint("llama")
    expected = import_checkpoint(path)
    in_pieces(path, lambda name: name > "model.layers.0.self_attn")
    pairs = zip(import_checkpoint(path).parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_whole_file_counts_beside_an_index(checkpoint):
    """As in transformers, where a folder has a model and the pieces of an earlier one."""
    theirs, path = checkpoint("llama")
    in_pieces(path, lambda name: name > "model.layers.0.self_attn")
    random(theirs).save_pretrained(path.parent / "later")
    shutil.move(path.parent / "later" / "model.safetensors", path)
    read = AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(import_checkpoint(path).lm_head.weight, read.lm_head.weight)


def test_adapter_is_not_left_out(checkpoint, tmp_path):
    """transformers adds one that lies beside the weights."""
    _, path = checkpoint("llama")
    (path / "adapter_config.json").write_text("{}")
    for reads in (import_checkpoint, load):
        assert "has adapter_config.json; expected a folder written by merge" in refused(lambda reads=reads: reads(path))
    (path / "adapter_config.json").rename(tmp_path / "adapter_config.json")
    load(path).save_pretrained(ours := tmp_path / "ours")
    (tmp_path / "adapter_config.json").rename(ours / "adapter_config.json")
    for reads in (load, read_config, retrofit):  # retrofit failed in an assertion, and GGUF would have lost it
        assert "has adapter_config.json; expected a folder written by merge" in refused(lambda reads=reads: reads(ours))
    (ours / "adapter_config.json").rename(path / "adapter_config.json")
    (path / "config.json").unlink()
    assert "no config.json; expected a folder written by merge_and_unload()" in refused(lambda: load(path))


def test_settings_of_generation_may_be_in_the_config(checkpoint):
    """As in files of earlier versions of transformers."""
    _, path = checkpoint("llama")
    rewrite(path, repetition_penalty=1.7, eos_token_id=[5, 6])
    (path / "generation_config.json").unlink()
    settings = load(path).generation_config
    assert (settings.repetition_penalty, settings.eos_token_id, settings.use_cache) == (1.7, [5, 6], True)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_settings_of_generation_without_effect_are_kept(checkpoint, tmp_path, name):
    """As those of Vicuna, which transformers does not save in new settings: a temperature of a greedy search."""
    _, path = checkpoint("llama")
    (path / "generation_config.json").unlink()
    described = json.loads((path / name).read_text()) if (path / name).is_file() else {}
    (path / name).write_text(json.dumps(described | {"temperature": 0.9, "top_p": 0.6, "pad_token_id": -1}))
    import_checkpoint(path).save_pretrained(tmp_path / "ours")
    settings = load(tmp_path / "ours").generation_config
    assert (settings.temperature, settings.top_p, settings.do_sample) == (0.9, 0.6, None)


def test_foreign_folder_is_loaded_from_disk_or_the_hub(checkpoint, tmp_path, monkeypatch):
    """By its path, or by a name whose files are in the Hub's cache."""
    _, path = checkpoint("llama")
    (path / "generation_config.json").write_text(json.dumps({"top_k": 7}))
    expected = import_checkpoint(path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cached = tmp_path / "hub" / "models--someone--llama"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    shutil.copytree(path, cached / "snapshots" / ("0" * 40))
    for name in (path, str(path), "someone/llama"):
        model = load(name)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
        assert model.generation_config.top_k == 7
    with pytest.raises(InputError, match="'someone/else' is no folder here, and cannot be fetched"):
        load("someone/else")


def test_weights_are_fetched_once(monkeypatch, tmp_path):
    """Of Mistral-7B-Instruct-v0.3, which has them in a form of its own too."""
    names = ["config.json", "model-00001-of-00003.safetensors", "consolidated.safetensors", "onnx/model.safetensors",
             "tokenizer.model.v3", "tokenizer.model", "additional_chat_templates/tools.jinja"]  # fmt: skip
    fetching = []
    monkeypatch.setattr(
        "headrace.convert.checkpoint.snapshot_download",
        lambda name, **patterns: fetching.extend(filter_repo_objects(names, **patterns)) or tmp_path,
    )
    fetched("mistralai/Mistral-7B-Instruct-v0.3")
    assert fetching == [names[0], names[1], names[5], names[6]]


def test_tokenizer_and_generation_files_are_copied(checkpoint, tmp_path, run_command):
    """A tokenizer in any of its forms, and what ends a generation."""
    _, path = checkpoint("llama")
    beside = {"tokenizer.model": "a", "vocab.json": "b", "merges.txt": "c", "chat_template.jinja": "d"}
    beside |= {"generation_config.json": json.dumps({"eos_token_id": [5, 6], "temperature": 0.5, "do_sample": True})}
    for name, text in beside.items():
        (path / name).write_text(text)
    for arguments in (f"{path} --output {tmp_path}/ours", f"{tmp_path}/ours --output {tmp_path}/out --to llama"):
        assert run_command("convert", *arguments.split()).code == 0
    assert load(tmp_path / "ours").generation_config.eos_token_id == [5, 6]
    assert {name: (tmp_path / "out" / name).read_text() for name in beside} == beside


CL100K = _cl100k(r"\p{N}{1,3}")
# model_type, class in tokenizer_config.json, how the tokenizer splits a text
TOKENIZERS = {
    "another class than that of GPT-2": ("olmo2", {"tokenizer_class": "GPT2Tokenizer"}, CL100K),
    "no class": ("gpt2", {}, GPT2),
    "a class of its own": ("llama", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "!"}, CL100K),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizer_is_what_transformers_reads_beside_the_model(case, tmp_path, run_command):
    """Its class depends on model_type there."""
    kind, settings, split = TOKENIZERS[case]
    path, ours, back = tmp_path / "theirs", tmp_path / "ours", tmp_path / "back"
    save(described(kind), path)
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.ByteLevel()
    tokenizer.add_tokens(["12", "345"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "additional_chat_templates").mkdir()
    for name in ("chat_template", "additional_chat_templates/tools"):
        (path / f"{name}.jinja").write_text(name)
    for words in ((path, "--output", ours), (ours, "--output", back, "--to", kind)):
        assert run_command("convert", *words).code == 0
    theirs, *others = map(read_tokenizer, (path, ours, back))
    for each in others:
        assert each("It's 12345\n\n A").input_ids == theirs("It's 12345\n\n A").input_ids
        assert each.special_tokens_map == theirs.special_tokens_map and each.chat_template == theirs.chat_template
        pieces = each.backend_tokenizer.pre_tokenizer.pre_tokenize_str("I'M 12345")
        assert pieces == theirs.backend_tokenizer.pre_tokenizer.pre_tokenize_str("I'M 12345")


def test_unreadable_tokenizer_is_copied_with_a_note(checkpoint, tmp_path, run_command):
    _, path = checkpoint("llama")
    (path / "tokenizer.json").write_text("{")
    told = run_command("convert", path, "--output", tmp_path / "ours").err
    assert "Note: the files of the tokenizer are copied as they are" in told and "has no readable tokenizer" in told
    assert (tmp_path / "ours" / "tokenizer.json").read_text() == "{"


@pytest.mark.parametrize("name", ["llama", "mamba2", "qwen3_next"])
def test_converted_folder_generates_the_same_tokens_in_transformers(checkpoint, tmp_path, run_command, name):
    """By the settings that are written: Qwen3-Next of linear layers alone has no cache there, and ours has one."""
    _, path = checkpoint(name)
    back, steps = tmp_path / "back", ((path, "ours", ""), (tmp_path / "ours", "back", f"--to {name}"))
    for source, output, to in (*steps, (back, "again", "")):
        assert run_command(*f"convert {source} --output {tmp_path / output} {to}".split()).code == 0
    models = [load(tmp_path / "ours"), AutoModelForCausalLM.from_pretrained(back).eval(), load(tmp_path / "again")]
    ids = torch.randint(models[0].config.vocab_size, (1, 8))
    assert torch.isfinite(models[1](ids).logits).all()
    ours, theirs, again = (m.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0) for m in models)
    assert torch.equal(theirs, ours) and torch.equal(again, ours) and models[2].generation_config.use_cache is not False
