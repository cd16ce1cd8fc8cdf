"""A state as a file: what a model has read, to go on from in another process and on another device.

The file is in the format safetensors. Its tensors are those of the states at the last column and at each snapshot,
`COLUMN.PLACE.FIELD`, and the tokens with their mask. Its metadata are what `facts` returns, and the SHA-256 of metadata
and tensors together. It holds no code, and nothing is unpickled.

Dimensions: B batch, L tokens.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

import headrace

from ..hf.cache import HeadraceCache
from ..hf.model import HeadraceForCausalLM
from ..hf.snapshots import Snapshot
from ..ops.checks import check_tensor, require
from ..utils.errors import InputError, reading, require_each, shown
from ..utils.integrity import atomic, digest
from .checks import SUM

FORMAT = "headrace state, version 1"
COMPUTED_WITH = ("mixer", "style", "vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "intermediate_size",
                 "norm_eps", "rope_theta", "max_position_embeddings")  # fmt: skip
TOKENS, MASK, PADDED = "tokens", "mask", "padded"
UNKNOWN = "were read before the state was saved, by a cache that had not kept them"


@torch.no_grad()
def save_state(
    path: str | Path,
    cache: HeadraceCache,
    model: HeadraceForCausalLM,
    tokens: Tensor | None = None,
    *,
    replace: bool = False,
) -> None:
    """Writes the states of a cache and its snapshots to a file, from which `load_state` returns the same bits.
    Pending tokens are read first.

    Args:
        path: the file, which is complete or not there.
        cache: of `model`.
        tokens: [B, L], the tokens that the cache has read, padding included, and then any that it has not, such as the
            last one that `generate` returns; None: those that the cache has kept.
        replace: whether an existing file is replaced.

    Raises:
        InputError: the file exists, the cache is empty or of another model, or the tokens are not those of the cache.
    """
    check_new(path, replace)
    require(isinstance(cache, HeadraceCache), f"cache={shown(cache)}; expected a HeadraceCache")
    require_each(lambda x: isinstance(x, HeadraceForCausalLM), "a HeadraceForCausalLM, unwrapped", model=model)
    model.read_pending(cache)
    require(cache.states is not None, "the cache is empty, and has no state to save; expected one of a model that read")
    tensors = _states(cache) | _read(cache, tokens)
    require((why := _unlike(tensors, _blank(model), cache.columns)) is None, f"the cache is of another model: {why}")
    tensors = {name: x.detach().cpu().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
    taken, croppable = cache.snapshots.taken, str(cache.snapshots.croppable_from)
    marked, temporary = (" ".join(str(s.column) for s in taken if s.temporary or every) for every in (True, False))
    places = {"columns": str(cache.columns), "snapshots": marked, "temporary": temporary, "croppable_from": croppable}
    about = facts(model) | places | {"headrace": headrace.__version__}
    content = save(tensors, about | {SUM: _sum(about, tensors)})
    with atomic(Path(path), "wb") as file:
        file.write(content)


def load_state(path: str | Path, model: HeadraceForCausalLM) -> tuple[HeadraceCache, Tensor]:
    """Returns what `save_state` was given: a cache on the model's device, with its snapshots, and the tokens [B, L],
    first those that the cache has read and then any that it has not.

    Raises:
        InputError: for a file that cannot be read, is damaged or is not a state, and for a state of another model: of
            other weights, another configuration, another dtype or another vocabulary.
    """
    name = f"state {str(path)!r}"
    check_path(path)
    require_each(lambda x: isinstance(x, HeadraceForCausalLM), "a HeadraceForCausalLM, unwrapped", model=model)
    require(Path(path).is_file() or not Path(path).exists(), f"{name} cannot be read: it is not a regular file")
    with reading(f"{name} cannot be read"), safe_open(path, "pt") as file:
        about = file.metadata() or {}
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    kind = about.get("format")
    require(kind == FORMAT, f"{name} has the format {kind!r}; expected {FORMAT!r}, as `save_state` writes it")
    written = about.pop(SUM, None)
    require(written == _sum(about, tensors), f"{name} is damaged: it has another SHA-256 than when it was written")
    for fact, expected in facts(model).items():
        if (found := str(about.get(fact))) != expected:
            short = f"its {fact} is {found[:16]}, and this model's is {expected[:16]}"
            raise InputError(f"{name} is of another model: {short}")
    blank, columns = _blank(model), int(about["columns"])
    require((why := _unlike(tensors, blank, columns)) is None, f"{name} is damaged: {why}")
    tokens, mask = (None if x is None else x.to(model.device, copy=True) for x in map(tensors.get, (TOKENS, MASK)))
    assert tokens is not None
    cache = HeadraceCache()
    cache.replace(_restored(columns, blank, tensors), 0, UNKNOWN, counts=model.model.backbone.state_counts)
    if mask is None:
        cache.advance(columns, UNKNOWN)
    else:  # what is read again without padding before it is computed without a mask, as it was
        padded = int((~mask).any(0).nonzero().max()) + 1 if not mask.all() else 0
        cache.advance(padded, tokens[:, :padded], mask[:, :padded])
        cache.advance(columns - padded, tokens[:, padded:columns])
    marked, temporary = ([*map(int, about.get(name, "").split())] for name in ("snapshots", "temporary"))
    snapshots = cache.snapshots
    snapshots.croppable_from = max(snapshots.croppable_from, int(about["croppable_from"]))
    snapshots.taken = [Snapshot(c, _restored(c, blank, tensors), c in temporary) for c in marked if c < columns]
    if columns in marked:
        cache.snapshot(temporary=columns in temporary)
    return cache, tokens


def check_new(path: str | Path, replace: bool = False) -> None:
    """Raises InputError if the file of a state to be saved exists, unless it may be replaced, and if its folder can
    neither be written nor made."""
    check_path(path)
    require(replace or not Path(path).exists(), f"{str(path)!r} exists; expected the name of a new file")
    folder = next(parent for parent in Path(path).absolute().parents if parent.exists())
    can = folder.is_dir() and os.access(folder, os.W_OK)
    require(can, f"{str(path)!r} cannot be written: {str(folder)!r} is no folder that can")


def check_path(path: Any) -> None:
    require(isinstance(path, str | Path), f"path={shown(path)}; expected the name of a file")


def facts(model: Any) -> dict[str, str]:
    """What a state says of its model: format, vocabulary, dtype, and the digest of configuration and weights."""
    dtype = str(model.dtype).removeprefix("torch.")
    return {"format": FORMAT, "vocabulary": str(model.config.vocab_size), "dtype": dtype, "digest": model_digest(model)}


def model_digest(model: Any) -> str:
    """Returns the SHA-256 of a model's weights, as they are in memory now, and of what its configuration says about the
    computation. It does not depend on the device, nor on the files that the model was read from.

    It reads all weights, as the check of a checkpoint does when the checkpoint is loaded, with all cores."""
    configuration = {name: getattr(model.config, name) for name in COMPUTED_WITH}
    return digest([configuration, _digests(model.state_dict())])


def _digests(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The dtype, shape and SHA-256 of tensors. hashlib does not hold Python's lock."""

    def described(x: Tensor) -> list[Any]:
        content: Any = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return [str(x.dtype), list(x.shape), hashlib.sha256(content).hexdigest()]

    with ThreadPoolExecutor() as pool:
        return dict(zip(tensors, pool.map(described, tensors.values()), strict=True))


def _sum(about: dict[str, str], tensors: dict[str, Tensor]) -> str:
    return digest([about, _digests(tensors)])


def _states(cache: HeadraceCache) -> dict[str, Tensor]:
    """The tensors at each snapshot and at the end, by `COLUMN.PLACE.FIELD`. Keys and values are those at the end
    alone."""
    columns = {each.column: each.states for each in cache.snapshots.taken} | {cache.columns: cache.states or []}
    return {f"{column}.{name}": x for column, states in columns.items() for name, x in _named(states).items()}


def _named(states: list[Any]) -> dict[str, Tensor]:
    """{`PLACE.FIELD`: tensor} of states, NamedTuples or None, or of a snapshot, whose attention has a bool."""
    fields = {
        place: {PADDED: torch.tensor([state])} if isinstance(state, bool) else state._asdict()
        for place, state in enumerate(states)
        if state is not None
    }
    parts = ((f"{place}.{name}", x) for place, state in fields.items() for name, x in state.items())
    return {name: x for name, x in parts if isinstance(x, Tensor)}


def _read(cache: HeadraceCache, tokens: Any) -> dict[str, Tensor]:
    """The tokens, and the mask of those that the cache has kept, without which it does not go back."""
    columns, ids, mask = cache.columns, None, None
    with suppress(InputError):  # which says why ids are not kept
        ids, mask = cache.snapshots.ids(0, columns)
    if tokens is None:
        require(ids is not None, "tokens is None, and the cache has not kept what it read; expected the tokens [B, L]")
        tokens = ids
    check_tensor("tokens", tokens)
    shape, sizes = list(tokens.shape), [cache.batch_size, columns]
    fitting = len(shape) == 2 and shape[0] == cache.batch_size and shape[1] >= columns
    require(fitting, f"tokens has shape {shape}; expected {sizes}, which the cache has read, or more columns")
    if ids is None:
        return {TOKENS: tokens.to(torch.int64)}
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    same = bool((ids == tokens[:, :columns].to(ids.device))[mask].all())
    require(same, "tokens differs from what the cache has read; expected the same tokens, and any that follow them")
    return {TOKENS: tokens.to(torch.int64), MASK: mask}


@torch.no_grad()
def _blank(model: Any) -> list[Any]:
    """The states of a model after one token: their classes, and the devices of their tensors."""
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    return model.model.backbone(model.model.embed_tokens(token))[1]


def _unlike(tensors: dict[str, Tensor], blank: list[Any], columns: int) -> str | None:
    """A sentence about the first tensor that does not fit states like `blank`, or that is missing at the last column;
    None: all fit."""
    known = _named(blank)
    for name in known:
        if f"{columns}.{name}" not in tensors:
            return f"{name} is missing"
    for key in sorted(tensors.keys() - {TOKENS, MASK}):
        name, x = key.partition(".")[2], tensors[key]
        if name not in known and not name.endswith((".valid", PADDED)):  # of padding, and of snapshots, only
            return f"{name} is no tensor of this model"
        sizes = slice(1 + name.endswith((".k", ".v")), None)  # without sequences, and the columns of keys and values
        if name in known and x.shape[sizes] != known[name].shape[sizes]:
            return f"{name} has the sizes {list(x.shape[sizes])} for {list(known[name].shape[sizes])}"
    return None


def _restored(column: int, blank: list[Any], tensors: dict[str, Tensor]) -> list[Any]:
    """The states at a column, of the classes and on the devices of `blank`, in memory of their own."""
    states = []
    for place, one in enumerate(blank):
        fields = () if one is None else one._fields
        parts = {name: tensors[key] for name in fields if (key := f"{column}.{place}.{name}") in tensors}
        device = next((x.device for x in one or () if isinstance(x, Tensor)), None)
        values = dict.fromkeys(fields) | {name: x.to(device, copy=True) for name, x in parts.items()}
        padded = tensors.get(f"{column}.{place}.{PADDED}")
        states.append(type(one)(**values) if parts else None if padded is None else bool(padded))
    return states
