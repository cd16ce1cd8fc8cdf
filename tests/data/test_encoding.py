"""The tokens of pieces are those of the whole text."""

import gzip
import json
import os
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headrace.data import encoding, tokenizer
from headrace.data.encoding import LLAMA, PIECES, PLACES, Encoder, can_be_cut, last_place

DATA = os.environ.get("HEADRACE_DATA")
README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
# what stands at places: contractions, runs of white space, marks that combine, numbers, other scripts
TORN = ["don't", "'s", "I'LL", " ", "  ", "\n", "\n\n", "\t", "\r\n", "word", "Ab", "...", ",", "--", "12345", "²", "é"]
TORN += ["e\u0301", "\u0301", "\u00a0", "\u2003", "\u200b", "中文", "한", "\u1161", "🙂", "_", "\x1c", "٣"]
TORN += ["<|endoftext|>"]


def trained(pre_tokenizer, normalizer=None):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    texts = [README, "don't we'll a,\nb.\n\nc 123 4567  x\n" * 9]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>")


def split(pattern):
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    return pre_tokenizers.Sequence(parts)


TOKENIZERS = {
    "bytes": tokenizer.byte_level(),
    "GPT-2": trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "NeoX": trained(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC()),
    "Llama 3": trained(split(LLAMA)),
    "Qwen": trained(split(LLAMA.replace("{1,3}", "")), normalizers.NFC()),
}
TOKENIZERS["NeoX"].add_tokens([AddedToken(" " * n, normalized=True) for n in range(2, 6)])


def sentences(fallback=True, more=()):
    """A tokenizer as Llama 2's, of the commonest pairs of letters."""
    vocabulary = {"<unk>": 0, "</s>": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    letters = sorted({*README.replace(" ", "▁")} - {"\n"})
    made = Tokenizer(models.BPE())
    marks = pre_tokenizers.Split(Regex(r"[!-/:-@\[-`{-~]|\n"), "isolated")  # no token has a letter before a mark
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="first"), marks])
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=letters, show_progress=False)
    made.train_from_iterator([README, "  x" * 50, "    y" * 50], trainer)
    form = json.loads(made.to_str())
    named = [*vocabulary, *form["model"]["vocab"], *map("".join, more)]
    form["model"] |= {"byte_fallback": fallback, "fuse_unk": True, "unk_token": "<unk>"}
    form["model"]["merges"] += more
    form["model"]["vocab"] = {token: i for i, token in enumerate(named)}
    form["pre_tokenizer"] = form["pre_tokenizer"]["pretokenizers"][0] | {"split": False}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(form)), eos_token="</s>")


def whole(tokens, text):
    tokens.backend_tokenizer.encode_special_tokens = True
    return tokens.backend_tokenizer.encode(text, add_special_tokens=False).ids


TOKENIZERS["Llama 2"] = sentences()
ENCODERS = {name: Encoder(made) for name, made in TOKENIZERS.items()}


def apart(text):
    places = [result.start() for result in PLACES.finditer(text)]
    return [text[a:b] for a, b in pairwise([0, *places, len(text)]) if a < b]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(pieces=st.lists(st.sampled_from(TORN) | st.text(max_size=3), max_size=12))
def test_pieces_encode_to_the_tokens_of_the_whole_text(name, pieces):
    text, encode = "".join(pieces).encode(errors="ignore").decode(), ENCODERS[name]
    encode._forget()
    assert encode.cut
    tokens, counts = encode([encode.begun(text), "", encode.begun(text)])
    expected = whole(TOKENIZERS[name], text)
    assert tokens.tolist() == expected * 2 and counts.tolist() == [len(expected), 0, len(expected)]
    assert PIECES.findall(text) == apart(text)
    place = last_place(text, 0)
    assert place == len(text) - len((apart(text) or [""])[-1])
    parts = encode([encode.begun(text[:place]), text[place:]] if place else [encode.begun(text)])[0]
    assert parts.tolist() == expected


def test_piece_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(encoding, "KEPT", 50)
    encode = Encoder(TOKENIZERS["GPT-2"])
    for i in range(0, len(README), 500):
        tokens, _ = encode([README[i : i + 500]])
        assert tokens.tolist() == whole(TOKENIZERS["GPT-2"], README[i : i + 500])
    assert len(encode.known) < 300


def test_last_cut_is_found_across_windows():
    text = "a b" + "x" * 3 * (1 << 12)
    assert last_place(text, 0) == 1 and last_place(text, 2) == 0
    for at in ((1 << 12) - 1, 1 << 12, (1 << 12) + 1, 2 << 12):
        text = "y" * at + " " + "x" * (1 << 13)
        assert last_place(text, 0) == at


UNSAFE = {
    "a prefix": trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "another pattern": trained(split(r"\S+|\s+")),
    "no pre-tokenizer": trained(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
    "small letters": trained(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Lowercase()),
}
for added in (AddedToken("two words"), AddedToken("word", rstrip=True), AddedToken("\nx"), AddedToken("x,")):
    made = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    made.add_tokens([added])
    UNSAFE[repr(added.content)] = made
UNSAFE["unknown characters"] = sentences(fallback=False)
UNSAFE["a merge across a place"] = sentences(more=[["e", "."]])


@pytest.mark.parametrize("name", UNSAFE)
def test_tokenizers_that_merge_across_cuts_encode_whole_texts(name):
    assert not can_be_cut(UNSAFE[name])
    texts = ["two words, x\ny", "the second"]
    tokens, counts = Encoder(UNSAFE[name])(texts)
    expected = [whole(UNSAFE[name], text) for text in texts]
    assert tokens.tolist() == [*expected[0], *expected[1]] and counts.tolist() == [len(ids) for ids in expected]


def unpacked(file):
    return gzip.decompress(file.read_bytes()).decode()


@pytest.mark.skipif(not DATA, reason="HEADRACE_DATA is not set")
def test_neox_tokenizer_on_real_text():
    """Words of a vocabulary of 50,254, on books, articles and essays, and on their characters in random order."""
    files = Path(DATA or "")
    made = unpacked(files / "tokenizers/gpt-neox-20b/tokenizer.json.gz")
    tokens = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(made))
    texts = [unpacked(file)[:100_000] for file in sorted(files.glob("books/*.gz"))]
    texts += [file.read_text("utf-8") for file in sorted(files.glob("niah/*/*.txt"))[:20]]
    texts += [(files / "wikitext2/test.raw.txt").read_text("utf-8")[:100_000]]
    texts += ["".join(random.Random(i).sample(text, 20_000)) for i, text in enumerate(texts[:3])]
    encode = Encoder(tokens)
    assert encode.cut and encode.word == np.uint16
    result, counts = encode(texts)
    for text, part in zip(texts, np.split(result, np.cumsum(counts)[:-1]), strict=True):
        assert part.tolist() == whole(tokens, text)
