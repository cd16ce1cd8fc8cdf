"""A small model behind the server, in a thread of the test's process."""

import threading
import time
from contextlib import contextmanager
from functools import partial

import httpx
import openai
import uvicorn

import groups
import tiny
from groups import wait_for
from headrace.data.tokenizer import byte_level
from headrace.serving import Limits, application, settings
from headrace.serving.access import LOCAL
from headrace.serving.sampling import Sampling
from headrace.serving.stream import Stream

ASCII = 94  # tokens; beyond them a random model writes bytes that are no text
NEW = 8  # tokens of a short answer
ENDLESS = 10**6  # tokens, which take many minutes: a test that ends did not wait for them
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'judge' %}{{ raise_exception('no judges') }}{% endif %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def save(folder, vocab_size, template=None, mixer="softmax-gla", **changes):
    tokenizer = byte_level()
    tokenizer.chat_template = template
    return tiny.saved(tiny.build(mixer, vocab_size=vocab_size, **changes).float(), folder, tokenizer)


CLIENTS: list[openai.OpenAI] = []  # which are closed with the server
# Of the server on this machine, which has no proxy and may be busy.
get, post = (partial(method, timeout=600, trust_env=False) for method in (httpx.get, httpx.post))


@contextmanager
def serving(checkpoint, name=None, access=LOCAL, **limits):
    """The base of the URLs of a server in a thread."""
    groups.forked()  # imports for the process of the tokenizer
    app = application(checkpoint, Limits(**{"prompt": 64, "tokens": ENDLESS, **limits}), name=name, access=access)
    server = uvicorn.Server(settings(app, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    for _ in range(12000):  # ten minutes, on a busy machine
        assert thread.is_alive()
        if server.started:
            break
        time.sleep(0.05)
    assert server.started
    base = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield base
    finally:  # a failed test leaves no server at work for the others
        for client in [each for each in CLIENTS if str(each.base_url).startswith(base)]:
            client.close()
            CLIENTS.remove(client)
        server.should_exit = True
        thread.join()


def connect(base, key="none"):
    # Fifty at once on a busy machine wait for each other.
    CLIENTS.append(openai.OpenAI(base_url=f"{base}/v1", api_key=key, timeout=600, max_retries=0))
    return CLIENTS[-1]


def started(server, folder):
    """The base of the URLs of a `command`, which it says when it can be asked."""
    said = folder / "out"
    while not said.exists() or "\n" not in said.read_text():
        assert server.is_alive(), (folder / "err").read_text()
        time.sleep(0.05)
    return said.read_text().splitlines()[0].split()[-1].removesuffix("/v1")


def requests_of(base):
    """The number of requests that are open."""
    return get(f"{base}/health").json()["requests"]


def ask(client, prompt, **changes):
    """A greedy completion of a few tokens."""
    model = client.models.list().data[0].id
    given = {"model": model, "prompt": prompt, "max_tokens": NEW, "temperature": 0}
    return client.completions.create(**given | changes)


class Client:
    """A prompt to an engine, and the pieces that it gets."""

    def __init__(self, model, prompt, tokens, **sampling):
        self.pieces, self.prompt = [], prompt
        self.stream = Stream(prompt, Sampling(tokens, **sampling), byte_level(), model.device, self.pieces.append)

    def ended(self):
        wait_for(lambda: self.pieces and (isinstance(self.pieces[-1], Exception) or self.pieces[-1].finish))
        return self

    @property
    def text(self):
        return "".join(piece.text for piece in self.pieces)

    @property
    def scores(self):
        return [score for piece in self.pieces for score in piece.scores]

    @property
    def cached(self):
        return self.pieces[-1].cached
