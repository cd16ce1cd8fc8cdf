"""The number of threads with which steps are fastest is found by their times, whatever else the machine does."""

import random

import pytest
import torch

from headrace.files import threads as measured
from headrace.files.threads import RECENT, Threads, ThreadsBySize


def run(threads, time_of, steps):
    """Steps that take time_of(number of threads, index of the step); returns the numbers of threads that they had."""
    used = []
    for index in range(steps):
        used.append(torch.get_num_threads())
        threads.took(time_of(used[-1], index))
    return used


def begun(most):
    torch.set_num_threads(most)
    said = []
    return Threads(None, said.append), said


@pytest.mark.parametrize("times", [{4: 9.0, 2: 0.5, 1: 0.2}, {4: 0.1, 2: 0.5, 1: 0.2}, {4: 0.3, 2: 0.1, 1: 0.2}])
def test_the_fastest_of_all_half_and_one_is_taken(times):
    threads, said = begun(4)
    used = run(threads, lambda number, _: times[number], 40)
    fastest = min(times, key=times.get)
    assert set(used[-8:]) == {fastest} and len(said) == 1
    assert said[0].startswith(f"{fastest} of 4 threads: a step takes {times[4]:.2g} s with 4, ")
    assert times[4] < 9 or used.count(4) == 4, "a number that takes 45 times as long is tried once"


def beside_other_work(number, index):
    """With two threads, one step in four waits for a thread that has no core."""
    return 1e-3 if number == 1 else 0.8e-3 if index % 4 else 30e-3


def slow_first(number, index):
    return {2: 1.0, 1: 1.2}[number] * 1e-3 * (1 + 5 * 0.9**index)


def varying(times, seed):
    """Those of an idle machine."""
    noise = random.Random(seed)
    return lambda number, _: times[number] * 1e-3 * noise.lognormvariate(0, 0.3)


@pytest.mark.parametrize(
    ("time_of", "fastest"),
    [
        (slow_first, 2), (beside_other_work, 1),
        *((varying({2: 1.0, 1: 1.6}, seed), 2) for seed in range(5)),
        *((varying({2: 1.6, 1: 1.0}, seed), 1) for seed in range(5)),
    ],
)  # fmt: skip
def test_one_choice_is_made_whatever_else_the_machine_does(time_of, fastest):
    threads, said = begun(2)
    run(threads, time_of, 300)
    assert len(said) == 1 and torch.get_num_threads() == fastest


def test_a_machine_that_becomes_idle_is_measured_again():
    threads, said = begun(2)
    run(threads, beside_other_work, 100)
    run(threads, lambda number, _: 1e-3 / number, 5000)
    assert torch.get_num_threads() == 2 and said[1:] == ["2 of 2 threads: a step takes 0.0005 s with 2, 0.001 s with 1"]


def test_steps_that_become_slow_are_measured_again():
    threads, said = begun(2)
    run(threads, lambda number, _: 0.2 / number, 20)
    assert torch.get_num_threads() == 2
    run(threads, lambda *_: 0.29, 10)
    assert torch.get_num_threads() == 2 and len(said) == 1
    run(threads, lambda number, _: {2: 0.4, 1: 0.2}[number], 2 * RECENT + 10)
    assert torch.get_num_threads() == 1 and len(said) == 3


def test_a_given_number_is_not_measured():
    before = torch.get_num_threads()
    with Threads(3) as threads:
        assert run(threads, lambda *_: 1.0, 9) == [3] * 9
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
    for _ in range(20):
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
    for _ in range(6):
        with threads.step("prompts", 64):
            before = torch.get_num_threads()
            with threads.step("steps", 1):
                pass
            assert torch.get_num_threads() == before
        with pytest.raises(ValueError), threads.step("answers", 1):
            raise ValueError
    measured_kinds = {kind: own.seconds > 0 for (kind, _), own in threads.kinds.items()}
    assert measured_kinds == {"prompts": False, "steps": True, "answers": False} and torch.get_num_threads() == 2
