"""The tokenizer of a GGUF file as a fast tokenizer of transformers."""

from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ..files.checks import misfit
from ..ops.checks import require
from ..utils.errors import reading
from .fields import Config

# Without the prefix of their keys, in the form of `misfit`.
FORM = {
    "model": str, "pre?": str, "tokens": [str], "token_type": [int], "merges?": [str], "scores?": [float],
    "add_bos_token?": bool, "add_eos_token?": bool, "add_space_prefix?": bool,
    **{f"{kind}_token_id?": int for kind in ("bos", "eos", "eot", "eom", "padding", "unknown")},
}  # fmt: skip
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # types of tokens
SPACE = "▁"  # SentencePiece's, U+2581


class Split(NamedTuple):
    """How byte-level BPE splits a text.

    pre: the parts of a text, within which bytes are merged.
    normalizer: what changes the text before.
    llama3: whether a text begins with BOS, and a part that is a token stays whole, without merges."""

    pre: Any
    normalizer: Any = None
    llama3: bool = False


def _cl100k(digits: str) -> Any:
    """The parts of OpenAI's cl100k, with other parts of a number."""
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    others = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(f"{words}|{digits}|{others}"), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
# By llama.cpp's names. A text splits as by the tokenizer.json of the model that has given its name.
SPLITS = {
    "gpt-2": Split(GPT2),
    "smollm": Split(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])),
    "llama-bpe": Split(_cl100k(r"\p{N}{1,3}"), llama3=True),
    "qwen2": Split(_cl100k(r"\p{N}"), normalizers.NFC()),
    "deepseek-r1-qwen": Split(_cl100k(r"\p{N}")),
}


def tokenizer_of(metadata: Config) -> PreTrainedTokenizerFast:
    """Returns the tokenizer that the metadata of a file describes, with its chat template.

    transformers' own reader splits texts of SmolLM at other places than its tokenizer, and merges tokens of Llama 3
    that have to stay whole. InputError for a tokenizer of another kind."""
    prefix = "tokenizer.ggml."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    require("model" in own, "it has no tokenizer")
    kind = own["model"]
    require(kind in BACKENDS, f"its tokenizer is {kind!r}; expected gpt2 (byte-level BPE) or llama (SentencePiece)")
    wrong = misfit(own, FORM, "its tokenizer")
    require(wrong is None, str(wrong))
    split = own.get("pre")
    known = f"expected one of {', '.join(SPLITS)}"
    require(kind != "gpt2" or split in SPLITS, f"its tokenizer splits texts as {split!r}; {known}")
    names = {ours: _named(own, theirs) for ours, theirs in SPECIAL.items()}
    with reading("its tokenizer cannot be read"):
        backend = BACKENDS[kind](own, names)
        backend.add_special_tokens(_added(own, CONTROL))
        backend.add_tokens(_added(own, USER_DEFINED))
        _enclose(backend, own, names)
        template = metadata.get("tokenizer.chat_template")
        return PreTrainedTokenizerFast(
            tokenizer_object=backend, chat_template=template, clean_up_tokenization_spaces=False, **names
        )


def _named(own: Config, kind: str) -> str | None:
    """Returns a special token. InputError for an id outside the vocabulary."""
    token, tokens = own.get(f"{kind}_token_id"), own["tokens"]
    if token is None:
        return None
    require(0 <= token < len(tokens), f"its {kind}_token_id is {token}; expected one of {len(tokens)} tokens")
    return tokens[token]


def _added(own: Config, kind: int) -> list[AddedToken]:
    """Returns the tokens of a type, which stay whole in a text."""
    pairs = zip(own["tokens"], own["token_type"], strict=True)
    return [AddedToken(token, normalized=False, special=kind == CONTROL) for token, its in pairs if its == kind]


def _byte_level(own: Config, names: Config) -> Tokenizer:
    split = SPLITS[own["pre"]]
    merges = [tuple(merge.split(" ", 1)) for merge in own.get("merges", []) if merge]
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(own["tokens"])}, merges, ignore_merges=split.llama3))
    if split.normalizer is not None:
        backend.normalizer = split.normalizer
    backend.pre_tokenizer, backend.decoder = split.pre, decoders.ByteLevel()
    own.setdefault("add_bos_token", split.llama3)
    return backend


def _sentencepiece(own: Config, names: Config) -> Tokenizer:
    """Byte-pair encoding of SentencePiece, where spaces are letters, and unknown letters are bytes."""
    vocabulary, pairs = {token: i for i, token in enumerate(own["tokens"])}, []
    for token, score, kind in zip(own["tokens"], own["scores"], own["token_type"], strict=True):
        halves = [(token[:i], token[i:]) for i in range(1, len(token))] if kind == NORMAL else []
        known = [(vocabulary[a], vocabulary[b]) for a, b in halves if a in vocabulary and b in vocabulary]
        pairs += [(-score, *ids) for ids in known]
    merges = [(own["tokens"][a], own["tokens"][b]) for _, a, b in sorted(pairs)]
    model = models.BPE(vocabulary, merges, unk_token=names["unk_token"], fuse_unk=True, byte_fallback=True)
    backend, prefixed = Tokenizer(model), own.get("add_space_prefix", True)
    first = [normalizers.Prepend(SPACE)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
    spaces = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*spaces, decoders.Strip(" ", 1, 0)] if prefixed else spaces)
    own.setdefault("add_bos_token", True)
    return backend


BACKENDS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _enclose(backend: Tokenizer, own: Config, names: Config) -> None:
    """Puts BOS before a text and EOS after it, where the file says so."""
    bos, eos = (names[f"{kind}_token"] if own.get(f"add_{kind}_token") else None for kind in ("bos", "eos"))
    used = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]

    def around(*texts: str) -> list[str]:
        return [f"{part}:{i}" for i, text in enumerate(texts) for part in (bos, text, eos) if part is not None]

    if used:
        backend.post_processor = processors.TemplateProcessing(
            single=around("$A"), pair=around("$A", "$B"), special_tokens=used
        )
