"""The prefix cache of the server: what it keeps is what a run without it computes, and what is shared is read once."""

import re
from functools import cache, partial

import pytest
import torch

import served
import tiny
from headrace import HeadraceCache, HeadraceForCausalLM, InputError
from headrace.data.tokenizer import byte_level
from headrace.serving import Limits, application, engine, prefix
from headrace.serving.engine import Engine
from headrace.serving.prefix import PrefixCache, Saved, check_room, joined, unsupported_reason
from headrace.spec import AttentionSpec, Rope
from served import ASCII, ask, connect, get, save, serving, wait_for

PIECE, NEW = 8, 5
Client = partial(served.Client, tokens=NEW, logprobs=1)  # the scores of its tokens show a state that differs
TOLERANCE = 1e-9  # in float64: 1e5 roundings; a wrong state differs by 1e-2 and more
# Every kind of state, and of what layers share.
MIXERS = [
    "softmax-gla", "sparse", "mamba and s4", "rwkv4 and s4d", "hybrid", "shared", "parallel", "ling", "channel mixing",
]  # fmt: skip
PLENTY = 10**9


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    monkeypatch.setattr(engine, "PIECE", PIECE)
    monkeypatch.setattr(prefix, "PARTS", (2, 4, 6))


@pytest.fixture(scope="module", params=["softmax-gla", "hybrid"])
def model(request):
    return built(request.param)


def built(mixer):
    return tiny.trained(HeadraceForCausalLM(tiny.config(mixer, vocab_size=ASCII)))


def ids(count, seed=0):
    return torch.randint(ASCII, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(one, *prompts, **sampling):
    """The clients of prompts that arrive together. The engine has kept their states when they are returned."""
    clients = [Client(one.model, prompt, **sampling) for prompt in prompts]
    one.submit(*(client.stream for client in clients))
    for client in clients:
        client.ended()
    one.submit()  # a request without streams, which the engine takes when it has done with what ended before
    wait_for(one.arrivals.empty)
    return clients


def same(client, other):
    assert [score.token for score in client.scores] == [score.token for score in other.scores]
    both = [[s.logprob for s in each.scores if s.logprob is not None] for each in (client, other)]
    assert both[0] == pytest.approx(both[1], abs=TOLERANCE)


def check(one, clients, **sampling):
    """The texts are those of an engine without a cache."""
    for client in clients:
        same(client, alone(one.model, tuple(client.prompt), **sampling))


@cache
def alone(model, prompt, **sampling):
    """The client of a prompt to an engine of its own."""
    return run(Engine(model, byte_level()), list(prompt), **sampling)[0]


def kept(cache):
    return {entry.length for entry in cache.kept}


@pytest.mark.parametrize("mixer", MIXERS)
def test_texts_are_those_without_a_cache(mixer):
    """Of the same prompt, longer and shorter ones, a chat that goes on, and one whose last turn is edited."""
    one = Engine(built(mixer), byte_level(), PrefixCache(PLENTY))
    system = ids(20)
    (first,) = run(one, system + ids(7, 1))
    reply = first.stream.tokens
    prompts = {
        "the same": (first.prompt, 27), "another question": (system + ids(9, 2), 16), "shorter": (system[:18], 16),
        "a border": (system[:16], 8), "the chat goes on": (first.prompt + reply + ids(11, 3), 27 + NEW - 1),
        "the last turn is edited": (first.prompt + reply + ids(6, 4), 27 + NEW - 1),
    }  # fmt: skip
    clients = [first]
    for name, (prompt, cached) in prompts.items():
        (client,) = run(one, prompt)
        assert client.cached >= cached, name
        clients.append(client)
    check(one, clients)


@pytest.mark.parametrize("mixer", ["softmax-gla", "hybrid", "sparse", "rwkv4 and s4d"])
def test_states_at_borders_of_pieces_are_bit_equal(mixer):
    """To those of a run in the same pieces, and keys and values are kept once."""
    model, cache = built(mixer).float(), PrefixCache(PLENTY)
    one, prompt = Engine(model, byte_level(), cache), ids(3 * PIECE + 2)
    run(one, prompt, tokens=1)
    states = HeadraceCache()
    with torch.inference_mode():
        for end in range(PIECE, 3 * PIECE + 1, PIECE):
            model(torch.tensor([prompt[end - PIECE : end]]), past_key_values=states, use_cache=True)
            (entry,) = (entry for entry in cache.kept if entry.length == end)
            restored = joined([entry.saved.whole()], end)
            assert restored.columns == end
            for state, other in zip(restored.states, states.states, strict=True):
                assert type(state) is type(other)
                for x, y in zip(state, other, strict=True):
                    assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x is None
            with pytest.raises(InputError, match="were read elsewhere"):
                restored.rewind(1)
            if mixer == "hybrid":
                assert [state.k.shape[1] for state in entry.saved.states if hasattr(state, "k")] == [PIECE]
    assert kept(cache) == {8, 16, 24, 26} and cache.bytes == sum(cache.kept.values())


def read_tokens(model):
    """A list to which the number of tokens of each later call of the model is added."""
    counts = []
    model.register_forward_hook(lambda module, inputs, out: counts.append(inputs[0].shape[1]))
    return counts


@pytest.mark.parametrize("shared", [3 * PIECE, 3 * PIECE - 1])
def test_a_prefix_of_many_is_read_once(shared):
    """Also one that ends within a piece: 6 of its last 7 tokens are a part by themselves, which the second reads."""
    model = built("softmax-gla")
    counts, one = read_tokens(model), Engine(model, byte_level(), PrefixCache(PLENTY))
    clients = run(one, *([*ids(shared), token, 0] for token in range(64)))
    spent = shared + 64 * 2 if shared % PIECE == 0 else shared + 2 + 6 + 63 * (1 + 2)
    assert sum(counts) == spent and len(counts) < 64
    assert sum(client.cached for client in clients) == 64 * (shared + 2) - spent
    assert one.prefixes.queried == 64 * (shared + 2) and one.prefixes.hits == one.prefixes.queried - spent
    check(one, clients[:4])


@pytest.mark.parametrize("capacity", [0, PLENTY])
def test_choices_of_a_prompt_are_read_once_and_advance_together(model, capacity, monkeypatch):
    counts, one, steps = read_tokens(model), Engine(model, byte_level(), PrefixCache(capacity)), []
    step = model.engine.step
    monkeypatch.setattr(model.engine, "step", lambda *given: steps.append(len(given[1])) or step(*given))
    clients = [Client(model, ids(11), temperature=1.0, seed=seed) for seed in range(4)]
    one.submit(*(client.stream for client in clients))
    assert [client.ended().cached for client in clients] == [0, 11, 11, 11]
    assert sum(counts) == 11 and steps == [4] * (NEW - 1)
    for seed, client in enumerate(clients):
        same(client, run(Engine(model, byte_level()), ids(11), temperature=1.0, seed=seed)[0])
    assert len({tuple(client.stream.tokens) for client in clients}) > 1


def test_choices_leave_at_their_stop_strings(model):
    """The others go on as before."""
    one = Engine(model, byte_level(), PrefixCache(PLENTY))
    drawn = [run(Engine(model, byte_level()), ids(11), tokens=30, temperature=1.0, seed=seed)[0] for seed in range(4)]
    texts = [client.text for client in drawn]
    stop = texts[0][3:5]
    clients = [Client(model, ids(11), tokens=30, temperature=1.0, seed=seed, stop=(stop,)) for seed in range(4)]
    one.submit(*(client.stream for client in clients))
    for text, client in zip(texts, clients, strict=True):
        assert client.ended().text == text.partition(stop)[0]


def test_scored_prompts_are_read_in_whole(model):
    """Two that begin alike, each twice, after one that is kept."""
    one = Engine(model, byte_level(), PrefixCache(PLENTY))
    run(one, ids(20))
    clients = [Client(model, ids(16) + ids(4, seed), echo=True) for seed in (1, 1, 2, 2)]
    one.submit(*(client.stream for client in clients))
    for client in clients:
        assert len(client.ended().scores) == 20 + NEW
    check(one, clients, echo=True)
    assert one.prefixes.queried == 20


@pytest.mark.parametrize("who", ["the first", "others", "all"])
def test_clients_that_leave_while_others_wait(model, who):
    """The prefix is read for those who stay."""
    one, prompt = Engine(model, byte_level(), PrefixCache(PLENTY)), ids(3 * PIECE + 3)
    clients = [Client(model, prompt[:-3] + ids(3, seed)) for seed in range(4)]
    gone = {"the first": clients[:1], "others": clients[1:], "all": clients}[who]
    calls = []

    def leave(*_):
        calls.append(1)
        if len(calls) == 2:
            for client in gone:
                client.stream.gone.set()

    hook = model.model.register_forward_hook(leave)
    for client in clients:
        one.submit(client.stream)
    stay = [client for client in clients if client not in gone]
    for client in stay:
        client.ended()
    wait_for(lambda: len(calls) >= 2)
    hook.remove()
    again = run(one, prompt, ids(2))
    check(one, stay + again)
    assert not any(client.pieces for client in gone)


def test_who_waits_behind_a_client_that_leaves_gets_states_of_its_own(model):
    """Its prompt goes on from the one of the client that has left, which is read together with another prompt."""
    one = Engine(model, byte_level(), PrefixCache(PLENTY))
    first, behind, other = (Client(model, prompt) for prompt in (ids(4), ids(4) + ids(3, 1), ids(3, 2)))
    for client in (first, behind, other):
        one._arrive((client.stream,))
    first.stream.gone.set()
    one.submit()
    check(one, [behind.ended(), other.ended()])


def test_an_error_ends_its_prompts_and_keeps_nothing(model):
    cache = PrefixCache(PLENTY)
    one, prompt, calls = Engine(model, byte_level(), cache), ids(3 * PIECE), []

    def fail(*_):
        calls.append(1)
        if len(calls) == 2:
            raise OSError("a disk")

    hook = model.model.backbone.layers[1].register_forward_hook(fail)
    failed = run(one, prompt, prompt, prompt[:-1])
    assert all(isinstance(client.pieces[0], OSError) for client in failed) and kept(cache) == {PIECE}
    hook.remove()
    (again,) = run(one, prompt)
    assert again.cached == PIECE
    check(one, [again])


@pytest.mark.parametrize("entries", [0.5, 1, 3.5])
def test_budget_bounds_the_bytes(model, entries):
    """Prompts with the same beginning in turn with others; with room for less than one, none are kept."""
    size = PrefixCache(PLENTY)
    run(Engine(model, byte_level(), size), ids(PIECE), tokens=1)
    cache = PrefixCache(int(entries * size.bytes))
    one, seen, clients = Engine(model, byte_level(), cache), [], []
    keep = cache.keep
    cache.keep = lambda *arguments: (keep(*arguments), seen.append((cache.bytes, len(cache.kept))))[0]
    for seed in range(1, 7):
        clients += run(one, ids(18) + ids(seed % 3, 1), ids(9, seed), ids(18) + ids(seed, 2))
    assert max(size for size, _ in seen) <= cache.capacity
    assert (max(count for _, count in seen) > 0) == (entries >= 1) and (cache.evictions > 0) == (entries >= 1)
    assert cache.bytes == sum(cache.kept.values()) == sum(entry.saved.nbytes + nbytes(entry) for entry in cache.kept)
    for entry in cache.kept:  # what its keys and values go on from is kept too
        assert entry.saved.before is None or entry.parent in cache.kept
    check(one, clients)


def nbytes(entry):
    return 0 if entry.logits is None else entry.logits.nbytes


def test_the_least_recently_used_is_evicted():
    model = built("softmax-gla")
    one = Engine(model, byte_level(), PrefixCache(PLENTY))
    run(one, ids(6, 1), tokens=1)
    one.prefixes.capacity = 3 * one.prefixes.bytes
    for seed in (2, 3, 1, 4):
        run(one, ids(6, seed), tokens=1)
    cached = [run(one, ids(6, seed), tokens=1)[0].cached for seed in (1, 3, 4, 2)]
    assert cached == [6, 6, 6, 0]


def test_kept_states_are_not_written(model):
    one = Engine(model, byte_level(), PrefixCache(PLENTY))
    run(one, ids(3 * PIECE))
    tensors = [x for entry in one.prefixes.kept for state in entry.saved.states for x in state or () if x is not None]
    tensors += [entry.logits for entry in one.prefixes.kept if entry.logits is not None]
    before = [x.clone() for x in tensors]
    run(one, ids(3 * PIECE), ids(2 * PIECE) + ids(5, 1), ids(3 * PIECE), tokens=20)
    assert tensors and all(map(torch.equal, tensors, before))


def test_long_chains_end_without_recursion():
    start = node = prefix.Prefix()
    saved = None
    for token in range(20_000):
        node = node.then((token,))
        saved = Saved([], token, saved)
    assert sum(1 for _ in start.of(tuple(range(20_000)))) == 20_001
    del node, saved
    assert not start.longer[1]


def test_frequencies_that_depend_on_the_length_are_refused(tmp_path, capsys):
    spec = AttentionSpec(rope=Rope(kind="dynamic", factor=2.0, original=16))
    reason = unsupported_reason(HeadraceForCausalLM(tiny.config(spec)))
    assert "rope.kind='dynamic'" in reason and unsupported_reason(built("hybrid")) is None
    with serving(save(tmp_path, ASCII, mixer=spec)) as base:
        ask(connect(base), "a")
        assert metrics(base)["headrace_prefix_cache_capacity_bytes"] == 0
    assert reason in capsys.readouterr().err


def test_a_size_without_room_for_a_state_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"--prefix-cache=1000 bytes; a state of this model needs \d+"):
        application(save(tmp_path, ASCII), Limits(prefix_cache=1000))
    model = built("transformer")  # whose keys and values of a piece are of 128 tokens
    with pytest.raises(InputError, match=r"needs \d+") as refusal:
        check_room(model, 100 * 2 * 4 * model.config.hidden_size)
    check_room(model, int(re.findall(r"needs (\d+)", str(refusal.value))[0]))


def metrics(base):
    lines = (line.rsplit(" ", 1) for line in get(f"{base}/metrics").text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def test_usage_and_metrics_count_tokens(tmp_path):
    folder = save(tmp_path, ASCII)
    with serving(folder) as base:
        client = connect(base)
        usage = partial(usage_of, client)
        assert usage("a" * 20) == (20, 0) and usage("a" * 20) == (20, 20)
        assert usage(["a" * 20, "b" * 9], n=2) == (29, 20)
        *_, last = ask(client, "a" * 20, stream=True, stream_options={"include_usage": True})
        assert last.usage.prompt_tokens_details.cached_tokens == 20
        values = {re.sub("^headrace_(prefix_cache_)?", "", name): value for name, value in metrics(base).items()}
    assert values["prompt_tokens_total"] == 118 and values["generated_tokens_total"] == 7 * served.NEW
    assert values["first_piece_seconds_count"] == 7 and values["requests_open"] == values["streams_running"] == 0
    assert values["queried_tokens_total"] == 20 + 20 + 2 * 29 + 20
    assert values["hit_tokens_total"] == 20 + 2 * 20 + 9 + 20
    assert values["hit_rate"] == values["hit_tokens_total"] / values["queried_tokens_total"]
    assert values["entries"] > 3 and values["evictions_total"] == 0
    assert 0 < values["bytes"] < values["capacity_bytes"] == 256e6
    with serving(folder, prefix_cache=0) as base:
        client = connect(base)
        assert usage_of(client, "a" * 20) == (20, 0) and usage_of(client, "a" * 20) == (20, 0)
        assert not any(value for name, value in metrics(base).items() if "prefix" in name)


def usage_of(client, prompt, **changes):
    usage = ask(client, prompt, **changes).usage
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens
