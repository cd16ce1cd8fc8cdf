"""Distillation from a teacher: its term of the loss, what it does to a run, and what is refused."""

import pytest
import torch

import tiny
from headrace import InputError, load
from headrace.training.distillation import divergence, teacher_of
from headrace.training.loop import answers
from trained import plain_loss, recipe, train


@pytest.fixture(scope="module")
def teacher(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    train(data, folder, tokens=128 * 12, mixer="transformer")
    return folder / "model"


@pytest.mark.parametrize("shifted", [False, True])
def test_the_divergence_is_the_literal_sum(shifted):
    """Over the positions that have a label."""
    teacher, model = (tiny.build("gla", vocab_size=31, num_hidden_layers=1).double() for _ in range(2))
    ids = torch.randint(31, (2, 7))
    labels = ids.clone()
    labels[0, 3] = -100
    batch = {"input_ids": ids, "shift_labels" if shifted else "labels": labels}
    logits = model(ids).logits
    found = divergence(teacher, logits, batch, answers(batch))
    p, q = teacher(ids).logits.detach().softmax(-1), logits.detach().softmax(-1)
    places = [(b, t) for b in range(2) for t in range(7 if shifted else 6)]
    labelled = [(b, t) for b, t in places if labels[b, t if shifted else t + 1] != -100]
    expected = sum(float((p[at] * (p[at] / q[at]).log()).sum()) for at in labelled)
    assert found.item() == pytest.approx(expected, rel=1e-10)
    found.backward()
    assert model.lm_head.weight.grad is not None and teacher.lm_head.weight.grad is None
    same = teacher(ids).logits
    assert abs(divergence(teacher, same, batch, answers(batch)).item()) < 1e-12


@torch.no_grad()
def distance(teacher, model, data):
    ids = torch.tensor([data.held_out[0]["input_ids"]])
    batch = {"input_ids": ids, "labels": ids}
    return divergence(teacher, model(ids).logits, batch, answers(batch)).item()


def test_a_student_comes_closer_to_its_teacher(teacher, data, tmp_path):
    alone = train(data, tmp_path / "alone", tokens=128 * 12, mixer="gla")
    taught = train(data, tmp_path / "taught", tokens=128 * 12, mixer="gla", teacher=str(teacher), kl=4.0)
    original = load(teacher)
    assert distance(original, taught.model, data) < distance(original, alone.model, data)
    assert all(torch.equal(p, q) for p, q in zip(original.parameters(), taught.teacher.parameters(), strict=True))
    final = taught.history.points[-1]["final_loss"]
    assert final == pytest.approx(plain_loss(taught.model, data.held_out), rel=1e-5), "the cross-entropy alone"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kl": 2.0}, "kl=2 without a teacher; expected teacher=FOLDER"),
        ({"kl": 0}, "kl=0"),
        ({"teacher": "nowhere"}, "'nowhere' has no config.json"),
        ({"vocab_size": 300}, "has vocab_size=257; expected that of the model, 300"),
    ],
)
def test_bad_settings_are_named(changes, sentence, teacher):
    given = changes if "kl" in changes else {"teacher": str(teacher)} | changes
    with pytest.raises(InputError, match=sentence):
        teacher_of(recipe(**given)[0])
