"""The prefix cache: the states after pieces of prompts, from which other prompts with the same beginning go on."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ..hf.cache import HeadraceCache
from ..hf.snapshots import copied, is_growing
from ..layers.attention.attention import AttentionState
from ..utils.errors import InputError

Tokens = tuple[int, ...]
PIECE = 128  # tokens of prompts that are processed in one call
PARTS = 32, 64, 96  # numbers of tokens after which a piece is divided, if others have begun like it


class Saved(NamedTuple):
    """The states of one sequence, which nothing writes to. Keys and values of softmax attention have the length of the
    sequence: these are of the tokens after `before`."""

    states: list[Any]
    length: int  # tokens
    before: "Saved | None" = None

    @classmethod
    def of(cls, cache: HeadraceCache, row: int, length: int, before: "Saved | None") -> "Saved":
        """Copies the states of one sequence of a cache."""
        states = cache.states or []
        if not any(map(is_growing, states)):
            before = None  # the states are whole
        return cls([_copy(state, row, before.length if before else 0) for state in states], length, before)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for state in self.states for x in state or () if isinstance(x, Tensor))

    def whole(self) -> list[Any]:
        """The states with the keys and values of all tokens."""
        if self.before is None:
            return self.states
        path = [self]
        while path[-1].before is not None:
            path.append(path[-1].before)
        pieces = zip(*(saved.states for saved in reversed(path)), strict=True)
        return [_joined(states, 1) if is_growing(states[-1]) else states[-1] for states in pieces]


def joined(several: Sequence[list[Any]], columns: int) -> HeadraceCache:
    """Returns a cache of the sequences of several lists of states, in memory of its own."""
    cache = HeadraceCache()
    cache.replace([_joined(states, 0) for states in zip(*several, strict=True)], columns)
    return cache


def _copy(state: Any, row: int, start: int) -> Any:
    """Copies one sequence's state, and of keys and values those from `start` on."""
    if is_growing(state):
        assert state.valid is None  # the server has no padding
        k, v = (x[row : row + 1, start:].clone() for x in state[:2])
        return AttentionState(k, v)
    return copied(state, lambda x: x[row : row + 1].clone())


def _joined(states: Sequence[Any], dim: int) -> Any:
    if states[0] is None:
        return None
    parts = zip(*states, strict=True)
    return type(states[0])(*(torch.cat(x, dim) if isinstance(x[0], Tensor) else None for x in parts))


class Prefix:
    """The first tokens of prompts: those of a shorter prefix, and a piece. It exists as long as something refers to it
    or to a longer one."""

    def __init__(self, parent: "Prefix | None" = None, tokens: Tokens = ()):
        self.parent = parent
        self.length: int = len(tokens) + (parent.length if parent else 0)
        self.longer: dict[int, WeakValueDictionary[Tokens, Prefix]] = {}  # by the number of tokens of their pieces
        self.parts: WeakValueDictionary[Tokens, Prefix] = WeakValueDictionary()  # the first tokens of these pieces
        self.reader: Any = None  # what is about to read the piece
        self.saved: Saved | None = None
        self.logits: Tensor | None = None  # [1, vocabulary], of the next token, if a prompt has ended here

    def then(self, tokens: Tokens) -> "Prefix":
        """Returns the prefix that is longer by these tokens."""
        pieces = self.longer.setdefault(len(tokens), WeakValueDictionary())
        prefix = pieces.get(tokens)
        if prefix is None:
            prefix = pieces[tokens] = Prefix(self, tokens)
            self.parts.update({tokens[:count]: prefix for count in PARTS if count < len(tokens)})
        return prefix

    def cut(self, tokens: Tokens) -> Tokens:
        """Returns the part of a piece with which another piece begins, or the piece."""
        if tokens in self.longer.get(len(tokens), ()):
            return tokens
        parts = (tokens[:count] for count in reversed(PARTS) if count < len(tokens))
        return next((part for part in parts if part in self.parts), tokens)

    def of(self, ids: Tokens) -> Iterator["Prefix"]:
        """Yields this prefix and all longer ones of a prompt."""
        left = [self]
        while left:
            yield (prefix := left.pop())
            for count, pieces in prefix.longer.items():
                if longer := pieces.get(ids[prefix.length : prefix.length + count]):
                    left.append(longer)


class PrefixCache:
    """Keeps the states of the prefixes that were used last, in at most `capacity` bytes. 0: none."""

    def __init__(self, capacity: int):
        self.capacity, self.root = capacity, Prefix()
        self.kept: OrderedDict[Prefix, int] = OrderedDict()  # with their bytes, the least recently used first
        self.bytes = self.evictions = 0
        self.queried = self.hits = 0  # tokens of prompts, and those of them that were not read again

    def keep(self, prefix: Prefix, cache: HeadraceCache, row: int, logits: Tensor | None = None) -> Saved:
        """Saves the states after a prefix, those of one sequence of a cache, and the logits of the next token."""
        before = prefix.parent.saved if prefix.parent else None
        saved = prefix.saved or Saved.of(cache, row, prefix.length, before)
        logits = prefix.logits if logits is None else logits.clone()
        size = saved.nbytes + (0 if logits is None else logits.nbytes)
        if size <= self.capacity:
            self.bytes += size - self.kept.get(prefix, 0)
            self.kept[prefix], prefix.saved, prefix.logits = size, saved, logits
            self.use(prefix)
            while self.bytes > self.capacity:
                oldest, freed = self.kept.popitem(last=False)
                oldest.saved = oldest.logits = None
                self.bytes -= freed
                self.evictions += 1
        return saved

    def use(self, prefix: Prefix) -> None:
        """Makes a prefix the last used. The keys and values of shorter ones are parts of its own: they are used later
        than it, so that it is evicted before them."""
        assert prefix.saved is not None
        parts = prefix.saved.before is not None
        while prefix in self.kept:
            self.kept.move_to_end(prefix)
            if not parts or prefix.parent is None:
                break
            prefix = prefix.parent


@torch.inference_mode()
def check_room(model: Any, capacity: int) -> None:
    """Raises InputError for a capacity, unless it is 0, that the states of the model after a piece do not fit in."""
    if not capacity:
        return
    cache, tokens = HeadraceCache(), min(PIECE, model.config.max_position_embeddings)
    ids = torch.zeros(1, tokens, dtype=torch.long, device=model.device)
    logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    size = Saved.of(cache, 0, tokens, None).nbytes + logits.nbytes
    if capacity < size:
        raise InputError(f"--prefix-cache={capacity} bytes; a state of this model needs {size}; expected more, or 0")


def unsupported_reason(model: nn.Module) -> str | None:
    """Returns why the states of a model are not kept, or None."""
    for name, module in model.named_modules():
        rope = getattr(getattr(module, "spec", None), "rope", None)
        if rope is not None and rope.by_length:
            return f"{name} has rope.kind={rope.kind!r}, with which the states depend on how a prompt is divided"
    return None
