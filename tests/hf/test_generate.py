"""The command `generate`: the tokens that its options ask for, and what is printed."""

import json
import re
import shutil
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import tiny
from headrace import InputError, load
from headrace.cli.generate import Printer
from headrace.cli.generate import generate as continued
from headrace.convert import import_checkpoint
from headrace.convert.checkpoint import load_on, read_tokenizer
from headrace.data.tokenizer import byte_level
from headrace.data.tokenizer import load as load_tokenizer
from headrace.hf import HeadraceForCausalLM, generation
from headrace.layers.quantized import QuantizedLinear

PROMPT, NEW, SEED = "Return", 24, 5
FIRST = 257  # the token that Llama's tokenizers add before a text
LLAMA = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48,
         "num_attention_heads": 4, "initializer_range": 0.5, "bos_token_id": FIRST, "eos_token_id": 256}  # fmt: skip


def with_first_token():
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", FIRST)])
    return tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model of 94 tokens, the bytes that are letters on their own; greedily it repeats a token soon."""
    return tiny.saved(tiny.build("softmax-gla", vocab_size=94), tmp_path_factory.mktemp("model"))


@pytest.fixture
def generate(checkpoint, succeeds):
    """What the command prints on standard output and standard error."""

    def run(*options, folder=checkpoint):
        done = succeeds("generate", folder, "--prompt", PROMPT, "--max-new-tokens", NEW, *options)
        return done.out, done.err.splitlines()[-1]

    return run


@cache
@torch.no_grad()
def sampled(folder, temperature=0.8, top_k=0, top_p=1.0, repetition_penalty=1.0):
    """New tokens by the definitions: CTRL's penalty on tokens that were there, temperature, the k likeliest tokens, and
    the fewest tokens whose probabilities sum to p."""
    torch.manual_seed(SEED)
    model, ids = load(folder), byte_level()(PROMPT).input_ids
    for _ in range(NEW):
        scores = model(torch.tensor([ids])).logits[0, -1].float()
        for token in {*ids}:
            scores[token] *= repetition_penalty if scores[token] < 0 else 1 / repetition_penalty
        if temperature == 0:
            ids.append(int(scores.argmax()))
            continue
        chances = (scores / temperature).softmax(0)
        order = chances.argsort(descending=True).tolist()
        kept = order[: top_k or None]
        sums = (chances[kept] / chances[kept].sum()).cumsum(0).tolist()
        kept = [token for token, before in zip(kept, [0.0, *sums], strict=False) if before < top_p]
        chances[[token for token in order if token not in kept]] = 0
        ids.append(int(torch.multinomial(chances, 1)))
    return ids[-NEW:]


OPTIONS = {
    "": {}, "--temperature 1.5": {"temperature": 1.5}, "--top-k 3": {"top_k": 3}, "--top-p 0.5": {"top_p": 0.5},
    "--repetition-penalty 1.7": {"repetition_penalty": 1.7},
    "--top-k 20 --top-p 0.8 --repetition-penalty 1.3": {"top_k": 20, "top_p": 0.8, "repetition_penalty": 1.3},
    "--temperature 0": {"temperature": 0},
    "--temperature 0 --repetition-penalty 1.7": {"temperature": 0, "repetition_penalty": 1.7},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_sampling_options_follow_their_definitions(generate, checkpoint, options):
    settings = OPTIONS[options]
    seed = [] if settings.get("temperature") == 0 else ["--seed", SEED]
    result = json.loads(generate("--json", *options.split(), *seed)[0])
    expected = sampled(checkpoint, **settings)
    assert result["tokens"] == expected and result["text"] == byte_level().decode(expected)
    if settings:
        assert expected != sampled(checkpoint)


def settings_of(checkpoint, folder, **settings):
    """The checkpoint in another folder, with these settings of generation."""
    shutil.copytree(checkpoint, folder)
    (folder / "generation_config.json").write_text(json.dumps(settings), "utf-8")
    return folder


def test_penalty_without_the_option_is_that_of_the_folder(generate, checkpoint, tmp_path):
    """As the server has it; the other options have the defaults of the command."""
    folder = settings_of(checkpoint, tmp_path / "own", repetition_penalty=1.7, temperature=0.1, top_k=1, top_p=0.1)
    for options, penalty in (((), 1.7), (("--repetition-penalty", 1), 1)):
        result = json.loads(generate("--json", "--seed", SEED, *options, folder=folder)[0])
        assert result["tokens"] == sampled(checkpoint, repetition_penalty=penalty)


@pytest.mark.parametrize("settings", [{"repetition_penalty": -1}, {"min_p": 2}, {"bad_words_ids": 3}], ids=str)
def test_settings_of_the_folder_that_cannot_be_used_are_one_sentence(checkpoint, refusal, tmp_path, settings):
    folder = settings_of(checkpoint, tmp_path / "own", **settings)
    said = refusal("generate", folder, "--prompt", PROMPT)
    assert f"generation_config.json of checkpoint '{folder}' cannot be used: `" in said


def test_printed_seed_reproduces_the_text(generate):
    text, last = generate()
    match = re.fullmatch(r"24 tokens, [\d.]+ tokens per second, by (.+) with \d+ threads?, seed (\d+)", last)
    assert match and text.startswith(PROMPT) and len(text) == len(PROMPT) + NEW + len("\n")
    engine, seed = match.groups()
    assert generate("--seed", seed)[0] == text
    assert generate()[0] != text  # a new seed
    result = json.loads(generate("--seed", seed, "--json")[0])
    assert PROMPT + result["text"] + "\n" == text and result["seed"] == int(seed) and result["engine"] == engine


def test_the_command_takes_the_short_loop(checkpoint, monkeypatch):
    """Although it gives `generate` the tokenizer, for the stop strings of the folder."""
    reasons, special = [], generation.special_reason
    monkeypatch.setattr(generation, "special_reason", lambda *given: reasons.append(special(*given)) or reasons[-1])
    continued(checkpoint, PROMPT, None, False, max_new_tokens=2, do_sample=False)
    assert reasons == [None]


@pytest.mark.parametrize("options", ["", "--prompt-lookup 3", "--temperature 0", "--temperature 0 --prompt-lookup 3"])
def test_logits_that_are_no_numbers_are_one_sentence(checkpoint, run_command, tmp_path, options):
    """On a line of its own, behind the prompt. Our loop does not print the token that they gave."""
    model = load(checkpoint)
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    tiny.saved(model, tmp_path)
    done = run_command("generate", tmp_path, "--prompt", PROMPT, *options.split())
    said = f"headrace: checkpoint '{tmp_path}' gives NaN or infinite logits; no token can be chosen\n"
    token = "!" if options.startswith("--temperature 0 --prompt") else ""  # of transformers' loop
    assert (done.code, done.out) == (2, f"{PROMPT}{token}\n") and done.err.endswith(said)


def test_printed_text_is_decoded_in_time_linear_in_its_length(monkeypatch, capsys):
    """Also without spaces, at which transformers' streamer forgets the tokens before."""
    tokenizer, sizes = byte_level(), []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **given: sizes.append(len(ids)) or decode(ids, **given))
    printer = Printer(tokenizer, stream=True, echo=True, threads=None)
    for text in ("it", *"äb" * 50):
        printer.put(torch.tensor(tokenizer(text).input_ids))
    printer.end()
    assert capsys.readouterr().out == "it" + "äb" * 50 + "\n" and max(sizes) <= 8


def test_the_new_text_follows_the_prompt_with_its_space(tmp_path):
    """A tokenizer such as Llama's drops a space at the start of a text, and the new tokens are no text of their own."""
    backend = Tokenizer(models.WordLevel({"▁it": 0, "▁was": 1, "▁a": 2}, unk_token="▁a"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tiny.saved(HeadraceForCausalLM(tiny.config("softmax-gla", vocab_size=3)), tmp_path, tokenizer)
    result = continued(tmp_path, "it was", None, False, max_new_tokens=5, do_sample=False)
    assert "it was" + result["text"] == tokenizer.decode([0, 1, *result["tokens"]])


def test_temperature_0_is_deterministic(generate):
    text, last = generate("--temperature", 0)
    assert "seed" not in last and generate("--temperature", 0)[0] == text
    assert json.loads(generate("--temperature", 0, "--json")[0])["seed"] is None


def test_converted_llama_uses_the_first_token_of_its_tokenizer(generate, tmp_path):
    """Its tokenizer adds a first token, as for transformers and for lm-evaluation-harness."""
    theirs = LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()
    tokenizer = with_first_token()
    tiny.saved(theirs, tmp_path / "llama", tokenizer)
    tiny.saved(import_checkpoint(tmp_path / "llama"), tmp_path / "ours", tokenizer)
    text = generate("--temperature", 0, folder=tmp_path / "ours")[0]
    result = json.loads(generate("--temperature", 0, "--json", folder=tmp_path / "ours")[0])
    ids = torch.tensor([[FIRST, *byte_level()(PROMPT).input_ids]])
    expected = theirs.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert result["tokens"] == expected.tolist() and text == PROMPT + result["text"] + "\n"
    evaluated = pytest.importorskip("lm_eval.models.huggingface").HFLM(pretrained=theirs, tokenizer=tokenizer)
    assert evaluated.tok_encode(PROMPT) == ids[0].tolist()


def test_tokenizer_of_another_model_is_refused(checkpoint):
    with pytest.raises(InputError, match="the prompt has the token 220; the model has 94: its tokenizer is another"):
        continued(checkpoint, "a b", None, False)


def test_tokenizer_of_prepared_data_adds_no_prompt_tokens(tmp_path):
    """The rows of the data have none, so a model that is trained on them has never seen it."""
    with_first_token().save_pretrained(tmp_path / "theirs")
    load_tokenizer(str(tmp_path / "theirs")).save_pretrained(tmp_path / "ours")
    theirs, ours = (read_tokenizer(tmp_path / name)(PROMPT).input_ids for name in ("theirs", "ours"))
    assert theirs == [FIRST, *ours] and ours == byte_level()(PROMPT).input_ids


def test_printed_rate_counts_new_tokens(checkpoint, monkeypatch):
    clock = iter((10.0, 14.0))
    monkeypatch.setattr("headrace.cli.generate.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    result = continued(checkpoint, PROMPT, None, False, max_new_tokens=NEW, do_sample=False)
    assert result["tokens_per_second"] == NEW / 4 == len(result["tokens"]) / 4


def test_proposed_tokens_do_not_change_the_text(generate, checkpoint):
    plain, _ = generate("--temperature", 0)
    for proposed in (("--draft", checkpoint), ("--prompt-lookup", 3)):
        text, speed = generate("--temperature", 0, *proposed)
        assert text == plain and re.search(r", \d+% of the proposed tokens accepted, \d+\.\d tokens a pass$", speed)
        result = json.loads(generate("--temperature", 0, "--json", *proposed)[0])
        assert 0 <= result["accepted"] <= 1 and result["tokens_per_pass"] >= 1
    assert result["accepted"] > 0


def test_weights_are_also_those_of_the_draft(checkpoint, monkeypatch):
    read = []
    monkeypatch.setattr("headrace.cli.generate.load_on", lambda *given: read.append(load_on(*given)) or read[-1])
    continued(checkpoint, PROMPT, None, False, draft=checkpoint, weights="int8", max_new_tokens=2, do_sample=False)
    assert [any(isinstance(part, QuantizedLinear) for part in model.modules()) for model in read] == [True, True]


SEARCHES = {
    "beams": {"num_beams": 4, "num_return_sequences": 3},
    "library": {"penalty_alpha": 0.6, "dola_layers": "low", "force_words_ids": [[1]]},
    "results": {"token_healing": True, "is_assistant": True, "return_dict_in_generate": True},
}


@pytest.mark.parametrize("name", SEARCHES)
def test_one_text_is_generated_whatever_search_a_folder_asks_for(checkpoint, succeeds, tmp_path, name):
    """Its other settings hold, as a string at which the text ends."""
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    settings = folder / "generation_config.json"
    whole = continued(folder, PROMPT, None, False, max_new_tokens=9, do_sample=False)["text"]
    stop = {"stop_strings": [whole[4:6]]}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | SEARCHES[name] | stop))
    for more in ((), ("--json",)):
        _, out, error = succeeds("generate", folder, "--prompt", PROMPT, "--temperature", 0, *more)
        text = json.loads(out)["text"] if more else out.removeprefix(PROMPT).removesuffix("\n")
        assert text == whole[: whole.find(whole[4:6]) + 2]
        assert all(f"{field}={json.dumps(value)}" in error for field, value in SEARCHES[name].items())
        assert "not used" in error


def test_draft_with_another_vocabulary_is_refused(checkpoint, refusal, tmp_path):
    tiny.saved(HeadraceForCausalLM(tiny.config("gla", vocab_size=95)), tmp_path)
    said = refusal("generate", checkpoint, "--prompt", PROMPT, "--draft", tmp_path)
    assert f"--draft '{tmp_path}' has 95 tokens; expected 94, those of the model" in said
