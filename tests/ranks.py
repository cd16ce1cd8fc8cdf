"""What each process of a group computes in test_context_parallel.py, and how far it is from one process."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from equation import inputs
from groups import refused
from headrace import HeadraceCache, context_parallel, layers, linear_attention
from headrace.layers.blocks import stack
from headrace.ops.parallel import context
from headrace.verification.verify import relative
from tiny import build, perturbed

T, H, K, V = 32, 4, 6, 5
# An empty sequence, one that ends at a border, and one that begins with the last token before a border, over three of
# four processes.
BOUNDS = [0, 3, 3, 8, 15, 27, 32]
OPS = {
    "none": {}, "fixed": {"decay": "fixed"}, "scalar": {"decay": "scalar"}, "vector": {"decay": "vector"},
    "bonus": {"decay": "vector", "bonus": True}, "normalize": {"decay": "scalar", "normalize": True},
    "delta": {"rule": "delta"}, "gated delta": {"rule": "delta", "decay": "scalar"},
    "kda": {"rule": "delta", "decay": "vector"}, "grouped": {"decay": "vector", "groups": H, "queries": 2},
    "grouped delta": {"rule": "delta", "decay": "scalar", "groups": H, "queries": 2},
}  # fmt: skip


def check(names):
    results = {}
    for kind, options in OPS.items():
        for packed in (False, True):
            results[f"op, {kind}, {'packed' if packed else 'rows'}"] = op_error(packed, **options)
    for name in names:
        for packed in (False, True):
            results[f"layer, {name}, {'packed' if packed else 'rows'}"] = layer_error(name, packed)
        results[f"nan, {name}"] = nan_error(name)
    results["model"] = model_error()
    results["model that reads"] = reading_error()
    results["computed again"] = max(recomputed_error(reentrant) for reentrant in (False, True))
    results["one process without gradients"] = frozen_error()
    return results | {"refused": refusals(), "bytes": sent()}


def op_error(packed, rule="add", **options):
    torch.manual_seed(0)
    rows, wide = (1, len(BOUNDS) - 1) if packed else (2, 2)
    sizes = {"rows": rows, "tokens": T, "heads": H, "groups": H // 2, "key": K, "value": V, "n": wide}
    whole, ends = inputs(**sizes | options), torch.tensor(BOUNDS) if packed else None
    call = partial(linear_attention, rule=rule, normalize="normalize" in options, cu_seqlens=ends)
    out, final = call(**whole)
    weight, weight_final = torch.randn_like(out), torch.randn_like(final)
    with context_parallel() as part:
        last = part.rank == part.size - 1
        mine = {name: cut(part, y).detach().clone().requires_grad_() for name, y in whole.items()}
        got, state = call(**mine)
        of_state = 0 * state.sum() if packed else (state * weight_final).sum() * last
        ((got * part.split(weight)).sum() + of_state).backward()
        ((out * weight).sum() + (0 if packed else (final * weight_final).sum())).backward()
        errors = [relative(got, part.split(out))]
        if last:
            errors.append(relative(state[-1], final[-1]))  # in a pack, the sequence that ends in this process
        for name, y in whole.items():
            errors.append(relative(summed(part, mine[name].grad, y), cut(part, y.grad)))
    return max(errors)


def cut(part, x):
    """This process's tokens; states, and what has no tokens, whole."""
    return part.split(x) if x.dim() >= 3 and x.shape[1] == T else x


def summed(part, grad, like):
    """The gradient to this process's tokens, or the sum over processes for what all of them have."""
    if like.dim() >= 3 and like.shape[1] == T:
        return grad
    dist.all_reduce(grad)
    return grad


def layer_error(name, packed):
    torch.manual_seed(1)
    layer = perturbed(layers.Mixer(name, hidden_size=16, num_heads=4).double(), 0.3)
    x = torch.randn(1 if packed else 2, T, 16, dtype=torch.float64, requires_grad=True)
    ends, weight = torch.tensor(BOUNDS) if packed else None, torch.randn_like(x)
    y, _ = layer(x, cu_seqlens=ends)
    expected = torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()])
    with context_parallel() as part:
        mine = part.split(x.detach()).requires_grad_()
        got, _ = layer(mine, cu_seqlens=ends)
        grads = torch.autograd.grad((got * part.split(weight)).sum(), [mine, *layer.parameters()])
        errors = [relative(got, part.split(y)), relative(grads[0], part.split(expected[0]))]
    for grad, want in zip(grads[1:], expected[1:], strict=True):
        dist.all_reduce(grad)
        errors.append(relative(grad, want))
    return max(errors)


def nan_error(name):
    """Of the sequences without NaN in a pack where others have one: at a border where a sequence ends, and in one that
    ends in a process in which the next begins."""
    torch.manual_seed(7)
    layer = perturbed(layers.Mixer(name, hidden_size=16, num_heads=4).double(), 0.3)
    x, weight = torch.randn(2, 1, T, 16, dtype=torch.float64)
    ends, errors = torch.tensor(BOUNDS), []
    for token in (7, 16):
        whole = x.index_fill(1, torch.tensor([token]), torch.nan).requires_grad_()
        owner = torch.bucketize(torch.arange(T), ends[1:], right=True)
        others = (owner != owner[token])[None, :, None]
        y, _ = layer(whole, cu_seqlens=ends)
        (expected,) = torch.autograd.grad((y * weight).sum(), whole)
        with context_parallel() as part:
            mine = part.split(whole.detach()).requires_grad_()
            got, _ = layer(mine, cu_seqlens=ends)
            (grad,) = torch.autograd.grad((got * part.split(weight)).sum(), mine)
            for actual, exact in ((got, y), (grad, expected)):
                assert exact.where(others, 0).isfinite().all()
                errors.append(relative(*(torch.where(part.split(others), z, 0) for z in (actual, part.split(exact)))))
            reached = part.split(~others & (torch.arange(T) >= token)[None, :, None])
            errors.append(float((got.isfinite() & reached).any()))
    return max(errors)


def model_error():
    """The loss and the gradients of a hybrid of convolutions, rotary positions and token shifts."""
    torch.manual_seed(2)
    model = build(["softmax-gated-deltanet", "retnet", "rwkv6"], num_hidden_layers=3).train()
    ids = torch.randint(1, 29, (2, T))
    expected = model(ids, labels=ids, skip_logits=True).loss  # else in float32, as in transformers
    before = torch.autograd.grad(expected, list(model.parameters()))
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    with context_parallel() as part:
        items = (labels != -100).sum()
        named = {"shift_labels": part.split(labels), "num_items_in_batch": items}
        loss = model(part.split(ids), skip_logits=True, **named).loss
        after = torch.autograd.grad(loss, list(model.parameters()))
    loss = loss.detach()
    dist.all_reduce(loss)
    errors = [relative(loss, expected)]
    for grad, want in zip(after, before, strict=True):
        dist.all_reduce(grad)
        errors.append(relative(grad, want))
    return max(errors)


@torch.no_grad()
def reading_error():
    """The logits of a model with a cache of its own, and of one with a given cache where a native call may read."""
    torch.manual_seed(5)
    model, ids = build("gla"), torch.randint(1, 29, (1, T))
    whole, stack.PIECE, errors = stack.PIECE, 4, []
    for dtype, caches in ((torch.float64, {}), (torch.float32, {"past_key_values": HeadraceCache()})):
        model.to(dtype)
        expected = model(ids, use_cache=False).logits
        with context_parallel() as part:
            found = model(part.split(ids), **caches).logits
        errors.append(relative(found, part.split(expected)) / torch.finfo(dtype).eps)
    stack.PIECE = whole
    return max(errors)


def recomputed_error(reentrant):
    """A layer that the backward computes again outside of the context of its forward, with and without one."""
    torch.manual_seed(4)
    layer = layers.Mixer("gated-deltanet", hidden_size=16, num_heads=4).double()
    x, weight = torch.randn(2, 2, T, 16, dtype=torch.float64)
    again = partial(checkpoint, lambda x: layer(x)[0], use_reentrant=reentrant)
    whole = x.clone().requires_grad_()
    (layer(whole)[0] * weight).sum().backward()
    with context_parallel() as part:
        mine = part.split(x).clone().requires_grad_()
        y = again(mine)
    (y * part.split(weight)).sum().backward()
    alone = x.clone().requires_grad_()
    y = again(alone)
    with context_parallel():
        (y * weight).sum().backward()
    return max(relative(mine.grad, part.split(whole.grad)), relative(alone.grad, whole.grad))


def frozen_error():
    """The last process alone has inputs that need a gradient: the others must take part in its backward."""
    torch.manual_seed(3)
    q, k, v = torch.randn(1, T, H, K), torch.randn(1, T, H, K), torch.randn(1, T, H, V)
    weight = torch.randn(1, T, H, V)
    with context_parallel() as part:
        last = part.rank == part.size - 1
        mine = [part.split(x).clone().requires_grad_(last) for x in (q, k, v)]
        out, _ = linear_attention(*mine)
        (out * part.split(weight)).sum().backward()
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    (linear_attention(*whole)[0] * weight).sum().backward()
    return max(relative(m.grad, part.split(w.grad)) for m, w in zip(mine, whole, strict=True)) if last else 0.0


def refusals():
    """The sentences of what cannot be split. Every process refuses before it communicates."""
    x, messages = torch.randn(1, 8, 16), {}
    with context_parallel() as part:
        for name in ("transformer", "mamba", "rwkv7", "residual-delta", "mlstm", "mamba3"):
            messages[name] = refused(lambda name=name: layers.Mixer(name, hidden_size=16, num_heads=4)(x))
        gla = layers.Mixer("gla", hidden_size=16, num_heads=4)
        messages["padding"] = refused(lambda: gla(x, mask=torch.ones(1, 8, dtype=torch.bool)))
        messages["uneven"] = refused(lambda: part.split(torch.randn(1, 9, 16)))
        messages["unequal"] = refused(lambda: gla(x[:, : 8 - part.rank]))
        gla(x), gla(x[:, :4])  # lengths that all processes have had
        messages["unequal again"] = refused(lambda: gla(x[:, : 8 if part.rank else 4]))
        messages["another length"] = refused(lambda: gla(x[:, : 8 if part.rank else 7]))
        bounds = torch.tensor([0, 8, 8 * part.size + 1])
        messages["bounds"] = refused(lambda: gla(x, cu_seqlens=bounds))
        messages["no v"] = refused(lambda: linear_attention(x[..., None], x[..., None], None))
        ids = torch.ones(1, 8, dtype=int)
        messages["labels"] = refused(lambda: build("gla")(ids, labels=ids))
    messages["on a GPU"] = refused(lambda: unequal(gla, x))
    return messages


def unequal(layer, x):
    """As on a GPU, where the parts of a call are compared at the end of the context."""
    with context_parallel() as part:
        check, part.check = part.check, lambda: None
        layer(x[:, : 8 if part.rank else 4])
        layer(x)
        part.check = check


def sent():
    """Numbers that a process sends in a call of the op, forward and backward, by rule."""
    numbers, gather = {}, context.SequenceShard.gather
    for rule in ("add", "delta"):
        counts = []
        context.SequenceShard.gather = lambda part, x, counts=counts: counts.append(x.numel()) or gather(part, x)
        x = [torch.randn(1, 8, H, n, requires_grad=True) for n in (K, K, V)]
        with context_parallel():
            linear_attention(*x, rule=rule)[0].sum().backward()
        context.SequenceShard.gather, numbers[rule] = gather, counts
    return numbers
