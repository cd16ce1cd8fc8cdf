"""Text from tokens: whole characters, and an end at a stop string."""

import pytest
import torch

from headrace.data.tokenizer import byte_level
from headrace.files.text import Text
from headrace.serving.metrics import Metrics
from headrace.serving.prefix import PrefixCache
from headrace.serving.sampling import Draw, Sampling
from headrace.serving.stream import Piece, Stream


@pytest.mark.parametrize("text", ["añb–c🙂🙂", "一二三", "", " a  b\n\n c ", "\ufffd", "é"])
def test_incremental_text_equals_decoding_all_tokens(text):
    tokenizer = byte_level()
    pieces = Text(tokenizer, ())
    pieces_so_far = [pieces.add(token) for token in tokenizer(text).input_ids]
    assert "".join(pieces_so_far) + pieces.rest() == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces_so_far)


def test_invalid_utf8_is_decoded_incrementally():
    tokenizer = byte_level()
    for _ in range(50):
        tokens = torch.randint(257, (60,)).tolist()
        pieces = Text(tokenizer, ())
        text = "".join([*map(pieces.add, tokens), pieces.rest()])
        assert text == tokenizer.decode(tokens, skip_special_tokens=True)


FIRST, SECOND = byte_level()("é").input_ids
SPECIAL = byte_level().eos_token_id


@pytest.mark.parametrize(
    ("tokens", "text", "times"),
    [
        ([FIRST] * 1000, "\ufffd" * 1000, 50),  # the last could be the first byte of a character
        ([SPECIAL] * 1000, "", 10),
        ([FIRST, *[SPECIAL] * 1000, SECOND], "é", 10),
    ],
    ids=["bytes of no character", "special tokens", "special tokens within a character"],
)
def test_tokens_without_text_are_decoded_a_few_times_each(tokens, text, times):
    tokenizer, decoded = byte_level(), []
    decode = tokenizer.decode
    tokenizer.decode = lambda tokens, **options: decoded.extend(tokens) or decode(tokens, **options)
    pieces = Text(tokenizer, ())
    assert "".join([*map(pieces.add, tokens), pieces.rest()]) == text and len(decoded) < times * 1000


@pytest.mark.parametrize(
    "text, stop, expected",
    [("one two", ("two",), "one "), ("aab", ("ab",), "a"), ("abab", ("abc",), "abab"), ("xyz", ("z", "yz"), "x")],
)
def test_stop_strings_across_pieces(text, stop, expected):
    tokenizer = byte_level()
    pieces = Text(tokenizer, stop)
    pieces_so_far = ""
    for token in tokenizer(text).input_ids:
        pieces_so_far += pieces.add(token)
        assert expected.startswith(pieces_so_far)
        if pieces.stopped:
            break
    assert pieces_so_far + pieces.rest() == expected and pieces.stopped == (expected != text)


def test_stop_string_at_the_last_token_is_the_finish_reason():
    """A character that is not finished is text only once no other token follows."""
    sent, tokenizer = [], byte_level()
    stream = Stream([1], Sampling(1, stop=("\ufffd",)), tokenizer, torch.device("cpu"), sent.append)
    assert not stream.add(tokenizer("é").input_ids[0], []) and sent == [Piece("", 1, "stop")]


def test_a_token_that_ends_a_text_is_not_in_it():
    """Also where the tokenizer does not take it for a special one."""
    sent, (token, end) = [], byte_level()("ab").input_ids
    stream = Stream([1], Sampling(9), byte_level(), torch.device("cpu"), sent.append)
    assert stream.add(token, [end]) and not stream.add(end, [end]) and sent == [Piece("a", 1), Piece("", 2, "stop")]


def test_metrics_sum_over_streams():
    metrics = Metrics(lambda: 2, lambda: 1, PrefixCache(0))
    for prompt, pieces in ((7, (1, 4)), (5, (3,))):
        clock = metrics.stream(prompt)
        for tokens in pieces:
            clock.tick(tokens)
    page = metrics.page().decode()
    for line in (
        "headrace_prompt_tokens_total 12.0", "headrace_generated_tokens_total 7.0", "headrace_requests_open 2.0",
        "headrace_first_piece_seconds_count 2.0", "headrace_between_pieces_seconds_count 1.0",
        "headrace_streams_running 1.0",
    ):  # fmt: skip
        assert f"\n{line}\n" in page, line


@pytest.mark.parametrize(("top_p", "drawn"), [(0.5, {0}), (0.85, {0, 1}), (1.0, {0, 1, 2})])
def test_top_p_leaves_out_the_least_likely_tokens(top_p, drawn):
    draw = Draw(Sampling(1, temperature=1.0, top_p=top_p, seed=0), torch.device("cpu"))
    scores, found = torch.tensor([[0.6, 0.3, 0.1]]).log(), torch.full((200,), -1)
    for place in found.split(1):
        draw(place, scores)
    assert {*found.tolist()} == drawn
