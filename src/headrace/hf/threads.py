"""The number of PyTorch's threads, chosen by the time of steps.

At the end of every parallel loop a thread waits for the others without giving up its core. Beside other work one of
them is always late: a small model can then take a hundred times as long with two threads as with one.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch

Tell = Callable[[str], None]
TRIES = 3  # steps with each number of threads, of which the first, in which threads start, does not count
RECENT = 5  # steps whose median shows that they have become slow
SLOW = 3.0  # how many times as long as the fastest


class Threads:
    """Sets the number of threads of each step of a process whose steps are alike: first all of PyTorch's, half and 1 in
    turn, then the number with the fastest step. Measures again when steps have become SLOW times as long.

    Args:
        number: what is set, without a measurement; None: measured.
        tell: gets a sentence for each choice.
        most: PyTorch's threads; None: those that it has now.
        noun: what took the time that is noted.
    """

    def __init__(
        self, number: int | None, tell: Tell = lambda line: None, most: int | None = None, noun: str = "a step"
    ):  # fmt: skip
        self.before = torch.get_num_threads()
        most = most or self.before
        self.numbers = sorted({1, max(most // 2, 1), most}, reverse=True) if number is None else [number]
        self.tell, self.noun, self.fastest = tell, noun, 0.0
        self._measure()

    @property
    def measures(self) -> bool:
        """Whether there is more than one number to choose from."""
        return len(self.numbers) > 1

    def took(self, seconds: float) -> None:
        """Notes the time of a step, and sets the number of threads of the next one."""
        if not self.measures:
            return
        own = self.times[self.now]
        own.append(seconds)
        if not self.fastest and len(own) == TRIES:
            self._go_on()
        elif self.fastest and len(own) == RECENT and median(own) > SLOW * self.fastest:
            self.tell(f"{self.noun} takes {median(own):.2g} s, where the fastest took {self.fastest:.2g} s")
            self._measure()

    def restore(self) -> None:
        """Sets the number of threads that the process had before."""
        torch.set_num_threads(self.before)

    def _measure(self) -> None:
        self.times: dict[int, deque[float]] = {number: deque(maxlen=RECENT) for number in self.numbers}
        self.fastest = 0.0
        self._set(self.numbers[0])

    def _set(self, number: int) -> None:
        self.now = number
        torch.set_num_threads(number)

    def _go_on(self) -> None:
        """Goes on to the next number, or chooses one if all have been tried."""
        if left := [number for number, times in self.times.items() if not times]:
            self._set(left[0])
            return
        best = {number: min(list(times)[1:]) for number, times in self.times.items()}
        chosen = min(best, key=best.__getitem__)
        self.fastest = best[chosen]
        self._set(chosen)
        each = ", ".join(f"{seconds:.2g} s with {number}" for number, seconds in best.items())
        self.tell(f"{chosen} of {self.numbers[0]} threads: {self.noun} takes {each}")


class ThreadsBySize:
    """Sets the number of threads of steps that are not alike. Those of one kind, and of a size between two powers of
    two, have `Threads` of their own, by the time of a token. Between steps, the process has the number that it had.

    number, tell: as for `Threads`."""

    def __init__(self, number: int | None, tell: Tell = lambda line: None):
        self.number, self.tell, self.most = number, tell, torch.get_num_threads()
        self.kinds: dict[tuple[str, int], Threads] = {}
        self.ended = 0  # steps

    @contextmanager
    def step(self, kind: str, tokens: int) -> Iterator[None]:
        """The block is a step. A step with others inside, and one that fails, is not measured."""
        before, ended, threads = torch.get_num_threads(), self.ended, self._of(kind, tokens)
        torch.set_num_threads(threads.now)
        try:
            started = time.perf_counter()
            yield
            if self.ended == ended:
                threads.took((time.perf_counter() - started) / tokens)
        finally:
            self.ended += 1
            torch.set_num_threads(before)

    def _of(self, kind: str, tokens: int) -> Threads:
        key = kind, tokens.bit_length()
        if key not in self.kinds:
            size = "1 token" if tokens == 1 else f"{2 ** (key[1] - 1)} to {2 ** key[1] - 1} tokens"
            self.kinds[key] = Threads(self.number, self.tell, self.most, f"a token of {kind} of {size}")
        return self.kinds[key]
