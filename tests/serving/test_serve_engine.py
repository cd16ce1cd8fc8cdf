"""The engine of the server: streams that join and leave get what each gets alone, and no prompt holds up the others."""

import asyncio
import itertools
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

from headrace import InputError, load
from headrace.data.tokenizer import byte_level
from headrace.serving import engine
from headrace.serving.engine import Engine
from headrace.serving.sampling import Sampling
from headrace.spec import AttentionSpec, Rope
from served import ASCII, Client, save, wait_for


@pytest.fixture
def model(tmp_path):
    return load(save(tmp_path, ASCII))


def test_disconnect_stops_reading_the_prompt(model, monkeypatch):
    """Its second piece is not processed."""
    monkeypatch.setattr(engine, "PIECE", 2)
    one, read, gone, other = Engine(model, byte_level()), [], Client(model, [1, 2, 3, 4], 4), Client(model, [1], 1)
    model.model.register_forward_hook(lambda *_: read.append(1) or gone.stream.gone.set())
    one.submit(gone.stream)
    wait_for(lambda: read)
    one.submit(other.stream)
    assert other.ended().pieces[0].finish == "length"
    assert len(read) == 2 and not gone.pieces  # a piece of each prompt


def test_short_prompts_do_not_wait_for_long_ones(model, monkeypatch):
    """They arrive before the first of two layers, and those that fit into one call are answered before the second."""
    monkeypatch.setattr(engine, "PIECE", 4)
    monkeypatch.setattr(engine, "perf_counter", itertools.count().__next__)  # each layer takes as long as a turn
    one, read = Engine(model, byte_level()), []
    clients = long, *short = [Client(model, list(range(1, n + 1)), 1) for n in (9, 1, 2, 3)]

    def arrive(*_):
        arrival.remove()
        for client in short:
            one.submit(client.stream)

    arrival = model.model.backbone.layers[0].register_forward_pre_hook(arrive)
    model.model.register_forward_hook(lambda module, args, out: read.append(out.last_hidden_state.shape[1]))
    one.submit(long.stream)
    long.ended()
    assert read == [1 + 2, 4, 3, 4, 1] and all(client.pieces[-1].finish == "length" for client in clients)


def test_long_prompt_gets_half_of_the_time(model, monkeypatch):
    """A turn of the others that takes three layers' time is followed by three layers."""
    one, clock, turns = Engine(model, byte_level()), [0], []
    monkeypatch.setattr(engine, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(one, "thread", threading.current_thread())
    monkeypatch.setattr(one, "_take_turn", lambda: (turns.append(clock[0]), clock.__setitem__(0, clock[0] + 3)))
    one.resumed = 0
    for _ in range(8):
        clock[0] += 1
        one._between_layers()
    assert turns == [1, 7, 13]


@pytest.mark.parametrize(
    "mixer",
    ["softmax-gla", "rwkv6", "gated-deltanet", ["softmax-gla", "transformer"], "softmax-rnn-gate", "qwen3-next",
     "ling"],
)  # fmt: skip
def test_joining_and_leaving_streams_equal_single_streams(tmp_path, monkeypatch, mixer):
    """Prompts of different lengths, in pieces, arrive at different times; some leave before their end."""
    monkeypatch.setattr(engine, "PIECE", 3)
    model = load(save(tmp_path, ASCII, mixer=mixer))
    many = Engine(model, byte_level())

    def asked(one, place, length):
        client = Client(model, list(range(1, length)), 6 + 5 * place, temperature=place % 2, seed=place)
        one.submit(client.stream)
        return client

    clients = []
    for place, length in enumerate((2, 9, 4, 17, 3, 8)):
        clients.append(asked(many, place, length))
        if place == 2:
            wait_for(lambda: clients[2].pieces)
            clients[2].stream.gone.set()  # leaves in the middle
    for place, client in enumerate(clients):
        if place != 2:
            alone = asked(Engine(model, byte_level()), place, len(client.prompt) + 1).ended()
            assert client.ended().text == alone.text
            assert client.pieces[-1].tokens == alone.pieces[-1].tokens == 6 + 5 * place


def test_prompts_are_read_whole_if_their_states_depend_on_the_division(tmp_path, monkeypatch):
    """As `generate` reads them, with the frequencies of the whole length."""
    monkeypatch.setattr(engine, "PIECE", 4)
    model = load(save(tmp_path, ASCII, mixer=AttentionSpec(rope=Rope(kind="dynamic", factor=2.0, original=8))))
    one, prompt = Engine(model, byte_level()), [*range(1, 21)]
    client = Client(model, prompt, 1, logprobs=0, echo=True)
    one.submit(client.stream)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    scored = [score.logprob for score in client.ended().scores[1:20]]
    assert scored == pytest.approx([expected[i, token].item() for i, token in enumerate(prompt[1:])], rel=1e-4)


def test_the_tokenizer_decodes_in_the_thread_of_the_engine(model):
    """Which another thread would disturb."""
    client, threads = Client(model, [1, 2], 2), set()
    one = Engine(model, client.stream.tokenizer)
    decode = one.tokenizer.decode
    one.tokenizer.decode = lambda *given, **more: (threads.add(threading.current_thread()), decode(*given, **more))[1]

    async def ask():
        return [piece async for piece in one.pieces([([1, 2], Sampling(2))])]

    assert asyncio.run(ask()) and threads == {one.thread}


def test_error_of_one_stream_does_not_end_others(model):
    one, failed, fine = Engine(model, byte_level()), Client(model, [1, 10**9], 4), Client(model, [1], 4)
    one.submit(failed.stream)
    one.submit(fine.stream)
    assert fine.ended().pieces[-1].tokens == 4 and isinstance(failed.pieces[0], Exception)


def test_prompts_that_fail_together_are_read_one_by_one(model, monkeypatch):
    """As where memory is enough for each, and not for all."""
    one, prompts, packs = Engine(model, byte_level()), ([1, 2], [3], [4, 5, 6]), []

    def fails(given):
        packs.append(len(given))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(one, "_packed", fails)
    together, alone = ([Client(model, prompt, 4) for prompt in prompts] for _ in range(2))
    one.submit(*(client.stream for client in together))
    for client, other in zip(together, alone, strict=True):
        Engine(model, byte_level()).submit(other.stream)
        assert client.ended().text == other.ended().text
    assert packs == [3]


@pytest.mark.parametrize("broken", ["probabilities", "text"])
def test_error_of_a_token_ends_its_stream_alone(model, broken):
    """Of two streams in one batch, one has probabilities that are not numbers, or a token that cannot be decoded."""
    failed, fine, alone = (Client(model, [token, 2], 6, temperature=1, seed=0) for token in (1, 3, 3))
    one, draw, drawn = Engine(model, byte_level()), failed.stream.draw, itertools.count(1)
    if broken == "text":
        failed.stream.text.tokenizer = None
    else:
        failed.stream.draw = lambda out, logits: draw(out, logits * (torch.nan if next(drawn) == 3 else 1))
    one.submit(failed.stream, fine.stream)
    one.submit(alone.stream)
    assert isinstance(failed.ended().pieces[-1], (RuntimeError, AttributeError))
    assert fine.ended().text == alone.ended().text and fine.pieces[-1].tokens == 6


class Waits(TorchDispatchMode):
    """Counts the numbers that Python asks of tensors one by one, for each of which a GPU would be waited for."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator._opname in ("item", "_local_scalar_dense")
        return operator(*args, **kwargs or {})


def test_drawn_tokens_are_not_waited_for_one_by_one(model, monkeypatch):
    choose, found = Engine._choose, []

    def counted(self, batch, logits):
        with Waits() as waits:
            choose(self, batch, logits)
        found.append(waits.count)

    monkeypatch.setattr(Engine, "_choose", counted)
    one, settings = Engine(model, byte_level()), {"temperature": 1, "top_p": 0.9, "repetition_penalty": 1.1}
    clients = [Client(model, [n], 4, seed=n, **settings) for n in (1, 2, 3)]
    one.submit(*(client.stream for client in clients))
    assert all(client.ended().pieces[-1].tokens == 4 for client in clients) and found == [0] * 4


@pytest.mark.parametrize("logit", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_no_token_is_chosen_of_logits_that_are_no_numbers(model, logit, temperature):
    """Nor drawn: on CUDA the check of torch.multinomial would end all later requests too."""
    torch.nn.init.constant_(model.lm_head.weight, 0)
    model.lm_head.register_forward_hook(lambda module, args, out: out + logit)
    one, scored = Engine(model, byte_level()), Client(model, [1], 0, temperature=temperature)
    failed = Client(model, [1], 4, temperature=temperature)
    one.submit(failed.stream, scored.stream)
    assert "NaN or infinite" in str(failed.ended().pieces[-1]) and scored.ended().pieces[-1].finish == "length"


@pytest.mark.parametrize("mixer", ["gpt", "gla"])
def test_a_text_ends_with_the_learned_positions(tmp_path, mixer):
    """Which 5 tokens of a prompt and 3 of 4 new ones fill; without them, with the tokens that are asked for."""
    model = load(save(tmp_path, ASCII, mixer=mixer, max_position_embeddings=8))
    one = Engine(model, byte_level())

    async def ask():
        return [piece async for _, piece in one.pieces([([1, 2, 3, 4, 5], Sampling(9))])]

    last = asyncio.run(ask())[-1]
    assert (last.tokens, last.finish) == (4 if mixer == "gpt" else 9, "length")


def test_unsupported_generation_settings_are_refused(model):
    for name, value, sentence in (
        ("stop_strings", [""], r'stop_strings=\[""\]; expected texts'),
        ("repetition_penalty", -1, r"repetition_penalty=-1; expected 0\.01 to 100"),
        ("bad_words_ids", 3, "the model's generation_config cannot be used: `bad_words_ids` has to be"),
    ):
        setattr(model.generation_config, name, value)
        with pytest.raises(InputError, match=sentence):
            Engine(model, byte_level())


@pytest.mark.parametrize("penalty", [1.7, 0.5])
def test_repetition_penalty_equals_generate(model, penalty):
    """Of each stream alone, over its prompt and its answer, with and without sampling; the folder's where a request
    has none."""
    one, settings = Engine(model, byte_level()), {"max_new_tokens": 12, "pad_token_id": 0}
    for sampled in ({}, {"temperature": 0.7, "seed": 3}):
        streams = [Client(model, [7, 8, 7, 5], 12, repetition_penalty=x, **sampled) for x in (penalty, 1, penalty)]
        one.submit(*[client.stream for client in streams])
        first, plain, again = [client.ended().stream.tokens for client in streams]
        torch.manual_seed(3)
        how = settings | {"do_sample": bool(sampled), "top_k": 0, "temperature": sampled.get("temperature", 1.0)}
        expected = model.generate(torch.tensor([[7, 8, 7, 5]]), repetition_penalty=penalty, **how)[0, 4:].tolist()
        assert first == again == expected != plain
    model.generation_config.repetition_penalty = 2
    assert [one._limited(Sampling(1, repetition_penalty=each), 1).repetition_penalty for each in (None, 1)] == [2, 1]


@pytest.mark.parametrize(
    ("setting", "processor"),
    [({"min_new_tokens": 3}, "MinNewTokens"), ({"min_length": 3}, "MinLength"), ({"bad_words_ids": [[7]]}, "BadWords")],
)
def test_generation_settings_about_the_last_token_are_refused(model, setting, processor):
    model.generation_config = GenerationConfig(eos_token_id=5, **setting)
    with pytest.raises(InputError, match=f"asks for {processor}|asks for No{processor}"):
        Engine(model, byte_level())
