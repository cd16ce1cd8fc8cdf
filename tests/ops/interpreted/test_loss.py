"""The kernel of the loss against the cross-entropy of all logits in float64."""

import pytest
import torch
import torch.nn.functional as F

from headrace.ops import loss as module
from headrace.ops.backends.triton import cross_entropy
from headrace.ops.loss import IGNORED, linear_cross_entropy
from headrace.studies.verify import relative


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_loss_and_gradients(dtype, tolerance, scale, monkeypatch):
    monkeypatch.setattr(module, "PIECE_ON_GPU", 5 * 41)  # pieces of five tokens
    monkeypatch.setattr(cross_entropy, "WIDTH", 16)  # a row in three parts, the last one not full
    calls = []
    ours_of = cross_entropy.loss_and_errors
    monkeypatch.setattr(cross_entropy, "loss_and_errors", lambda *args: calls.append(1) or ours_of(*args))
    torch.manual_seed(0)
    hidden, weight = torch.randn(13, 12), torch.randn(41, 12) * scale
    labels = torch.randint(41, (13,))
    labels[[0, 5, 6, 7, 8, 9]] = IGNORED  # a whole piece among them
    hidden, weight = (x.to(dtype).requires_grad_() for x in (hidden, weight))
    ours = linear_cross_entropy(hidden, weight, labels)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    theirs = F.cross_entropy(F.linear(*exact), labels, reduction="sum")
    assert len(calls) == 3 and ours.dtype == torch.float32
    assert relative(ours.double(), theirs) <= tolerance
    found, expected = torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(theirs, exact)
    for x, y in zip(found, expected, strict=True):
        assert relative(x.double(), y) <= tolerance
    assert not found[0][[0, 5, 6, 7, 8, 9]].any()


def test_label_outside_of_the_vocabulary_is_refused():
    hidden, weight = torch.randn(3, 4), torch.randn(5, 4)
    with pytest.raises(RuntimeError, match="a label is not ignored"):
        linear_cross_entropy(hidden, weight, torch.tensor([0, 5, 1]))
