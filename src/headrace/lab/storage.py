"""The laws of a memory that is written by pairs of a key and a value: what is read is known exactly. Sources: the
delta rule in arXiv 2406.06484 and 2102.11174, its decay in 2412.06464, the decay of memory in 2405.21060."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from ..recurrence import linear_attention, step
from .base import (
    BLUE,
    GREEN,
    PURPLE,
    RED,
    YELLOW,
    Finding,
    Row,
    compared,
    draw,
    exact,
    panels,
    read,
    unit,
    weights,
    written,
)

K, V = 16, 16


def crosstalk(generator: Generator) -> Finding:
    """Signal and cross-talk: what is read is v|k|² plus the other values by the overlap of their keys; the two are
    equal at as many pairs as the key has dimensions."""
    counts = [2, 4, 8, 16, 32, 64, 128, 256, 512]
    figure, (ax,) = panels(1, 6.4, 4.0)
    rows, equal = [], {}
    for d, colour in ((16, BLUE), (64, RED), (256, YELLOW)):
        k, v = unit(generator, 16, counts[-1], 1, d), unit(generator, 16, counts[-1], 1, V)
        noise = []
        for n in counts:
            seen = read(written(k[:, :n], v[:, :n]), k[:, :n])[:, :, 0]
            keys, values = k[:, :n, 0], v[:, :n, 0]
            overlap = keys @ keys.mT * (1 - torch.eye(n))
            signal, cross = values * keys.square().sum(-1, keepdim=True), overlap @ values
            noise.append(float((seen - signal).square().sum(-1).mean().sqrt()))
        law = (torch.tensor(counts).double() - 1).div(d).sqrt()
        compared(ax, torch.tensor(counts), law, torch.tensor(noise), color=colour, label=f"cross-talk, key of {d}")
        rows.append(exact(f"key of {d}: read-out = signal + cross-talk", seen, signal + cross))
        off = float((torch.tensor(noise).double() / law - 1)[2:].abs().max())
        rows.append(Row(f"key of {d}: cross-talk's distance from √((n−1)/d), n ≥ 8", off, "≤", 0.15))
        equal[d] = crossing(counts, noise)
    ax.axhline(1, color="#333", ls="--", lw=1.6, label="signal")
    ax.set(xscale="log", yscale="log", xlabel="pairs n in one memory", ylabel="length of what is read (of values: 1)")
    ax.set_xticks([2, 8, 32, 128, 512], ["2", "8", "32", "128", "512"])
    ax.legend(fontsize=8)
    said = ", ".join(f"{n:.0f} pairs for a key of {d}" for d, n in equal.items())
    return Finding(rows, f"Cross-talk is as loud as the signal at {said}.", figure)


def crossing(counts: list[int], noise: list[float]) -> float:
    """Where cross-talk is 1, between two counts on a logarithmic scale."""
    x, y = (torch.tensor(values).double().log() for values in (counts, noise))
    i = int((y >= 0).int().argmax())
    return float((x[i - 1] - y[i - 1] * (x[i] - x[i - 1]) / (y[i] - y[i - 1])).exp())


def overwriting(generator: Generator) -> Finding:
    """Written twice: linear attention reads 2v; a delta rule of strength β reads (1−β) old + β new, leaves orthogonal
    keys alone, and is one step of gradient descent."""
    times, strengths = torch.arange(1, 7), torch.linspace(0, 1, 21).double()
    k, v, state = unit(generator, 1, 1, K), unit(generator, 1, 1, V), draw(generator, 1, 1, K, V)
    delta = partial(step, k, k, v, rule="delta", scale=1.0)
    repeated = {
        "linear attention": again(times, k, v), "delta, β = 1": again(times, k, v, 1.0, rule="delta"),
        "delta, β = 0.5": again(times, k, v, 0.5, rule="delta"),
    }  # fmt: skip
    laws = (times.double(), torch.ones(6), 1 - 0.5 ** times.double())
    old = read_at(k, state)
    blends = torch.stack([delta(state, beta=b.view(1, 1))[0] for b in strengths])
    blend = (1 - strengths[:, None, None, None]) * old + strengths[:, None, None, None] * v
    other = unit(generator, 1, 1, K)
    other = F.normalize(other - (other * k).sum() * k, dim=-1)
    after = delta(state, beta=strengths[14].view(1, 1))[1]
    rows = [
        exact("linear attention: read after two writes = 2v", repeated["linear attention"][1:2], torch.tensor([2.0])),
        exact("delta, β = 1: memory after two writes = after one", delta(delta(state)[1])[1], delta(state)[1]),
        exact("delta: read = (1−β) old + β new", blends, blend),
        exact("delta: an orthogonal key reads what it did", other[:, :, None] @ after, other[:, :, None] @ state),
        exact("delta: memory = after one SGD step on ½|v − kS|²", after, descended(state, k, v, strengths[14])),
    ]
    figure, (left, right) = panels(2)
    for label, law, colour in zip(repeated, laws, (BLUE, RED, GREEN), strict=True):
        compared(left, times, law, repeated[label], color=colour, label=label)
    olds, news = (project(blends, *pair) for pair in ((old, v), (v, old)))
    compared(right, strengths, 1 - strengths, olds, color=BLUE, label="of the old value")
    compared(right, strengths, strengths, news, color=RED, label="of the new value")
    left.set(xlabel="times the same pair was written", ylabel="read, in lengths of the value")
    right.set(xlabel="write strength β of the delta rule", ylabel="share in what is read")
    for ax in (left, right):
        ax.legend(fontsize=8)
    return Finding(
        rows,
        f"The same pair written {int(times[-1])} times reads as {float(repeated['linear attention'][-1]):.3f} v in "
        f"linear attention and as {float(repeated['delta, β = 1'][-1]):.3f} v under the delta rule with β = 1; a write "
        f"of strength {strengths[14]:g} leaves {float(olds[14]):.2f} of the old value, moves what an orthogonal key "
        f"reads by {rows[3].seen:.0e}, and differs from a step of gradient descent by {rows[4].seen:.0e}.",
        figure,
    )


def full(value: float, *shape: int) -> Tensor:
    return torch.full(shape, value, dtype=torch.float64)


def again(times: Tensor, k: Tensor, v: Tensor, beta: float = 1.0, **rule) -> Tensor:
    """The length read along v after each of so many writes of one pair."""
    n = len(times)
    q, values, beta_t = k.expand(1, n, 1, K), v.expand(1, n, 1, V), full(beta, 1, n, 1)
    return (linear_attention(q, q, values, beta=beta_t, scale=1.0, **rule)[0] * v).sum(-1)[0, :, 0]


def descended(state: Tensor, k: Tensor, v: Tensor, rate: Tensor) -> Tensor:
    with torch.enable_grad():
        S = state.clone().requires_grad_()
        loss = 0.5 * (v - read_at(k, S)).square().sum()
        return S.detach() - rate * torch.autograd.grad(loss, S)[0]


def project(x: Tensor, onto: Tensor, other: Tensor) -> Tensor:
    """The coefficient of `onto` where x is a sum of multiples of `onto` and `other`."""
    own = onto - (onto * other).sum() / other.square().sum() * other
    return (x * own).sum(-1).flatten() / (onto * own).sum()


def angle(generator: Generator) -> Finding:
    """The cos θ law: a delta rule's write at an angle θ to an old key replaces a part of what that key reads, whether
    memory decays (α) or not."""
    theta, beta = torch.linspace(0, torch.pi, 33).double(), 0.8
    basis = torch.linalg.qr(draw(generator, K, 2)).Q.T
    old_key, v = basis[0].expand(33, 1, K), F.normalize(draw(generator, 1, 1, V), dim=-1)
    new_key = theta.cos()[:, None, None] * old_key + theta.sin()[:, None, None] * basis[1]
    crowd, rows, curves = draw(generator, 1, 1, K, V), [], {}
    old_value = F.normalize(draw(generator, 1, 1, V), dim=-1)
    alone = old_key[..., None] @ old_value[..., None, :]
    for alpha in (1.0, 0.6):
        write = partial(
            step, new_key, new_key, v.expand(33, 1, V), rule="delta", scale=1.0,
            beta=full(beta, 33, 1), log_decay=full(alpha, 33, 1).log(),
        )  # fmt: skip
        cosine = theta.cos()[:, None, None]
        seen = read_at(old_key, write(crowd.expand(33, 1, K, V))[1])
        said = alpha * read_at(old_key, crowd) - alpha * beta * cosine * read_at(new_key, crowd) + beta * cosine * v
        rows.append(exact(f"α = {alpha:g}: α S k_old − αβ (S k_new) cos θ + β v_new cos θ", seen, said))
        reading = read_at(old_key, write(alone)[1])
        curves[alpha] = project(reading, old_value, v), project(reading, v, old_value)
        share = left_over(theta, alpha, beta)
        rows.append(exact(f"α = {alpha:g}: of the old value α (1 − β cos² θ) is left", curves[alpha][0], share))
    figure, (ax,) = panels(1, 6.4, 4.0)
    degrees = theta.rad2deg()
    for (alpha, (old, _)), colour in zip(curves.items(), (BLUE, GREEN), strict=True):
        compared(ax, degrees, left_over(theta, alpha, beta), old, color=colour, label=f"old value, α = {alpha:g}")
    compared(ax, degrees, beta * theta.cos(), curves[1.0][1], color=RED, label="new value, any α")
    ax.set(xlabel="angle θ between the old and the new key (degrees)")
    ax.set_ylabel(f"share in what the old key reads (β = {beta:g})")
    ax.set_xticks(range(0, 181, 30))
    ax.legend(fontsize=8)
    at = {angle: round(angle / 180 * 32) for angle in (45, 90)}
    return Finding(
        rows,
        f"A write of strength {beta:g} leaves {float(curves[1.0][0][at[45]]):.2f} of a value whose key is 45° away and "
        f"{float(curves[1.0][0][at[90]]):.2f} at 90°; with a decay of 0.6 {float(curves[0.6][0][at[45]]):.2f} and "
        f"{float(curves[0.6][0][at[90]]):.2f}.",
        figure,
    )


def read_at(key: Tensor, state: Tensor) -> Tensor:
    return (key[:, :, None] @ state).squeeze(2)


def left_over(theta: Tensor, alpha: float, beta: float) -> Tensor:
    return alpha * (1 - beta * theta.cos().square())


def fading(generator: Generator) -> Finding:
    """Forgetting: a write weighs the product of all decays since it, per head or per key channel."""
    T, tokens = 64, torch.arange(64)
    rates = {
        "α = 0.99": full(0.99, T).log(),
        "α = 0.9": full(0.9, T).log(),
        "α of each token, 0.7 to 1": torch.log(0.7 + 0.3 * torch.rand(T, generator=generator, dtype=torch.float64)),
        "reset at one token": torch.where(tokens == 40, -7.0, -0.02).double(),
    }
    key = torch.ones(1, T, 1, 1).double()
    figure, (ax,) = panels(1, 6.4, 4.0)
    rows, half = [], {}
    for (name, log_decay), colour in zip(rates.items(), (BLUE, RED, GREEN, PURPLE), strict=True):
        seen = weights(key[:, :1], key, log_decay=log_decay.view(1, T, 1))[0, 0, 0].flip(0)
        law = torch.stack([log_decay[j + 1 :].sum().exp() for j in range(T)]).flip(0)
        compared(ax, tokens, law, seen, color=colour, label=name)
        rows.append(exact(f"{name}: a write weighs Πα", seen, law))
        half[name] = int((seen < 0.5).int().argmax()) or T
    channels = -torch.rand(1, T, 1, K, generator=generator, dtype=torch.float64)
    keys, q = draw(generator, 1, T, 1, K), draw(generator, 1, 1, 1, K)
    since = channels.flip(1).cumsum(1).flip(1) - channels
    law = (q * since.exp() * keys).sum(-1)[0, :, 0]
    rows.append(exact("a decay per key channel: q · (Πα ⊙ k)", weights(q, keys, log_decay=channels)[0, 0, 0], law))
    ax.set(yscale="log", ylim=(1e-5, 1.5), xlabel="age of the write (tokens)", ylabel="its weight in what is read")
    ax.legend(fontsize=8)
    said = ", ".join(f"{n} tokens ({name})" if n < T else f"more than {T - 1} ({name})" for name, n in half.items())
    return Finding(rows, f"A write has lost half its weight after {said}.", figure)
