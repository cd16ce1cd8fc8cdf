"""What is wrong with a task is said before training, and nothing is wrong with those of headrace."""

import pytest

from headrace import InputError, register_task
from headrace.comparison.defaults import DEFAULTS
from headrace.tasks.check import check_task, description
from plugged import FILES, folder

__all__ = ["folder"]  # a fixture

HELD_OUT = """
    def held_out(self, rows, part="held-out"):
        return self.sample(torch.Generator().manual_seed(0), rows)

"""
SCORES = """
    def scores(self, answers):
        return {"loss": answers.loss}

"""
WRONG_TASKS = {
    ('    """Whether most tokens so far are ones."""\n', ""): "has no description; expected a docstring",
    ("vocab_size = 2", "vocab_size = 0"): "has vocab_size=0; expected a positive integer",
    ("    vocab_size = 2\n", ""): "has no 'vocab_size'; expected the members of headrace.tasks.Task",
    ("randint(2, (", "randint(3, ("): "rows with input_ids from 0 to 2; expected 0 to 1, below vocab_size",
    ("self.length), gen", "self.length + 1), gen"): "rows with input_ids [1024, 17] and shift_labels [1024, 17]",
    (", generator=generator", ""): "gives other rows at the second call of training",
    ("(lead > 0).long()", "bits * 0 - 100"): "rows with no label; expected a label in each row",
    ("(lead > 0).long()", "bits"): None,
    ('{"input_ids": bits, ', '{"ids": bits, '): "cannot be used: KeyError: 'input_ids'",
    ("@dataclass(frozen=True)\n", ""): "expected an instance of a frozen dataclass",
    ("frozen=True", "frozen=False"): "cannot be used: TypeError: unhashable type",
    ("length: int = 16", "length: int = 1"): "has too few different rows to hold some out",
    ('"majority", Majority', '"copy", Majority'): "task 'copy' exists already",
    ("steps=60", "stepz=60"): "the task majority has no field 'stepz'; did you mean 'steps'",
    ('("leaky", "fading-delta")', '"gla,gla"'): "--mixers='gla,gla' names one twice",
    ("    def draw", f"{HELD_OUT}    def draw"): "rows in other parts; expected different rows",
    ("    def draw", f"{SCORES}    def draw"): "has the scores {'loss': 0.0}; expected numbers, 'accuracy' and 'loss'",
}  # fmt: skip


@pytest.mark.parametrize("change", WRONG_TASKS, ids=lambda change: change[0].strip()[:12])
def test_wrong_task_is_refused_before_training(folder, run_command, change):
    (folder / "mine.py").write_text(FILES["majority.py"].replace(*change), "utf-8")
    code, _, error = run_command("recipes", "--plugin", "mine.py")
    sentence = WRONG_TASKS[change]
    assert (code, error) == (0, "") if sentence is None else code == 2 and sentence in error and error.count("\n") == 1


def test_what_is_no_task_is_refused():
    with pytest.raises(InputError, match="task 'five' is 5; expected an instance of a frozen dataclass"):
        register_task("five", 5)


def test_every_task_of_headrace_has_what_a_task_needs():
    for name, plan in DEFAULTS.items():
        if name in ("text", "masked", "spans", "needle", "digits"):  # which read data
            continue
        check_task(name, plan.task)
        assert all(description(plan.task)[:2])
