"""Errors that Triton's interpreter does not detect: out-of-bounds accesses and data races.

The interpreter runs the programs of a launch one after another, each as one thread, and loads from any address of the
process. On a GPU programs run at the same time, and so do the warps of a program. `watch` makes a launch raise
InvalidAccess, unless the kernel is FLA's, if it

- touches an address outside the elements of the tensors that the kernel was given (of a strided view: between them);
- touches an element that another of its programs stores, or stores one that another loads;
- touches an element that the same program has stored, or stores one that it has loaded, without `tl.debug_barrier`;
- stores one element twice at once.
"""

from functools import wraps

import numpy as np
import torch
from triton.runtime import interpreter

NOBODY, MANY = -1, -2


class InvalidAccess(AssertionError):
    """An out-of-bounds access or a data race."""


class Storage:
    """The elements of a storage that a launch may touch, and which program has touched them, and when."""

    def __init__(self, storage: torch.UntypedStorage, size: int):
        n = storage.nbytes() // size
        self.start, self.size = storage.data_ptr(), size
        self.given = torch.zeros(n, dtype=torch.bool)
        self.writer, self.reader = np.full(n, NOBODY), np.full(n, NOBODY)
        self.written, self.read = np.full(n, NOBODY), np.full(n, NOBODY)

    def give(self, x: torch.Tensor) -> None:
        self.given.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)

    def find(self, addresses: np.ndarray) -> np.ndarray:
        """Returns the elements at the addresses."""
        elements = (addresses.astype(np.int64) - self.start) // self.size
        inside = (elements >= 0) & (elements < len(self.given))
        inside[inside] = self.given.numpy()[elements[inside]]
        if not inside.all():
            raise InvalidAccess(f"touches element {elements[~inside][0]} of a storage, which it was not given")
        return elements


class Launch:
    """The memory of one launch: its storages, the program that runs, and how many barriers have been passed."""

    def __init__(self, tensors: list[torch.Tensor]):
        self.program, self.moment = NOBODY, 0
        storages: dict[int, Storage] = {}
        for x in tensors:
            storage = x.untyped_storage()
            if storage.nbytes():
                found = storages.setdefault(storage.data_ptr(), Storage(storage, x.element_size()))
                assert found.size == x.element_size(), "two views of one storage have different element sizes"
                found.give(x)
        self.starts = np.array(sorted(storages))
        self.storages = [storages[start] for start in sorted(storages)]

    def next_program(self) -> None:
        self.program, self.moment = self.program + 1, self.moment + 1

    def barrier(self) -> None:
        self.moment += 1

    def find(self, addresses: np.ndarray) -> tuple[Storage, np.ndarray]:
        at = int(np.searchsorted(self.starts, int(addresses[0]), side="right")) - 1
        if at < 0:
            raise InvalidAccess("touches an address below all tensors, which it was not given")
        return self.storages[at], self.storages[at].find(addresses)

    def load(self, addresses: np.ndarray) -> None:
        storage, at = self.find(addresses)
        self.check(storage.writer[at], storage.written[at], "loads", "stored")
        readers = storage.reader[at]
        storage.reader[at] = np.where((readers == NOBODY) | (readers == self.program), self.program, MANY)
        storage.read[at] = self.moment

    def store(self, addresses: np.ndarray) -> None:
        storage, at = self.find(addresses)
        self.check(storage.writer[at], storage.written[at], "stores", "stored")
        self.check(storage.reader[at], storage.read[at], "stores", "loaded")
        if len(np.unique(at)) < len(at):
            raise InvalidAccess("stores one element twice at once")
        storage.writer[at], storage.written[at] = self.program, self.moment

    def check(self, whose: np.ndarray, when: np.ndarray, does: str, before: str) -> None:
        if not np.isin(whose, (NOBODY, self.program)).all():
            raise InvalidAccess(f"{does} what another program has {before}")
        if (when == self.moment).any():
            raise InvalidAccess(f"{does} what it has {before} itself, without a barrier")


def watch() -> None:
    """Patches the interpreter to check every load and store."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    launches: list[Launch] = []

    def before(method, does):
        @wraps(method)
        def patched(self, *args):
            if launches:
                does(launches[-1], *args)
            return method(self, *args)

        return patched

    def load(launch, pointers, mask, *_):
        if mask.data.any():
            launch.load(pointers.data[np.broadcast_to(mask.data, pointers.data.shape)])

    def store(launch, pointers, value, mask, *_):
        if mask.data.any():
            launch.store(pointers.data[np.broadcast_to(mask.data, pointers.data.shape)])

    builder.create_masked_load = before(builder.create_masked_load, load)
    builder.create_masked_store = before(builder.create_masked_store, store)
    builder.create_barrier = before(builder.create_barrier, lambda launch: launch.barrier())
    builder.set_grid_idx = before(builder.set_grid_idx, lambda launch, *_: launch.next_program())
    run = executor.__call__

    @wraps(run)
    def launched(self, *args, **kwargs):
        if self.fn.__module__.startswith("fla."):  # which relies on the order of stores and loads of one program
            return run(self, *args, **kwargs)
        launches.append(Launch([x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]))
        try:
            return run(self, *args, **kwargs)
        finally:
            launches.pop()

    executor.__call__ = launched
