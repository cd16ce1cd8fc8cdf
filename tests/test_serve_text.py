"""Text from tokens: whole characters, and an end at a stop string."""

import pytest

pytest.importorskip("uvicorn", reason="the extra [serve] is not installed")

import torch

from headrace.data.tokenizer import byte_level
from headrace.hf.serving.engine import Piece, Stream
from headrace.hf.serving.sampling import Sampling
from headrace.hf.serving.text import Text


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


def test_a_stop_string_that_the_last_token_ends_is_the_reason():
    """A character that is not finished is text only once no other token follows."""
    said, tokenizer = [], byte_level()
    stream = Stream([1], Sampling(1, stop=("\ufffd",)), tokenizer, torch.device("cpu"), said.append)
    assert not stream.add(tokenizer("é").input_ids[0], []) and said == [Piece("", 1, "stop")]
