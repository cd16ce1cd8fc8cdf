"""What the server refuses: one sentence that names the field, in OpenAI's shape, and never a 500."""

import contextlib
import json
import re
import socket
import time
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import httpx
import openai
import pytest

from headrace.cli.use import ServeOptions
from headrace.serving import Limits, prefix, protocol, requests, routes, tokenizing
from served import ASCII, ENDLESS, TEMPLATE, connect, get, post, requests_of, save, serving, wait_for


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(save(tmp_path_factory.mktemp("model") / "tiny", ASCII)) as base:
        yield base


@pytest.fixture
def chat(tmp_path):
    with serving(save(tmp_path, 257, TEMPLATE)) as base:
        yield connect(base).chat.completions


@pytest.fixture(scope="module")
def complete(server):
    """Posts what may be no request of a completion."""
    return partial(post, f"{server}/v1/completions")


JSON = {"content-type": "application/json"}
# The body of a completion that is wrong: the sentence of the error, and the field that it names.
BODIES = {
    **dict.fromkeys(
        ("{bad", "[" * 20000, b'{"prompt": "\xff"}', '{"prompt": "\\ud800"}', '{"prompt": "a", "top_p": NaN}', "",
         f'{{"prompt": "a", "seed": {"9" * 5000}}}'),
        ("the body is not JSON", None),
    ),
    "[1]": ("the body=[1]", None),
    "{}": ("prompt: Field required", "prompt"),
    '{"prompt": null}': ("prompt: Field required", "prompt"),
    '{"prompt": []}': ("prompt=[]", "prompt"),
    '{"prompt": true}': ("prompt=True", "prompt"),
    '{"prompt": ""}': ("the prompt has no tokens; expected some text", "prompt"),
    '{"prompt": ["a", ""]}': ("the prompt has no tokens; expected some text", "prompt"),
    '{"prompt": "é"}': ("the model has 94", "prompt"),
    '{"prompt": [1, 94]}': ("the prompt has the token 94; the model has 94", "prompt"),
    '{"prompt": [-1]}': ("the prompt has the token -1; the model has 94", "prompt"),
    f'{{"prompt": [{10**30}]}}': ("the prompt has the token 1000", "prompt"),
    f'{{"prompt": [{10**4200}]}}': ("the prompt has the token 1000", "prompt"),
    json.dumps({"prompt": "a", "x" * 9999: 1}): ("x=1 is not available; leave it out", "x" * 40),
    json.dumps({"prompt": "a" * 65}): ("the prompt has 65 tokens; expected at most 64", "prompt"),
}  # fmt: skip
# A field beside a prompt, as its error shows it.
FIELDS = {
    "max_tokens=-1": -1, "max_tokens=0 without echo; expected at least 1": 0, "max_tokens=1e+30": 1e30,
    "max_tokens=1000": 10**30, "max_tokens=9999": 10**4200 - 1,
    f"max_tokens={ENDLESS + 1}; expected at most": ENDLESS + 1, "max_tokens=True": True, "top_p='1'": "1", "top_p=0": 0,
    "top_p=1.5": 1.5, "temperature=3": 3, "temperature=-1": -1, "temperature=1e-30; expected 0, or 0.01 to 2": 1e-30,
    "repetition_penalty=0: ": 0, "repetition_penalty=101: ": 101, "n=0": 0, "n=1000000": 10**6, "seed=184": 2**64,
    "stop.0='': ": "", "stop=['a', 'a'": ["a"] * 5, "stop.0='aaa": "a" * 1000, "stream='yes'": "yes",
    "stream_options=1": 1, "logprobs=6": 6, "logprobs=-1": -1, "logprobs=True": True, "echo=1": 1,
    "presence_penalty=1 is not available": 1, "best_of=2 is not available": 2, "top_k=5 is not available": 5,
}  # fmt: skip
NOWHERE = "POST /v1/completions/", "POST /v1/embeddings", "POST /v1/responses", "POST /load_model", "POST /reset"
ELSEWHERE = dict.fromkeys((*NOWHERE, "GET /docs"), 404) | {"GET /v1/completions": 405, "POST /v1/models": 405}


def refused(answer, status, sentence, param=None):
    assert answer.status_code == status and len(answer.content) < 500
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert sentence in error["message"] and error["param"] == param and "\n" not in error["message"]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: str(body)[:20])
def test_invalid_bodies_are_refused(complete, body):
    sentence, param = BODIES[body]
    refused(complete(content=body, headers=JSON), 400, sentence, param)


@pytest.mark.parametrize("sentence", FIELDS, ids=lambda sentence: sentence.partition(";")[0])
def test_invalid_fields_are_refused(complete, sentence):
    name = re.match(r"\w+", sentence)[0]
    refused(complete(json={"prompt": "a", name: FIELDS[sentence]}), 400, sentence, name)


@pytest.mark.parametrize("route", ELSEWHERE)
def test_other_routes_are_not_served(server, route):
    answer = httpx.request(*route.replace("/", f"{server}/", 1).split(), timeout=600, trust_env=False)
    refused(answer, ELSEWHERE[route], f"{route} is not served")
    assert ("allow" in answer.headers) == (answer.status_code == 405)


def test_wrong_content_types_and_sizes_are_refused(complete):
    refused(complete(data={"prompt": "a"}), 415, "the content-type is not application/json")
    refused(complete(json={"prompt": "a" * 10**7}), 413, "the body has more than")
    refused(complete(json={"prompt": "a", "model": "gpt" * 99}), 404, "is not served", "model")


def test_slow_body_times_out(server, monkeypatch):
    monkeypatch.setattr(routes, "BODY_SECONDS", 0.1)
    with contextlib.closing(HTTPConnection(server.removeprefix("http://"), timeout=300)) as slow:
        slow.request("POST", "/v1/completions", headers=JSON | {"content-length": "2"})
        answer = slow.getresponse()
        refused(httpx.Response(answer.status, content=answer.read()), 408, "the body did not arrive within 0.1 seconds")


def test_chat_without_a_template_is_refused(server):
    request = {"model": None, "messages": [{"role": "user", "content": "?"}]}
    with pytest.raises(openai.NotFoundError, match="has no chat template, so it answers no chats") as refusal:
        connect(server).chat.completions.create(**request)
    assert refusal.value.param == "model"


def test_more_texts_than_the_limit_are_refused(tmp_path):
    with serving(save(tmp_path, ASCII), requests=5) as base:
        ask = connect(base).completions.create
        assert len(ask(model=None, prompt=["a"] * 5, max_tokens=1).choices) == 5
        with pytest.raises(openai.BadRequestError, match="n=2 of 3 prompts are 6 texts; expected at most 5"):
            ask(model=None, prompt=["a"] * 3, n=2)
        with ask(model=None, prompt=["a"] * 4, max_tokens=ENDLESS, stream=True) as four:
            next(iter(four))
            assert ask(model=None, prompt="a", max_tokens=1).choices
            with pytest.raises(openai.RateLimitError, match="5 of 5 requests are open") as refusal:
                ask(model=None, prompt=["a", "b"], max_tokens=1)
            assert int(refusal.value.response.headers["retry-after"]) >= 1
            assert connect(base).models.list().data  # what does not generate is not refused
        wait_for(lambda: not requests_of(base))
        assert len(ask(model=None, prompt=["a"] * 5, max_tokens=1).choices) == 5


def test_server_checks_the_host_header(server):
    for route in ("/health", "/v1/models"):
        answer = get(f"{server}{route}", headers={"host": "evil.example"})
        refused(answer, 403, "the Host 'evil.example' is not known")


@pytest.fixture
def slow(server, monkeypatch):
    """A connection to a server that waits half a second for a header."""
    monkeypatch.setattr(protocol, "HEADER_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", int(server.rpartition(":")[2])), timeout=300) as connection:
        yield connection


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: loc"])
def test_incomplete_header_times_out(slow, sent):
    slow.sendall(sent)
    assert slow.recv(1) == b""  # the end; without a limit the recv would time out


def test_later_headers_time_out_and_bodies_may_take_longer(slow):
    body = b'{"prompt": "a", "max_tokens": 1}'
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
    time.sleep(1)
    slow.sendall(body)
    assert slow.recv(2**16).startswith(b"HTTP/1.1 200 OK")
    slow.sendall(b"GET /hea")
    while slow.recv(2**16):
        pass


@pytest.mark.parametrize("line", ["GET /health", "POST /nothing"])
def test_rest_of_an_answered_body_times_out(slow, line):
    """Its first byte ends uvicorn's own time limit."""
    slow.sendall(f"{line} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n".encode())
    assert slow.recv(2**16).startswith(b"HTTP/1.1 ")
    slow.sendall(b"1")
    while slow.recv(2**16):
        pass


def test_serving_page_lists_refused_and_ignored_fields():
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8").partition("\n## vLLM")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|$", page, re.MULTILINE))
    assert rows == {
        name: ", ".join(f"`{json.dumps(value)}`" for value in values) or "`null`"
        for name, values in requests.NEUTRAL.items()
    }
    ignored = re.search(r"without effect:\s(.*?)\.\s", page, re.DOTALL)[1]
    assert {*re.findall(r"`(\w+)`", ignored)} == requests.IGNORED
    for kind, path in ((requests.Completion, "/v1/completions"), (requests.Chat, "/v1/chat/completions")):
        fields = re.search(rf"^- `{path}`: (.*?)\.$", page, re.DOTALL | re.MULTILINE)[1]
        taken = {name for name in kind.model_fields if (kind, name) != (requests.Chat, "logprobs")}
        assert {*re.findall(r"`(\w+)`", fields)} == taken
    nulls = dict.fromkeys({*requests.Completion.model_fields, *requests.NEUTRAL, *requests.IGNORED} - {"prompt"})
    assert requests.Completion(prompt="a", **nulls) == requests.Completion(prompt="a")


def test_serving_page_has_the_limits_of_the_server():
    page = " ".join((Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8").split())
    limits, options = Limits(), ServeOptions(Path())
    of_the_command = (options.max_prompt_tokens, options.max_tokens, options.max_requests, options.prefix_cache)
    assert of_the_command == (limits.prompt, limits.tokens, limits.requests, f"{limits.prefix_cache // 10**6}MB")
    for sentence in (
        f"a header takes more than {protocol.HEADER_SECONDS} seconds,",
        f"if a body takes more than {routes.BODY_SECONDS} seconds,",
        f"reads nothing of an answer for {protocol.SEND_SECONDS} seconds.",
        f"If a request takes it more than {tokenizing.SECONDS} seconds, the process is ended",
        f"A prompt has at most {limits.prompt:,} tokens (`--max-prompt-tokens`),",
        f"an answer at most {limits.tokens:,} (`--max-tokens`). At most {limits.requests} requests are open",
        f"A prompt of more than {prefix.PIECE} tokens", f"default: {options.prefix_cache};",
    ):  # fmt: skip
        assert sentence in page, sentence


def test_invalid_chats_are_refused(chat):
    image = {"type": "image_url", "image_url": {"url": "a"}}
    mistakes = {
        r"messages=\[\]": [],
        "messages.0.role=1": [{"role": 1, "content": "a"}],
        "messages.0.content: Field required": [{"role": "user"}],
        "messages.0.content.0.type='image_url'": [{"role": "user", "content": [image]}],
        "tool_calls=.* is not available": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}],
        "annotations=.* is not available": [{"role": "assistant", "content": "a", "annotations": [{"type": "url"}]}],
        "the chat template refuses the messages: no judges": [{"role": "judge", "content": "?"}],
    }
    for sentence, messages in mistakes.items():
        with pytest.raises(openai.BadRequestError, match=sentence):
            chat.create(model=None, messages=messages)
    both = {"max_tokens": 5, "max_completion_tokens": 6}
    for sentence, options in {
        "logprobs=True": {"logprobs": True}, "max_tokens and max_completion_tokens are both given; expected": both,
        r"max_completion_tokens=\d+; expected at most": {"max_completion_tokens": ENDLESS + 1},
    }.items():  # fmt: skip
        with pytest.raises(openai.BadRequestError, match=sentence) as refusal:
            chat.create(model=None, messages=[{"role": "user", "content": "?"}], **options)
    assert refusal.value.param == "max_completion_tokens"
