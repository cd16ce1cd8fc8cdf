"""The server: right answers to many at once, one sentence to whoever asks wrongly."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("uvicorn", reason="the extra [serve] is not installed")

import httpx2
import uvicorn

import tiny
from headrace.data.tokenizer import byte_level
from headrace.errors import InputError
from headrace.generate import generate
from headrace.hf import HeadraceForCausalLM
from headrace.serve import application

PROMPTS = [f"question{i}:" for i in range(50)]
ASCII = 94  # tokens; beyond them a random model writes bytes that are no text
NEW = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder, tokens = tmp_path_factory.mktemp("model") / "tiny", byte_level()
    tiny.trained(HeadraceForCausalLM(tiny.config("softmax-gla", vocab_size=ASCII))).float().save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(checkpoint):
    server = uvicorn.Server(uvicorn.Config(application(checkpoint, longest=64), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    # No proxy of the environment's stands between, and fifty at once on a busy machine wait for each other.
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=600, trust_env=False) as client:
        yield client
    server.should_exit = True
    thread.join()


def greedy(checkpoint, prompt):
    return generate(checkpoint, prompt, None, False, max_new_tokens=NEW, do_sample=False)["text"]


def asked(checkpoint, **changes):
    return {"model": str(checkpoint), "max_tokens": NEW, "temperature": 0} | changes


def streamed(server, checkpoint, prompt):
    pieces = []
    with server.stream("POST", "/completions", json=asked(checkpoint, prompt=prompt, stream=True)) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"] or "")
    return "".join(pieces)


def test_fifty_at_once_get_what_each_would_alone(server, checkpoint):
    with ThreadPoolExecutor(len(PROMPTS)) as many:
        answers = [*many.map(lambda prompt: streamed(server, checkpoint, prompt), PROMPTS)]
    assert answers == [greedy(checkpoint, prompt) for prompt in PROMPTS]
    assert len({*answers}) > 1


def test_without_a_stream(server, checkpoint):
    answer = server.post("/completions", json=asked(checkpoint, prompt="question7:")).json()
    assert answer["choices"][0]["text"] == greedy(checkpoint, "question7:")
    assert answer["usage"]["completion_tokens"] == NEW


MISTAKES = {
    "malformed JSON": ("/completions", {"content": "{bad", "headers": {"content-type": "application/json"}}, "JSON"),
    "another model": ("/completions", {"json": {"model": "gpt-9", "prompt": "a"}}, "requested 'gpt-9'"),
    "too long a prompt": ("/completions", {"json": {"prompt": "a" * 65}}, "has 65 tokens; expected at most 64"),
    "no prompt": ("/completions", {"json": {"prompt": ""}}, "the prompt has no tokens"),
    "no text": ("/completions", {"json": {"prompt": [1, 2]}}, "prompt must be a string"),
    "a chat": ("/chat/completions", {"json": {"messages": [{"role": "user", "content": "?"}]}}, "no chat template"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(server, checkpoint, mistake):
    where, request, sentence = MISTAKES[mistake]
    answer = server.post(where, **request)
    assert 400 <= answer.status_code < 500 and sentence in answer.text
    assert server.post("/completions", json=asked(checkpoint, prompt="still_there?")).status_code == 200


def test_what_cannot_be_served_is_said_before(tmp_path):
    with pytest.raises(InputError, match=r"has no config\.json"):
        application(tmp_path, longest=10)
