"""The kernel of the loss against the cross-entropy of all logits in float64."""

import pytest
import torch
import torch.nn.functional as F

from headrace.ops import loss as module
from headrace.ops.backends.triton import cross_entropy
from headrace.ops.loss import IGNORED, linear_cross_entropy
from headrace.verification.verify import relative


@pytest.fixture(autouse=True)
def _rows_in_three_parts(monkeypatch):
    monkeypatch.setattr(cross_entropy, "WIDTH", 16)


def draw(scale=1.0, vocabulary=41):
    torch.manual_seed(0)
    labels = torch.randint(vocabulary, (13,))
    labels[[0, 5, 6, 7, 8, 9]] = IGNORED
    return torch.randn(13, 12), torch.randn(vocabulary, 12) * scale, labels


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_loss_and_gradients(dtype, tolerance, scale, monkeypatch):
    monkeypatch.setattr(module, "PIECE_ON_GPU", 3 * 41)  # pieces of three tokens
    calls, kernel = [], cross_entropy.loss_and_errors
    monkeypatch.setattr(cross_entropy, "loss_and_errors", lambda *args: calls.append(args) or kernel(*args))
    *tensors, labels = draw(scale)
    hidden, weight = (x.to(dtype).requires_grad_() for x in tensors)
    ours = linear_cross_entropy(hidden, weight, labels)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    theirs = F.cross_entropy(F.linear(*exact), labels, reduction="sum")
    assert len(calls) == 3 and ours.dtype == torch.float32 and relative(ours.double(), theirs) <= tolerance
    found, expected = torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(theirs, exact)
    for x, y in zip(found, expected, strict=True):
        assert relative(x.double(), y) <= tolerance


@pytest.mark.parametrize("masked", [0, 20])
def test_ignored_labels_give_no_loss_and_no_gradient(masked):
    """masked: the number of logits at the beginning that are −∞, with all of the first part."""
    hidden, weight, labels = draw()
    logits = hidden @ weight.T
    logits[:, :masked] = -torch.inf
    labels = labels.where(labels == IGNORED, labels.clamp(min=masked))
    exact = logits.double().requires_grad_()
    theirs = F.cross_entropy(exact, labels, reduction="sum")
    ours, errors = cross_entropy.loss_and_errors(logits, labels, IGNORED)
    assert relative(ours.double(), theirs) <= 1e-6
    assert relative(errors.double(), torch.autograd.grad(theirs, exact)[0]) <= 1e-6
    assert not errors[labels == IGNORED].any() and errors is logits


def test_label_outside_of_the_vocabulary_is_refused():
    hidden, weight, labels = draw()
    labels[1] = 41
    with pytest.raises(RuntimeError, match="a label is not ignored"):
        linear_cross_entropy(hidden, weight, labels)


def test_labels_may_have_any_stride():
    hidden, weight, labels = draw()
    labels = labels.clamp(min=0)
    wide = torch.stack([labels, labels.flip(0)], 1)[:, 0]
    for given in (wide, labels[:1].expand(13)):
        loss, _ = cross_entropy.loss_and_errors(hidden @ weight.T, given, IGNORED)
        assert relative(loss, F.cross_entropy(hidden @ weight.T, given, reduction="sum")) <= 1e-6
