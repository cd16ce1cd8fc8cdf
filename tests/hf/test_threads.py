"""The number of threads with which steps are fastest is found by their times, whatever else the machine does."""

import pytest
import torch

from headrace.hf import threads as measured
from headrace.hf.threads import RECENT, TRIES, Threads, ThreadsBySize


def run(threads, times, steps):
    """Steps that take times[number of threads]; returns the numbers of threads that they had."""
    used = []
    for _ in range(steps):
        used.append(torch.get_num_threads())
        threads.took(times[used[-1]])
    return used


@pytest.mark.parametrize("times", [{4: 9.0, 2: 0.5, 1: 0.2}, {4: 0.1, 2: 0.5, 1: 0.2}, {4: 0.3, 2: 0.1, 1: 0.2}])
def test_the_fastest_of_all_half_and_one_is_taken(times):
    torch.set_num_threads(4)
    said = []
    threads = Threads(None, said.append)
    assert run(threads, times, 3 * TRIES) == [4] * TRIES + [2] * TRIES + [1] * TRIES
    fastest = min(times, key=times.get)
    assert set(run(threads, times, 20)) == {fastest} and len(said) == 1
    assert said[0].startswith(f"{fastest} of 4 threads: a step takes {times[4]:.2g} s with 4, ")


def test_steps_that_become_slow_are_measured_again():
    torch.set_num_threads(2)
    said = []
    threads = Threads(None, said.append)
    run(threads, {2: 0.1, 1: 0.2}, 2 * TRIES)
    assert torch.get_num_threads() == 2
    run(threads, {2: 0.29}, 20)
    assert torch.get_num_threads() == 2 and len(said) == 1
    run(threads, {2: 10.0, 1: 0.2}, RECENT + 2 * TRIES)
    assert torch.get_num_threads() == 1 and len(said) == 3


def test_a_given_number_is_not_measured():
    before, threads = torch.get_num_threads(), Threads(3)
    assert run(threads, {3: 1.0}, 3 * TRIES) == [3] * 3 * TRIES
    threads.restore()
    assert torch.get_num_threads() == before


def test_generate_says_how_many_threads_it_took(run_command, saved_model):
    torch.set_num_threads(2)
    command = ("generate", saved_model, "--prompt", "a", "--temperature", 0, "--device", "cpu", "--max-new-tokens", 20)
    measured, given = run_command(*command), run_command(*command, "--threads", 2)
    assert torch.get_num_threads() == 2, "the process has the number that it had"
    assert measured.out == given.out and "with 2 threads" in given.err
    assert " with 1 thread\n" in measured.err or " with 2 threads\n" in measured.err
    assert "--threads=0; expected at least 1" in run_command(*command, "--threads", 0).err


def test_steps_of_other_sizes_have_numbers_of_their_own(monkeypatch):
    """Large steps are faster with two threads, small ones with one; between them the process has its own number."""
    torch.set_num_threads(2)
    clock, said, used = [0.0], [], []
    monkeypatch.setattr(measured.time, "perf_counter", lambda: clock[0])
    threads = ThreadsBySize(None, said.append)
    for _ in range(2 * TRIES + 1):
        for tokens in (64, 1, 127, 1):
            with threads.step("prompts", tokens):
                used.append((tokens, torch.get_num_threads()))
                clock[0] += tokens / used[-1][1] if tokens > 1 else used[-1][1]
            assert torch.get_num_threads() == 2
    assert used[-4:] == [(64, 2), (1, 1), (127, 2), (1, 1)]
    assert sorted(said) == [
        "1 of 2 threads: a token of prompts of 1 token takes 2 s with 2, 1 s with 1",
        "2 of 2 threads: a token of prompts of 64 to 127 tokens takes 0.5 s with 2, 1 s with 1",
    ]


def test_steps_with_others_inside_and_steps_that_fail_are_not_measured():
    torch.set_num_threads(2)
    threads = ThreadsBySize(None)
    for _ in range(2 * TRIES):
        with threads.step("prompts", 64):
            before = torch.get_num_threads()
            with threads.step("steps", 1):
                pass
            assert torch.get_num_threads() == before
        with pytest.raises(ValueError), threads.step("answers", 1):
            raise ValueError
    counts = {kind: sum(map(len, own.times.values())) for (kind, _), own in threads.kinds.items()}
    assert counts == {"prompts": 0, "steps": 2 * TRIES, "answers": 0} and torch.get_num_threads() == 2
