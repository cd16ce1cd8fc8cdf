"""The server: right answers to many at once, no work for who has gone."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import openai
import pytest
import torch
import uvicorn

from groups import command
from headrace import InputError, load
from headrace.cli.generate import generate
from headrace.data.tokenizer import byte_level
from headrace.hf import HeadraceForCausalLM, generation
from headrace.serving import Limits, application, listening, protocol, routes, serve, settings
from served import ASCII, ENDLESS, NEW, TEMPLATE, ask, connect, post, requests_of, save, serving, started, wait_for

PROMPTS = [f"question{i}:" for i in range(50)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model") / "tiny", ASCII)


@pytest.fixture(scope="module")
def server(checkpoint):
    with serving(checkpoint) as base:
        yield base


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A client of a model of all bytes, with a chat template."""
    with serving(save(tmp_path_factory.mktemp("model") / "chat", 257, TEMPLATE)) as base:
        yield connect(base)


@pytest.fixture(scope="module")
def client(server):
    return connect(server)


def greedy(checkpoint, prompt):
    return generate(checkpoint, prompt, None, False, max_new_tokens=NEW, do_sample=False)["text"]


def text_of(stream):
    return "".join(chunk.choices[0].text for chunk in stream)


def test_fifty_concurrent_requests_equal_single_requests(client, checkpoint):
    with ThreadPoolExecutor(len(PROMPTS)) as many:
        answers = [*many.map(lambda prompt: text_of(ask(client, prompt, stream=True)), PROMPTS)]
    assert answers == [greedy(checkpoint, prompt) for prompt in PROMPTS] and len({*answers}) > 1


def test_completion_without_streaming(client, checkpoint):
    answer = ask(client, "question7:")
    assert answer.choices[0].text == greedy(checkpoint, "question7:") and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == NEW and answer.usage.prompt_tokens == len("question7:")


def test_models_are_listed(client, checkpoint):
    (model,) = client.models.list().data
    assert model.id == str(checkpoint) and client.models.retrieve(model.id) == model


def test_stream_reports_usage(client):
    *pieces, last = ask(client, "question7:", stream=True, stream_options={"include_usage": True})
    assert [piece.choices[0].finish_reason for piece in pieces][-1] == "length"
    assert last.choices == [] and last.usage.completion_tokens == NEW and last.usage.total_tokens == NEW + 10


def test_several_prompts_and_choices(client, checkpoint):
    tokens = byte_level()("question1:").input_ids
    answer = ask(client, ["question0:", "question2:"], n=2)
    assert [choice.text for choice in answer.choices] == [greedy(checkpoint, f"question{i}:") for i in (0, 0, 2, 2)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3] and answer.usage.completion_tokens == 4 * NEW
    assert ask(client, tokens).choices[0].text == greedy(checkpoint, "question1:")


def test_sampling_equals_generate(client, checkpoint):
    answer = ask(client, "question7:", temperature=0.7, top_p=0.9, seed=5)
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0}
    expected = generate(checkpoint, "question7:", 5, False, max_new_tokens=NEW, **sampling)
    assert answer.choices[0].text == expected["text"]


@pytest.mark.parametrize(("most", "default"), [(3, 3), (20, 16)])
def test_texts_are_as_long_as_the_server_gives(most, default, tmp_path):
    """Without max_tokens, a completion has 16 tokens or the most of the server, and a chat the most."""
    with serving(save(tmp_path, ASCII, TEMPLATE), tokens=most) as base:
        client, messages = connect(base), [{"role": "user", "content": "who?"}]
        answers = [client.completions.create(model=None, prompt="a", **more) for more in ({"max_tokens": 2}, {})]
        answers.append(client.chat.completions.create(model=None, messages=messages))
        assert [answer.usage.completion_tokens for answer in answers] == [2, default, most]


def test_seed_reproduces_text_under_concurrency(client):
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
    assert len({text for seed, text in texts if seed == 5}) == 1 and len({text for seed, text in texts}) == 4


def test_stop_strings_are_cut_off(client, checkpoint):
    whole = greedy(checkpoint, "question7:")
    stop = whole[3:5]
    assert whole.find(stop) > 0
    answer = ask(client, "question7:", stop=[stop, "never in there"])
    assert answer.choices[0].text == whole[: whole.find(stop)] and answer.choices[0].finish_reason == "stop"
    assert text_of(ask(client, "question7:", stop=stop, stream=True)) == answer.choices[0].text


def test_chat_completions_use_the_template(chat):
    model = chat.models.list().data[0].id
    request = {"model": model, "messages": [{"role": "user", "content": "who?"}], "temperature": 0}
    answer = chat.chat.completions.create(**request, max_tokens=NEW)
    text = answer.choices[0].message.content
    assert text == ask(chat, "user:who?;assistant:").choices[0].text and answer.object == "chat.completion"
    chunks = [*chat.chat.completions.create(**request, max_completion_tokens=NEW, stream=True)]
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == text
    assert [chunk.choices[0].delta.role for chunk in chunks][:1] == ["assistant"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "who?"}]}]
    answer = chat.chat.completions.create(**request | {"messages": parts}, max_tokens=NEW)
    assert answer.choices[0].message.content == text
    empty = {"annotations": [], "refusal": None, "audio": None, "tool_calls": None, "function_call": None}
    again = [*request["messages"], answer.choices[0].message.model_dump() | empty, *request["messages"]]
    answer = chat.chat.completions.create(**request | {"messages": again}, max_tokens=1, user="me")
    turns = f"user:who?;assistant:{text};user:who?;assistant:"
    assert answer.usage.prompt_tokens == len(byte_level()(turns).input_ids)


def test_streamed_pieces_are_whole_characters(chat):
    for seed in range(3):
        request = {"temperature": 1, "seed": seed, "max_tokens": 200}
        assert text_of(ask(chat, "a", **request, stream=True)) == ask(chat, "a", **request).choices[0].text


def test_client_errors_have_openai_types(client):
    with pytest.raises(openai.BadRequestError) as wrong:
        ask(client, "a", temperature=3)
    assert wrong.value.param == "temperature" and wrong.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as wrong:
        ask(client, "a", model="gpt-9")
    assert wrong.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_neutral_fields_are_accepted(client, checkpoint):
    neutral = {"user": "me", "echo": False, "best_of": 1, "logit_bias": {}, "presence_penalty": 0, "seed": None}
    assert ask(client, "question7:", **neutral).choices[0].text == greedy(checkpoint, "question7:")


def test_cross_origin_requests_are_refused(server):
    headers = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    answer = httpx.options(f"{server}/v1/completions", headers=headers, timeout=600, trust_env=False)
    assert answer.status_code == 405 and not [name for name in answer.headers if name.startswith("access-control")]


# The client's generators may be collected while they close.
@pytest.mark.filterwarnings("ignore:.*Response.aiter_raw:pytest.PytestUnraisableExceptionWarning")
def test_disconnects_end_generation(server, client, checkpoint):
    """Of streams, and of answers of which nothing has been sent."""

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", timeout=600, max_retries=0) as many:
            endless = partial(many.completions.create, model=str(checkpoint), prompt="a", max_tokens=ENDLESS)

            async def one():
                async with await endless(stream=True) as stream:
                    async for _ in stream:
                        return

            tasks = [asyncio.create_task(one() if i % 2 else endless()) for i in range(50)]
            await asyncio.to_thread(wait_for, lambda: requests_of(server) == 25)  # of streams, one piece is read
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(all_of_them())
    wait_for(lambda: not requests_of(server))
    assert ask(client, "question7:").choices[0].text == greedy(checkpoint, "question7:")


def test_work_of_a_client_that_has_gone_keeps_its_turn():
    """Its thread still decodes, with a tokenizer that is not for several threads."""
    service, begun, end = object.__new__(routes.Service), threading.Event(), threading.Event()

    async def run():
        service.decoding = asyncio.Lock()
        gone = asyncio.create_task(service.decoded(lambda: (begun.set(), end.wait())))
        await asyncio.to_thread(begun.wait)
        gone.cancel()
        await asyncio.sleep(0.05)
        held = service.decoding.locked()
        end.set()
        return held, await service.decoded(lambda: 1), gone.cancelled()

    assert asyncio.run(run()) == (True, 1, True)


@pytest.mark.parametrize("end", [True, False])
def test_slow_reader_is_disconnected(end, monkeypatch):
    """Whether the answer is complete or goes on, although the buffers of both sides are full."""
    monkeypatch.setattr(protocol, "SEND_SECONDS", 0.2)
    done = []

    async def chunks():
        try:
            yield bytes(2**24)
            while not end:
                await asyncio.sleep(0)
                yield b"more"
        finally:
            done.append(True)

    async def app(scope, receive, send):
        with contextlib.suppress(asyncio.CancelledError):
            await routes.until_disconnected(routes.send_all(chunks(), b"text/plain", send, None), receive)

    with listening("127.0.0.1", 0) as listener:
        server = uvicorn.Server(settings(app, log_level="critical"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        with socket.create_connection(listener.getsockname()) as slow:
            slow.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            wait_for(lambda: done and not server.server_state.connections and not server.server_state.tasks)
        server.should_exit = True
        thread.join()


def test_model_failure_is_a_500(checkpoint, monkeypatch):
    def fails(*_, **__):
        raise OSError("a disk")

    with serving(checkpoint) as base:
        monkeypatch.setattr(HeadraceForCausalLM, "forward", fails)
        with pytest.raises(openai.InternalServerError, match="failed with OSError"):
            ask(connect(base), "a")


def test_failure_of_a_stream_is_its_last_event(checkpoint, monkeypatch):
    request = {"prompt": "a", "stream": True, "max_tokens": 9, "temperature": 0}
    tokens, logged, step = [], [], generation.Engine.step

    def fails(*arguments):
        tokens.append(arguments)
        if len(tokens) > 3:
            raise OSError("a disk")
        return step(*arguments)

    with serving(checkpoint) as base, httpx.Client(base_url=base, timeout=600, trust_env=False) as client:
        monkeypatch.setattr(generation.Engine, "step", fails)
        monkeypatch.setattr(routes.LOG, "error", lambda line, exc_info: logged.append(exc_info))
        *pieces, error, done, end = client.post("/v1/completions", json=request).text.split("\n\n")
        assert pieces and all('"text"' in piece for piece in pieces)
        assert "the server failed with OSError" in error and '"type":"server_error"' in error
        assert (done, end) == ("data: [DONE]", "") and [str(each) for each in logged] == ["a disk"]
        with pytest.raises(openai.APIError, match="failed with OSError"):
            text_of(ask(connect(base), "a", stream=True))
        monkeypatch.undo()
        assert client.post("/v1/completions", json=request).text.endswith("data: [DONE]\n\n")


def test_prompt_beyond_the_position_table_is_a_400(tmp_path):
    gpt = save(tmp_path, ASCII, mixer="gpt", max_position_embeddings=16)
    with serving(gpt) as base, pytest.raises(openai.BadRequestError, match="16"):
        ask(connect(base), "a" * 20)


def test_invalid_checkpoint_is_refused_at_start(tmp_path):
    with pytest.raises(InputError, match=r"has no config\.json"):
        application(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, code, word", [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_signal_ends_the_server_while_it_generates(checkpoint, tmp_path, number, code, word):
    server = command(tmp_path, "serve", checkpoint, "--port", 0, "--max-tokens", ENDLESS, "--name", "mine")
    client = connect(started(server, tmp_path))
    assert [model.id for model in client.models.list()] == ["mine"]
    with ask(client, "a", stream=True, max_tokens=ENDLESS) as stream:
        next(iter(stream))
        os.kill(server.pid, number)
        with pytest.raises(openai.APIConnectionError):
            list(stream)
    server.join()
    said = (tmp_path / "err").read_text()
    assert server.exitcode == code and f"{word}: the server has ended" in said and "Traceback" not in said


def test_request_in_flight_when_the_server_ends_gets_an_error_in_json(checkpoint):
    with ThreadPoolExecutor(1) as pool:
        with serving(checkpoint) as base:
            asked = pool.submit(post, f"{base}/v1/completions", json={"prompt": "a", "max_tokens": ENDLESS})
            wait_for(lambda: requests_of(base))
        answer = asked.result()
    error = answer.json()["error"]
    assert answer.status_code == 503 and error["type"] == "server_error" and error["message"].startswith("the server ")


@pytest.mark.parametrize("setting", ["stop_strings", "one string", "eos_token_id"])
def test_ends_of_the_folder_end_every_text(setting, tmp_path):
    """Stop strings, or several tokens."""
    folder = save(tmp_path, ASCII)
    model = load(folder)
    whole = greedy(folder, "question7:")
    if setting == "eos_token_id":
        model.generation_config.eos_token_id = [ASCII - 1, byte_level()(whole[4]).input_ids[0]]
    else:
        model.generation_config.stop_strings = whole[4:6] if setting == "one string" else [whole[4:6]]
    model.save_pretrained(folder)
    with serving(folder) as base:
        answer = ask(connect(base), "question7:", stop=["not in the text"]).choices[0]
    ended = whole.index(whole[4] if setting == "eos_token_id" else whole[4:6])
    assert answer.text == whole[:ended] and answer.finish_reason == "stop"


def test_unusable_address_is_refused(checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"--port={port} cannot be used as an address: .* in use"):
            serve(checkpoint, "127.0.0.1", port, Limits())
    with pytest.raises(InputError, match="--port=70000; expected 0 to 65535"):
        serve(checkpoint, "127.0.0.1", 70000, Limits())
    for host in ("no host", "é" * 64):
        with pytest.raises(InputError, match=f"--host='{host}' and"):
            serve(checkpoint, host, 0, Limits())
