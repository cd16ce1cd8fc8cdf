"""The number of PyTorch's threads, chosen by the time of steps.

At the end of every parallel loop a thread waits for the others without giving up its core. Beside other work one of
them is always late: a small model can then take a hundred times as long with two threads as with one.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from statistics import median

import torch

Tell = Callable[[str], None]
BLOCK = 0.02  # seconds of steps that follow one another with the same number; at least one step
SLOWER = 8.0, 2.0, 1.2, 1.0, 1.0  # a number that in each round so far took this many times as long is left out
HOLDS = 10  # a choice holds for this many times the time of all steps before it
RECENT = 5  # blocks whose median shows that steps have become slow
SLOW = 3.0  # steps are slow if they take this many times as long as when they were measured
Time = tuple[float, int]  # seconds of a step, and its tokens


class Threads(AbstractContextManager):
    """Sets the number of threads of each step of a process whose steps are alike: in turn all of PyTorch's, half and 1,
    then the number with the least time. Measures again when steps have become SLOW times as long, and, as a machine
    also becomes idle, after HOLDS times the time of all steps so far. After a block `with Threads(…)`, the process has
    the number that it had before.

    The first steps of a process are slow with any number, and times vary with what else the machine does. So blocks of
    steps with each number alternate, in an order that each round reverses.

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
        self.tell, self.noun, self.seconds = tell, noun, 0.0
        self.steps = self._all_steps()
        self._set(next(self.steps))

    @property
    def measures(self) -> bool:
        """Whether there is more than one number to choose from."""
        return len(self.numbers) > 1

    def took(self, seconds: float, tokens: int = 1) -> None:
        """Notes the time of a step, and sets the number of threads of the next one. Steps are compared by the time of a
        token."""
        self.seconds += seconds
        if self.measures:
            self._set(self.steps.send((seconds, tokens)))

    def __exit__(self, *error: object) -> None:
        torch.set_num_threads(self.before)

    def _set(self, number: int) -> None:
        self.now = number
        torch.set_num_threads(number)

    def _all_steps(self) -> Generator[int, Time, None]:
        yield from self._block(self.numbers[0])
        while True:
            times = yield from self._race()
            chosen = min(times, key=times.__getitem__)
            each = ", ".join(f"{seconds:.2g} s with {number}" for number, seconds in times.items())
            self.tell(f"{chosen} of {self.numbers[0]} threads: {self.noun} takes {each}")
            yield from self._hold(chosen, times[chosen])

    def _block(self, number: int) -> Generator[int, Time, list[Time]]:
        """Yields the number of threads of each step, and returns the times of all but the first, in which threads
        start."""
        yield number
        times: list[Time] = []
        while not times or sum(seconds for seconds, _ in times) < BLOCK:
            times.append((yield number))
        return times

    def _race(self) -> Generator[int, Time, dict[int, float]]:
        """Returns the seconds of a token with each number of threads."""
        blocks: dict[int, list[list[Time]]] = {number: [] for number in self.numbers}
        times: dict[int, float] = {}
        left = self.numbers
        for slower in SLOWER:
            for number in left:
                blocks[number].append((yield from self._block(number)))
                times[number] = _of_a_token(*blocks[number])
            best = blocks[min(left, key=times.__getitem__)]
            left = [number for number in reversed(left) if _keeps_up(blocks[number], best, slower)]
            if len(left) == 1:
                break
        return times

    def _hold(self, number: int, fastest: float) -> Generator[int, Time, None]:
        recent: deque[float] = deque(maxlen=RECENT)
        end = self.seconds * (1 + HOLDS)
        while self.seconds < end:
            recent.append(_of_a_token((yield from self._block(number))))
            if len(recent) == RECENT and median(recent) > SLOW * fastest:
                self.tell(f"{self.noun} takes {median(recent):.2g} s, where it took {fastest:.2g} s")
                return


def _of_a_token(*blocks: list[Time]) -> float:
    seconds, tokens = map(sum, zip(*chain(*blocks), strict=True))
    return seconds / tokens


def _keeps_up(blocks: list[list[Time]], best: list[list[Time]], slower: float) -> bool:
    """Whether a token took, in some block, at most `slower` times as long as in the best number's of the same round."""
    return any(_of_a_token(own) <= slower * _of_a_token(other) for own, other in zip(blocks, best, strict=True))


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
                threads.took(time.perf_counter() - started, tokens)
        finally:
            self.ended += 1
            torch.set_num_threads(before)

    def _of(self, kind: str, tokens: int) -> Threads:
        key = kind, tokens.bit_length()
        if key not in self.kinds:
            size = "1 token" if tokens == 1 else f"{2 ** (key[1] - 1)} to {2 ** key[1] - 1} tokens"
            self.kinds[key] = Threads(self.number, self.tell, self.most, f"a token of {kind} of {size}")
        return self.kinds[key]
