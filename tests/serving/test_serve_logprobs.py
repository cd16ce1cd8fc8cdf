"""Log-probabilities and echo in completions: the numbers of the model, in the form that lm-evaluation-harness reads."""

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace import load
from headrace.data.tokenizer import byte_level
from headrace.files.text import Text
from headrace.serving import engine
from headrace.serving.requests import Completion
from headrace.serving.routes import Choice
from headrace.serving.sampling import Score, scored
from headrace.serving.stream import Piece
from headrace.serving.text import Logprobs, token_texts
from served import ASCII, connect, post, save, serving

PROMPT = "question7:"


@pytest.fixture(scope="module", params=["softmax-gla", "transformer"])
def served(request, tmp_path_factory):
    """(address, client, model) of a server that reads prompts in pieces of 16 tokens."""
    folder = save(tmp_path_factory.mktemp("model") / "tiny", ASCII, mixer=request.param)
    with pytest.MonkeyPatch.context() as patch, serving(folder, name="tiny") as base:
        patch.setattr(engine, "PIECE", 16)
        yield base, connect(base).completions, load(folder)


@torch.no_grad()
def logprobs_of(model, ids):
    """[T - 1, vocabulary]: of the tokens that follow each but the last."""
    return model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


def test_lm_eval_reads_the_log_likelihoods(served):
    """Of continuations of prompts as tokens, several in a request, some longer than a piece, one of them greedy."""
    theirs = pytest.importorskip("lm_eval.models.openai_completions").LocalCompletionsAPI
    base, _, model = served
    contexts = [torch.randint(ASCII, (n,)).tolist() for n in (1, 3, 30, 16, 17, 40)]
    continuations = [torch.randint(ASCII, (n,)).tolist() for n in (1, 4, 5, 16, 2, 1)]
    greedy = model.generate(torch.tensor([contexts[1]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    continuations[1] = greedy[0, 3:].tolist()
    rows = [a + b for a, b in zip(contexts, continuations, strict=True)]
    payload = theirs._create_payload(SimpleNamespace(model="tiny"), rows, generate=False)
    answer = post(f"{base}/v1/completions", json=payload).json()
    actual = theirs.parse_logprobs(answer, tokens=rows, ctxlens=[*map(len, contexts)])
    for ids, given, (total, is_greedy) in zip(rows, contexts, actual, strict=True):
        expected = logprobs_of(model, ids)[len(given) - 1 :]
        continuation = torch.tensor(ids[len(given) :])
        assert total == pytest.approx(float(expected.gather(1, continuation[:, None]).sum()), rel=1e-4)
        assert is_greedy == torch.equal(expected.argmax(-1), continuation)
    assert [is_greedy for _, is_greedy in actual][1]


def test_logprobs_have_the_openai_format(served):
    _, completions, model = served
    answer = completions.create(model="tiny", prompt=PROMPT, max_tokens=4, temperature=0, logprobs=2, echo=True)
    (choice,), actual = answer.choices, answer.choices[0].logprobs
    ids = byte_level()(choice.text).input_ids
    expected = logprobs_of(model, ids)
    assert choice.text.startswith(PROMPT) and "".join(actual.tokens) == choice.text and len(ids) == len(PROMPT) + 4
    assert actual.text_offset == [*range(len(ids))]
    assert actual.token_logprobs[0] is None and actual.top_logprobs[0] is None
    chosen = [float(row[token]) for row, token in zip(expected, ids[1:], strict=True)]
    assert actual.token_logprobs[1:] == pytest.approx(chosen, rel=1e-4)
    for row, token, top in zip(expected, ids[1:], actual.top_logprobs[1:], strict=True):
        names = {byte_level().decode(i): float(row[i]) for i in [*row.topk(2).indices.tolist(), token]}
        assert top == pytest.approx(names, rel=1e-4)
    assert answer.usage.prompt_tokens == len(PROMPT) and answer.usage.completion_tokens == 4 and answer.model == "tiny"


def test_prompt_alone_is_scored(served):
    _, completions, _ = served
    request = {"model": "tiny", "prompt": PROMPT, "echo": True, "logprobs": 0}
    alone, more = completions.create(**request, max_tokens=0), completions.create(**request, max_tokens=1, seed=1)
    assert alone.choices[0].text == PROMPT and alone.usage.completion_tokens == 0
    assert alone.choices[0].finish_reason == "length"
    assert alone.choices[0].logprobs.token_logprobs == more.choices[0].logprobs.token_logprobs[:-1]
    assert [*more.choices[0].logprobs.top_logprobs[-1]] == more.choices[0].logprobs.tokens[-1:]
    assert completions.create(**request | {"logprobs": None}, max_tokens=0).choices[0].text == PROMPT


def test_streams_and_sampling_have_the_same_logprobs(served):
    """They are the model's, before temperature and top_p."""
    _, completions, model = served
    request = {"model": "tiny", "prompt": [PROMPT, "a"], "max_tokens": 6, "temperature": 1.3, "top_p": 0.9, "seed": 3}
    request |= {"logprobs": 1, "n": 2}
    whole = completions.create(**request).choices
    parts = [[] for _ in whole]
    for chunk in completions.create(**request, stream=True):
        parts[chunk.choices[0].index].append(chunk.choices[0])
    for choice, pieces in zip(whole, parts, strict=True):
        assert "".join(piece.text for piece in pieces) == choice.text
        streamed = [piece.logprobs for piece in pieces]
        for field in ("tokens", "text_offset"):
            assert [x for part in streamed for x in getattr(part, field)] == getattr(choice.logprobs, field)
        tops = [top for part in streamed for top in part.top_logprobs]
        assert all(top == pytest.approx(x, rel=1e-4) for top, x in zip(tops, choice.logprobs.top_logprobs, strict=True))
        prompt = byte_level()(request["prompt"][choice.index // 2]).input_ids
        ids = prompt + byte_level()(choice.text).input_ids
        chosen = logprobs_of(model, ids).gather(1, torch.tensor(ids[1:])[:, None])[len(prompt) - 1 :, 0]
        assert choice.logprobs.token_logprobs == pytest.approx(chosen.tolist(), rel=1e-4)


def test_choices_of_a_request_are_generated_together(served):
    _, completions, _ = served
    request = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "max_tokens": 60, "temperature": 0}
    order = [chunk.choices[0].index for chunk in completions.create(**request, stream=True)]
    assert sorted({*order}) == [0, 1, 2, 3]
    last_of_first = max(i for i, index in enumerate(order) if index == 0)
    assert all(order.index(index) < last_of_first for index in (1, 2, 3))


def test_choices_of_a_seed_differ_and_are_reproducible(served):
    _, completions, _ = served
    request = {"model": "tiny", "prompt": "a", "n": 3, "max_tokens": 24, "temperature": 1, "seed": 7}
    first, again = ([choice.text for choice in completions.create(**request).choices] for _ in range(2))
    assert first == again and len({*first}) == 3
    assert [completions.create(**request | {"n": 1, "seed": 7 + i}).choices[0].text for i in range(3)] == first


def test_tokens_that_are_partial_characters():
    """Two bytes of one character have one text; the likelier is kept, and an offset is that of the character."""
    tokenizer = byte_level()
    first, second = tokenizer("é").input_ids
    scores = [Score(5), Score(first, -2.0, ((second, -1.0),)), Score(second, -0.5, ((second, -0.5),))]
    result = Logprobs(tokenizer)(scores)
    assert result["tokens"][1:] == ["\ufffd", "\ufffd"] and result["text_offset"] == [0, 1, 1]
    assert result["top_logprobs"] == [None, {"\ufffd": -1.0}, {"\ufffd": -0.5}]


def test_nonfinite_logprobs_are_null():
    (score,) = scored(torch.full((1, 3), torch.nan), [1], 1)
    result = Logprobs(byte_level())([score])
    assert result["token_logprobs"] == [None] and [*result["top_logprobs"][0].values()] == [None, None]


def words():
    """A tokenizer whose tokens begin with a space that is dropped at the start of a text, as Llama's."""
    made = Tokenizer(models.WordLevel({"▁it": 0, "▁was": 1, "▁a": 2}, unk_token="▁a"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_continuation_keeps_its_leading_space():
    tokenizer = words()
    text = Text(tokenizer, (), tokenizer("it was").input_ids)
    assert text.add(2) + text.rest() == " a" and Text(tokenizer, ()).add(2) == "a"
    assert token_texts(tokenizer, {0, 2}) == {0: " it", 2: " a"}


@pytest.mark.parametrize(("echo", "offsets"), [(False, [0, 2, 6]), (True, [0, 2, 4, 8])])
def test_offsets_count_the_leading_space_of_a_continuation(echo, offsets):
    """Of " a was a", or of "it a was a" with the prompt."""
    tokenizer, prompt, new = words(), [0], [2, 1, 2]
    body = Completion(prompt=prompt, logprobs=0, echo=echo)
    choice = Choice(0, body, tokenizer, prompt, "")
    choice.add(Piece("", 3, "length", tuple(map(Score, [*prompt * echo, *new]))))
    assert choice.new()["logprobs"]["text_offset"] == offsets


def test_prompt_ending_inside_a_character_is_separate():
    tokenizer = byte_level()
    first, second = tokenizer("é").input_ids
    text = Text(tokenizer, (), [first])
    assert text.add(second) + text.rest() == tokenizer.decode([second])
