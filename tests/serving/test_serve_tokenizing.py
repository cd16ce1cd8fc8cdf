"""Tokenizers and chat templates that panic or do not end: the request gets an error, the others are answered."""

import json
import os
import shutil
import signal
import threading

import openai
import pytest

from groups import command
from headrace.cli.generate import generate
from headrace.serving import tokenizing
from served import ASCII, connect, requests_of, save, serving, started, wait_for

LOOP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
TEMPLATE = (
    "{% if messages[0].content == 'loop' %}" + LOOP + "{% elif messages[0].content == 'power' %}"
    "{{ (messages | length + 6) ** (10 ** 8) }}{% elif messages[0].content == 'zero' %}{{ 1 // 0 }}"
    "{% else %}ok{% endif %}"
)  # fmt: skip


def chat(base, content):
    messages = [{"role": "user", "content": content}]
    return connect(base).chat.completions.create(model=None, messages=messages, max_tokens=1)


def changed_tokenizer(checkpoint, folder, **fields):
    folder = shutil.copytree(checkpoint, folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model") / "tiny", ASCII, TEMPLATE)


def test_template_that_does_not_end_is_ended(checkpoint, monkeypatch):
    with serving(checkpoint) as base:
        for content in ("loop", "power"):
            monkeypatch.setattr(tokenizing, "SECONDS", 1)
            with pytest.raises(openai.InternalServerError, match="was ended; it may take at most 1 seconds"):
                chat(base, content)
            monkeypatch.setattr(tokenizing, "SECONDS", 600)
            assert chat(base, "hello").choices
        with pytest.raises(openai.InternalServerError, match="the server failed with ZeroDivisionError"):
            chat(base, "zero")


@pytest.mark.slow
def test_signal_ends_the_server_while_a_template_does_not_end(checkpoint, tmp_path):
    server = command(tmp_path, "serve", checkpoint, "--port", 0)
    base = started(server, tmp_path)

    def ask():
        with pytest.raises(openai.APIError):
            chat(base, "power")

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: requests_of(base))
    os.kill(server.pid, signal.SIGTERM)
    server.join(300)
    assert server.exitcode == 143 and "Traceback" not in (tmp_path / "err").read_text()
    asking.join()


def test_panic_of_a_tokenizer_is_the_error_of_its_request(checkpoint, tmp_path):
    """A regular expression that tries more ways than its library permits."""
    normalizer = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}
    with serving(changed_tokenizer(checkpoint, tmp_path / "model", normalizer=normalizer)) as base:
        ask = connect(base).completions.create
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="the server failed with PanicException"):
                ask(model=None, prompt="a" * 40 + "!", max_tokens=1)
            assert ask(model=None, prompt="b", max_tokens=1).choices


def test_panic_of_a_decoder_is_the_error_of_its_request(checkpoint, tmp_path):
    """In the thread that generates, for a token that the model writes; and beside it, for one of a prompt."""
    text = generate(checkpoint, "b", None, False, max_new_tokens=16, do_sample=False)["text"]
    written = next(c for c in text[1:] if c not in "It was" and c != text[0])
    decoder = {"type": "Strip", "content": written, "start": 1000, "stop": 1000}
    with serving(changed_tokenizer(checkpoint, tmp_path / "model", decoder=decoder)) as base:
        ask = connect(base).completions.create
        for prompt, tokens in (("b", 16), (written, 1)) * 2:
            with pytest.raises(openai.InternalServerError, match="the server failed with RuntimeError"):
                ask(model=None, prompt=prompt, max_tokens=tokens, temperature=0)
            assert ask(model=None, prompt="b", max_tokens=1, temperature=0).choices
