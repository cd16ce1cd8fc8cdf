"""The number of PyTorch's threads, chosen by the time of steps.

At the end of every parallel loop a thread waits for the others without giving up its core. Beside other work one of
them is always late: a small model can then take a hundred times as long with two threads as with one.
"""

from collections import deque
from collections.abc import Callable
from statistics import median

import torch

TRIES = 3  # steps with each number of threads, of which the first, in which threads start, does not count
RECENT = 5  # steps whose median shows that they have become slow
SLOW = 3.0  # how many times as long as the fastest


class Threads:
    """Sets the number of threads of each step of a process whose steps are alike: first all of PyTorch's, half and 1 in
    turn, then the number with the fastest step. Measures again when steps have become SLOW times as long.

    Args:
        number: what is set, without a measurement; None: measured.
        tell: gets a sentence for each choice.
    """

    def __init__(self, number: int | None, tell: Callable[[str], None] = lambda line: None):
        self.before = most = torch.get_num_threads()
        self.numbers = sorted({1, max(most // 2, 1), most}, reverse=True) if number is None else [number]
        self.tell, self.fastest = tell, 0.0
        self._measure()

    @property
    def measures(self) -> bool:
        """Whether there is more than one number to choose from."""
        return len(self.numbers) > 1

    def took(self, seconds: float) -> None:
        """Notes the time of a step, and sets the number of threads of the next one."""
        if not self.measures:
            return
        own = self.times[torch.get_num_threads()]
        own.append(seconds)
        if not self.fastest and len(own) == TRIES:
            self._go_on()
        elif self.fastest and len(own) == RECENT and median(own) > SLOW * self.fastest:
            self.tell(f"a step takes {median(own):.2g} s, where the fastest took {self.fastest:.2g} s")
            self._measure()

    def restore(self) -> None:
        """Sets the number of threads that the process had before."""
        torch.set_num_threads(self.before)

    def _measure(self) -> None:
        self.times: dict[int, deque[float]] = {number: deque(maxlen=RECENT) for number in self.numbers}
        self.fastest = 0.0
        torch.set_num_threads(self.numbers[0])

    def _go_on(self) -> None:
        """Goes on to the next number, or chooses one if all have been tried."""
        if left := [number for number, times in self.times.items() if not times]:
            torch.set_num_threads(left[0])
            return
        best = {number: min(list(times)[1:]) for number, times in self.times.items()}
        chosen = min(best, key=best.__getitem__)
        self.fastest = best[chosen]
        torch.set_num_threads(chosen)
        each = ", ".join(f"{seconds:.2g} s with {number}" for number, seconds in best.items())
        self.tell(f"{chosen} of {self.numbers[0]} threads: a step takes {each}")
