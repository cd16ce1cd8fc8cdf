"""The loss in pieces is F.cross_entropy's, and the model's the one that transformers' Trainer expects."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from headrace.ops import loss as module
from headrace.ops.loss import IGNORED, linear_cross_entropy
from headrace.verification.verify import relative
from tiny import build, close, tokens

N, D, V = 23, 12, 17


@pytest.fixture(autouse=True)
def _pieces_of_five_tokens(monkeypatch):
    monkeypatch.setattr(module, "PIECE", 5 * V)


def draw(dtype, scale=1.0):
    torch.manual_seed(0)
    hidden, weight = torch.randn(N, D, dtype=torch.float64), torch.randn(V, D, dtype=torch.float64) * scale
    labels = torch.randint(V, (N,))
    labels[[0, 3, 5, 6, 7, 8, 9, -1]] = IGNORED  # a whole piece among them
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
)
def test_loss_equals_cross_entropy_of_all_logits(dtype, tolerance, scale):
    hidden, weight, labels = draw(dtype, scale)
    ours = linear_cross_entropy(hidden, weight, labels)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    theirs = F.cross_entropy(F.linear(*exact), labels, reduction="sum")
    assert ours.dtype == torch.promote_types(dtype, torch.float32) and relative(ours.double(), theirs) <= tolerance
    gradients = torch.autograd.grad(3 * ours, [hidden, weight])
    for mine, their in zip(gradients, torch.autograd.grad(3 * theirs, exact), strict=True):
        assert mine.dtype == dtype and relative(mine.double(), their) <= tolerance
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(hidden, weight, labels), ours)


def test_sums_of_float16_in_a_piece_may_be_beyond_its_range():
    hidden, weight, labels = torch.full((N, D), 3e4).half(), torch.zeros(V, D).half().requires_grad_(), torch.zeros(N)
    (linear_cross_entropy(hidden, weight, labels.long()) / N).backward()
    close(weight.grad[0], torch.full((D,), -3e4 * (1 - 1 / V)).half(), 1e-3)


def test_only_labelled_tokens_cost_flops_on_a_cpu():
    hidden, weight, labels = draw(torch.float32)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        linear_cross_entropy(hidden, weight, labels)
    assert counter.get_total_flops() == 2 * int((labels != IGNORED).sum()) * D * V


def test_frozen_tensors_get_no_gradient():
    hidden, weight, labels = draw(torch.float32)
    linear_cross_entropy(hidden, weight.detach(), labels).backward()
    half = hidden.grad.clone()
    hidden.grad = None
    linear_cross_entropy(hidden, weight, labels).backward()
    assert torch.equal(hidden.grad, half)


def test_autocast_keeps_the_loss_in_float32():
    hidden, weight, labels = draw(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(hidden, weight, labels)
    ours.backward()
    rounded = linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), labels)
    assert ours.dtype == weight.grad.dtype == torch.float32 and torch.equal(ours, rounded)


def test_autocast_leaves_float64_as_it_is():
    """As in PyTorch's products."""
    given = draw(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(*given)
    assert torch.equal(ours, linear_cross_entropy(*given))


def test_gradients_pass_gradcheck():
    hidden, weight, labels = draw(torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, labels), (hidden, weight))


# --- in the model -------------------------------------------------------------------------------------------


def labelled(shift=False):
    labels = tokens(2)
    labels[0, :4] = IGNORED
    return {"shift_labels" if shift else "labels": labels}


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("count", [None, 5, torch.tensor(7)])
def test_training_loss_and_gradients_equal_transformers(shift, count):
    model, ids, labels = build("gla"), tokens(2), labelled(shift)
    options = labels | ({} if count is None else {"num_items_in_batch": count})
    gradients = []
    for skipped in (True, False):
        output = model.train()(ids, skip_logits=skipped, **options)
        assert (output.logits is None) == skipped
        model.zero_grad()
        output.loss.backward()
        gradients.append([output.loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for mine, theirs in zip(*gradients, strict=True):
        close(mine.double(), theirs.double(), 1e-5)  # transformers computes its loss in float32


@pytest.mark.parametrize("count", [None, 0, torch.tensor(0), torch.tensor(7)])
@pytest.mark.parametrize(
    "name", ["gla", "hybrid", "experts", "parallel"]
)  # the last has a cap, so that it needs logits
def test_batch_without_labels_has_loss_0_and_zero_gradients(name, count):
    model, ids = build(name).train(), tokens(2)
    options = {} if count is None else {"num_items_in_batch": count}
    for labels in (
        {"labels": torch.full_like(ids, IGNORED)},
        {"labels": ids, "shift_labels": ids.new_full(ids.shape, -100)},
    ):
        for mask in (None, torch.zeros_like(ids)):
            model.zero_grad()
            loss = model(ids, mask, skip_logits=True, **labels, **options).loss
            loss.backward()
            assert loss == 0 and all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)
            assert model.lm_head.weight.grad is not None


def test_part_of_a_label_divides_the_loss():
    """As of transformers' Trainer, which divides the number by that of the processes of a row."""
    model, ids = build("gla").train(), tokens(1)
    labels = ids.masked_fill(torch.arange(ids.shape[1]) != 3, IGNORED)
    whole = model(ids, labels=labels).loss
    close(model(ids, labels=labels, num_items_in_batch=torch.tensor(0.5)).loss, 2 * whole)


def test_a_model_without_memory_has_a_loss_without_numbers():
    """On the meta device, which has no autocast."""
    model, ids = build("gla").to("meta"), tokens(2).to("meta")
    loss = model(ids, labels=ids, skip_logits=True).loss
    assert loss.is_meta and loss.shape == ()


@pytest.mark.parametrize("training", [False, True])
def test_logits_are_returned_unless_skipped(training):
    model, ids, labels = build("gla").train(training), tokens(2), labelled()
    whole = model(ids, **labels)
    assert torch.equal(whole.logits, model(ids).logits) and model(ids, skip_logits=True, **labels).logits is None
    assert torch.equal(model(ids, skip_logits=True).logits, whole.logits)  # nothing to compute but logits
    close(model(ids, logits_to_keep=2, **labels).logits, whole.logits[:, -2:])
    close(model(ids, logits_to_keep=torch.tensor([3, 1]), **labels).logits, whole.logits[:, [3, 1]])
    for keep in (2, torch.tensor([3, 1]), torch.arange(ids.shape[1]).flip(0)):
        assert relative(model(ids, logits_to_keep=keep, **labels).loss, whole.loss) < 1e-6


def test_replaced_head_or_loss_is_used():
    class Louder(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model, ids, labels = build("gla").train(), tokens(2), labelled()
    labels["skip_logits"] = True
    plain = model(ids, **labels).loss
    louder = Louder(model.lm_head.in_features, model.lm_head.out_features, bias=False).double()
    louder.weight, model.lm_head = model.lm_head.weight, louder
    assert relative(model(ids, **labels).loss, plain) > 1e-2
    model.loss_function = lambda logits, **_: logits.sum()
    assert model(ids, **labels).loss == model(ids).logits.sum()


@pytest.mark.parametrize("hopper", [False, True])
def test_fake_tensors_of_a_gpu_need_none_and_take_no_kernel(hopper, monkeypatch):
    """As in PyTorch's estimates of memory."""
    if hopper:
        monkeypatch.setattr(module, "is_hopper", lambda device: True)
        monkeypatch.setattr(module.limits, "missing", lambda: None)
    with FakeTensorMode():
        assert not module._has_kernel(torch.empty(N, D, device="cuda"))
