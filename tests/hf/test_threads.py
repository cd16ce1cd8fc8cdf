"""The number of threads with which steps are fastest is found by their times, whatever else the machine does."""

import pytest
import torch

from headrace.hf.threads import RECENT, TRIES, Threads


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
