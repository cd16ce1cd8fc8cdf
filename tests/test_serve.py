"""The server: right answers to many at once, one sentence to whoever asks wrongly, and no work for clients that are gone."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

pytest.importorskip("uvicorn", reason="the extra [serve] is not installed")
pytest.importorskip("openai", reason="the extra [dev] is not installed")

import httpx
import openai
import torch
import uvicorn

import tiny
from headrace.data.tokenizer import byte_level
from headrace.errors import InputError
from headrace.generate import generate, sampling_settings
from headrace.hf import HeadraceForCausalLM
from headrace.serving import Limits, application
from headrace.serving.engine import Text

PROMPTS = [f"question{i}:" for i in range(50)]
ASCII = 94  # tokens; beyond them a random model writes bytes that are no text
NEW = 8
ENDLESS = 10**6  # tokens, which take many minutes: a test that ends did not wait for them
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'judge' %}{{ raise_exception('no judges') }}{% endif %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def save(folder, vocab_size, template=None, mixer="softmax-gla", **changes):
    model = tiny.trained(HeadraceForCausalLM(tiny.config(mixer, vocab_size=vocab_size, **changes)))
    tokenizer = byte_level()
    tokenizer.chat_template = template
    model.float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model") / "tiny", ASCII)


@contextmanager
def serving(checkpoint, **limits):
    """The base of the URLs of a server in a thread."""
    app = application(checkpoint, Limits(**{"prompt": 64, "tokens": ENDLESS, **limits}))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.05)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def server(checkpoint):
    with serving(checkpoint) as base:
        yield base


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A client of a model of all bytes, with a chat template."""
    with serving(save(tmp_path_factory.mktemp("model") / "chat", 257, TEMPLATE)) as base:
        yield connect(base)


def connect(base):
    # Fifty at once on a busy machine wait for each other.
    return openai.OpenAI(base_url=f"{base}/v1", api_key="none", timeout=600, max_retries=0)


@pytest.fixture(scope="module")
def client(server):
    return connect(server)


@pytest.fixture
def post(server):
    def post(path, **request):
        return httpx.post(f"{server}{path}", timeout=600, trust_env=False, **request)

    return post


def greedy(checkpoint, prompt):
    return generate(checkpoint, prompt, None, False, max_new_tokens=NEW, do_sample=False)["text"]


def ask(client, prompt, **changes):
    model = client.models.list().data[0].id
    return client.completions.create(
        **{"model": model, "prompt": prompt, "max_tokens": NEW, "temperature": 0} | changes
    )


def text_of(stream):
    return "".join(chunk.choices[0].text for chunk in stream)


def test_fifty_at_once_get_what_each_would_alone(client, checkpoint):
    with ThreadPoolExecutor(len(PROMPTS)) as many:
        answers = [*many.map(lambda prompt: text_of(ask(client, prompt, stream=True)), PROMPTS)]
    assert answers == [greedy(checkpoint, prompt) for prompt in PROMPTS]
    assert len({*answers}) > 1


def test_without_a_stream(client, checkpoint):
    answer = ask(client, "question7:")
    assert answer.choices[0].text == greedy(checkpoint, "question7:")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == NEW and answer.usage.prompt_tokens == len("question7:")


def test_the_models(client, checkpoint):
    (model,) = client.models.list().data
    assert model.id == str(checkpoint) and client.models.retrieve(model.id) == model


def test_usage_of_a_stream(client):
    *pieces, last = ask(client, "question7:", stream=True, stream_options={"include_usage": True})
    assert [piece.choices[0].finish_reason for piece in pieces][-1] == "length"
    assert last.choices == [] and last.usage.completion_tokens == NEW and last.usage.total_tokens == NEW + 10


def test_several_prompts_of_text_and_tokens_with_several_choices(client, checkpoint):
    tokens = byte_level()("question1:").input_ids
    answer = ask(client, ["question0:", "question2:"], n=2)
    assert [choice.text for choice in answer.choices] == [greedy(checkpoint, f"question{i}:") for i in (0, 0, 2, 2)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.completion_tokens == 4 * NEW
    assert ask(client, tokens).choices[0].text == greedy(checkpoint, "question1:")
    drawn = ask(client, "question1:", n=2, temperature=1, seed=1, max_tokens=32).choices
    assert drawn[0].text != drawn[1].text


def test_sampling_is_that_of_generate(client, checkpoint):
    answer = ask(client, "question7:", temperature=0.7, top_p=0.9, seed=5)
    expected = generate(checkpoint, "question7:", 5, False, **sampling_settings(NEW, 0.7, 0.9, 0, 1.0))
    assert answer.choices[0].text == expected["text"]


def test_a_seed_gives_the_same_text_whatever_else_draws(client):
    ended = threading.Event()

    def draw():
        while not ended.is_set():
            torch.rand(10)

    sampled = {"temperature": 1, "max_tokens": 32}
    other = threading.Thread(target=draw)
    other.start()
    try:
        with ThreadPoolExecutor(8) as many:
            seeds = [5, None, 5, 6, 5, None, 5, 6]
            answers = many.map(lambda seed: ask(client, "a", **sampled, seed=seed).choices[0].text, seeds)
            texts = [*zip(seeds, answers, strict=True)]
    finally:
        ended.set()
        other.join()
    assert len({text for seed, text in texts if seed == 5}) == 1
    assert len({text for seed, text in texts}) == 4


def test_a_stop_string_is_cut_off_in_a_stream_too(client, checkpoint):
    whole = greedy(checkpoint, "question7:")
    stop = whole[3:5]
    assert whole.find(stop) > 0
    answer = ask(client, "question7:", stop=[stop, "never in there"])
    assert answer.choices[0].text == whole[: whole.find(stop)] and answer.choices[0].finish_reason == "stop"
    assert text_of(ask(client, "question7:", stop=stop, stream=True)) == answer.choices[0].text


def test_chats(chat):
    model = chat.models.list().data[0].id
    asked = {"model": model, "messages": [{"role": "user", "content": "who?"}], "temperature": 0}
    answer = chat.chat.completions.create(**asked, max_tokens=NEW)
    text = answer.choices[0].message.content
    assert text == ask(chat, "user:who?;assistant:").choices[0].text and answer.object == "chat.completion"
    chunks = [*chat.chat.completions.create(**asked, max_completion_tokens=NEW, stream=True)]
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == text
    assert [chunk.choices[0].delta.role for chunk in chunks][:1] == ["assistant"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "who?"}]}]
    assert (
        chat.chat.completions.create(**asked | {"messages": parts}, max_tokens=NEW).choices[0].message.content == text
    )
    again = [*asked["messages"], answer.choices[0].message.model_dump(), *asked["messages"]]
    assert chat.chat.completions.create(**asked | {"messages": again[:1]}, max_tokens=1).usage.completion_tokens == 1
    assert chat.chat.completions.create(**asked | {"messages": again}, max_tokens=1, user="me").usage.prompt_tokens < 64
    with pytest.raises(openai.BadRequestError, match="no judges"):
        chat.chat.completions.create(**asked | {"messages": [{"role": "judge", "content": "?"}]})


def test_what_is_streamed_are_whole_characters(chat):
    for seed in range(3):
        asked = {"temperature": 1, "seed": seed, "max_tokens": 200}
        assert text_of(ask(chat, "a", **asked, stream=True)) == ask(chat, "a", **asked).choices[0].text


@pytest.mark.parametrize("text", ["añb–c🙂🙂", "一二三", "", " a  b\n\n c ", "\ufffd", "é"])
def test_text_of_tokens_is_that_of_all_of_them(text):
    tokenizer = byte_level()
    pieces = Text(tokenizer, ())
    given = [pieces.add(token) for token in tokenizer(text).input_ids]
    assert "".join(given) + pieces.rest() == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in given)


def test_text_of_bytes_that_are_no_text():
    tokenizer = byte_level()
    for _ in range(50):
        tokens = torch.randint(257, (60,)).tolist()
        pieces = Text(tokenizer, ())
        text = "".join([*map(pieces.add, tokens), pieces.rest()])
        assert text == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize(
    "text, stop, expected",
    [("one two", ("two",), "one "), ("aab", ("ab",), "a"), ("abab", ("abc",), "abab"), ("xyz", ("z", "yz"), "x")],
)
def test_stop_strings_that_come_in_pieces(text, stop, expected):
    tokenizer = byte_level()
    pieces = Text(tokenizer, stop)
    given = ""
    for token in tokenizer(text).input_ids:
        given += pieces.add(token)
        assert expected.startswith(given)
        if pieces.stopped:
            break
    assert given + pieces.rest() == expected and pieces.stopped == (expected != text)


# The body of a completion that is wrong: the sentence of the error, and the field that it names.
BODIES = {
    "{bad": ("the body is no JSON", None),
    "[" * 20000: ("the body is no JSON", None),
    b'{"prompt": "\xff"}': ("the body is no JSON", None),
    '{"prompt": "\\ud800"}': ("the body is no JSON", None),
    '{"prompt": "a", "top_p": NaN}': ("the body is no JSON", None),
    "": ("the body is no JSON", None),
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
    json.dumps({"prompt": "a" * 65}): ("the prompt has 65 tokens; expected at most 64", "prompt"),
}
# A field beside a prompt, as its error shows it.
FIELDS = {
    "max_tokens=-1": -1,
    "max_tokens=0": 0,
    "max_tokens=1e+30": 1e30,
    "max_tokens=1000": 10**30,
    f"max_tokens={ENDLESS + 1}; expected at most": ENDLESS + 1,
    "max_tokens=True": True,
    "top_p='1'": "1",
    "top_p=0": 0,
    "top_p=1.5": 1.5,
    "temperature=3": 3,
    "temperature=-1": -1,
    "temperature=1e-30; expected 0, or 0.01 to 2": 1e-30,
    "n=0": 0,
    "n=1000000": 10**6,
    "seed=184": 2**64,
    "stop.0='': ": "",
    "stop=['a', 'a'": ["a"] * 5,
    "stop.0='aaa": "a" * 1000,
    "stream='yes'": "yes",
    "stream_options=1": 1,
    "logprobs=0 is not available; leave it out": 0,
    "presence_penalty=1 is not available": 1,
    "echo=True is not available": True,
    "best_of=2 is not available": 2,
    "top_k=5 is not available": 5,
}
ELSEWHERE = {
    "POST /v1/chat/completions": 404,
    "POST /v1/completions/": 404,
    "POST /v1/embeddings": 404,
    "POST /v1/responses": 404,
    "POST /load_model": 404,
    "POST /reset": 404,
    "GET /docs": 404,
    "GET /v1/completions": 405,
    "POST /v1/models": 405,
}


def refused(answer, status, sentence, param=None):
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert sentence in error["message"] and error["param"] == param and "\n" not in error["message"]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: str(body)[:20])
def test_bodies_that_are_refused(post, body):
    sentence, param = BODIES[body]
    refused(post("/v1/completions", content=body, headers={"content-type": "application/json"}), 400, sentence, param)


@pytest.mark.parametrize("sentence", FIELDS, ids=lambda sentence: sentence.partition(";")[0])
def test_fields_that_are_refused(post, sentence):
    name = re.match(r"\w+", sentence)[0]
    refused(post("/v1/completions", json={"prompt": "a", name: FIELDS[sentence]}), 400, sentence, name)


@pytest.mark.parametrize("route", ELSEWHERE)
def test_nothing_else_is_served(server, route):
    answer = httpx.request(*route.replace("/", f"{server}/", 1).split(), timeout=600, trust_env=False)
    refused(answer, ELSEWHERE[route], f"{route} is not served")
    assert ("allow" in answer.headers) == (answer.status_code == 405)


def test_what_is_no_prompt_at_all(post):
    refused(post("/v1/completions", data={"prompt": "a"}), 415, "the content-type is not application/json")
    refused(post("/v1/completions", json={"prompt": "a" * 10**7}), 413, "the body has more than")
    refused(
        post("/v1/completions", json={"prompt": "a", "model": "gpt-9"}), 404, "model='gpt-9' is not served", "model"
    )


def test_mistakes_in_chats(chat):
    messages = {
        "messages.0.content": [{"role": "user"}],
        "messages=[]": [],
        "messages.0.role=1": [{"role": 1, "content": "a"}],
        "messages.0.content": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],  # noqa: F601
        "tool_calls=": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}],
    }
    for sentence, wrong in messages.items():
        with pytest.raises(openai.BadRequestError, match=sentence.replace("[", r"\[")):
            chat.chat.completions.create(model=chat.models.list().data[0].id, messages=wrong)


def test_the_errors_of_the_client(client):
    with pytest.raises(openai.BadRequestError) as wrong:
        ask(client, "a", temperature=3)
    assert wrong.value.param == "temperature" and wrong.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as wrong:
        ask(client, "a", model="gpt-9")
    assert wrong.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_fields_that_change_nothing_are_taken(client, checkpoint):
    neutral = {"user": "me", "echo": False, "best_of": 1, "logit_bias": {}, "presence_penalty": 0, "seed": None}
    assert ask(client, "question7:", **neutral).choices[0].text == greedy(checkpoint, "question7:")


def test_no_web_page_may_read_or_ask(server):
    asked = httpx.options(
        f"{server}/v1/completions",
        headers={"origin": "http://evil.example", "access-control-request-method": "POST"},
        trust_env=False,
    )
    assert asked.status_code == 405 and not [name for name in asked.headers if name.startswith("access-control")]


def until_free(base):
    while httpx.get(f"{base}/health", timeout=600, trust_env=False).json()["requests"]:
        time.sleep(0.02)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_goes_away_ends_its_generation(server, client, checkpoint, streamed):
    asked = {"prompt": "a", "max_tokens": ENDLESS, "temperature": 0, "stream": streamed}
    with socket.create_connection(("127.0.0.1", int(server.rpartition(":")[2]))) as gone:
        body = json.dumps(asked).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        gone.sendall(head.encode() + b"\r\n\r\n" + body)
        while not httpx.get(f"{server}/health", timeout=600, trust_env=False).json()["requests"]:
            time.sleep(0.02)
        if streamed:
            assert gone.recv(15) == b"HTTP/1.1 200 OK"
    until_free(server)
    assert ask(client, "question7:").choices[0].text == greedy(checkpoint, "question7:")


def test_fifty_clients_that_go_away(server, client, checkpoint):
    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", timeout=600, max_retries=0) as many:

            async def one():
                async with await many.completions.create(model=str(checkpoint), prompt="a", stream=True) as stream:
                    async for _ in stream:
                        return

            tasks = [
                asyncio.create_task(one() if i % 2 else many.completions.create(model=str(checkpoint), prompt="a"))
                for i in range(50)
            ]
            await asyncio.sleep(0.2)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(all_of_them())
    until_free(server)
    assert ask(client, "question7:").choices[0].text == greedy(checkpoint, "question7:")


def test_more_than_may_wait_are_told_to_come_again(checkpoint):
    with serving(checkpoint, waiting=1) as base:
        client = connect(base)
        with ask(client, "a", stream=True, max_tokens=ENDLESS) as first:
            next(iter(first))
            with ThreadPoolExecutor(1) as other:
                waits = other.submit(ask, client, "question7:")
                while httpx.get(f"{base}/health", timeout=600, trust_env=False).json()["requests"] < 2:
                    time.sleep(0.02)
                with pytest.raises(openai.RateLimitError) as refused:
                    ask(client, "a")
                assert int(refused.value.response.headers["retry-after"]) >= 1
                assert client.models.list().data  # whoever does not generate does not wait
                first.close()
                assert waits.result().choices[0].text == greedy(checkpoint, "question7:")


def test_a_failure_is_an_error_of_the_server(checkpoint, monkeypatch):
    def fails(*_, **__):
        raise OSError("a disk")

    with serving(checkpoint) as base:
        monkeypatch.setattr(HeadraceForCausalLM, "generate", fails)
        with pytest.raises(openai.InternalServerError, match="failed with OSError"):
            ask(connect(base), "a")


def test_what_the_model_cannot_do_is_the_fault_of_the_request(tmp_path):
    gpt = save(tmp_path, ASCII, mixer="gpt", max_position_embeddings=16)
    with serving(gpt) as base, pytest.raises(openai.BadRequestError, match="16"):
        ask(connect(base), "a" * 20)


def test_what_cannot_be_served_is_said_before(tmp_path):
    with pytest.raises(InputError, match=r"has no config\.json"):
        application(tmp_path)


def start(*arguments):
    command = [sys.executable, "-c", "from headrace.cli import main; main()", "serve", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "number, code, word", [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_ends_it_while_it_generates(checkpoint, number, code, word):
    server = start(checkpoint, "--port", 0, "--tokens", ENDLESS)
    base = server.stdout.readline().split()[-1]
    with ask(connect(base.removesuffix("/v1")), "a", stream=True, max_tokens=ENDLESS) as stream:
        next(iter(stream))
        server.send_signal(number)
        with pytest.raises(openai.APIConnectionError):
            list(stream)
    said = server.communicate()[1]
    assert server.returncode == code and f"{word}: the server has ended" in said and "Traceback" not in said


def test_an_address_that_cannot_be_had(checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wrong = {("--port", port): "in use", ("--port", 70000): "0-65535", ("--host", "no.invalid"): "no.invalid"}
        for options, reason in wrong.items():
            server = start(checkpoint, *options)
            out, said = server.communicate()
            assert server.returncode == 2 and out == "" and said.count("\n") == 1 and reason in said, said
