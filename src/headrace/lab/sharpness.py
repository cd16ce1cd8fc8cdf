"""Does a larger query read more sharply? arXiv 2602.01744, section 4: Proposition 4.1, Theorems 4.2 and 4.3."""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from ..gates import FEATURE_MAPS
from .base import (
    BLUE,
    EXACT,
    GREEN,
    PURPLE,
    RED,
    YELLOW,
    Finding,
    Row,
    competition,
    draw,
    entropy,
    exact,
    panels,
    read,
    shares,
    softmax_weights,
    weights,
    written,
)

H, K, T = 8, 16, 32
LOOKS = {"relu": BLUE, "identity": PURPLE, "elu+1": YELLOW, "silu": GREEN}


def magnitude(generator: Generator) -> Finding:
    """Magnitude neglect (Proposition 4.1): a query λ times as large attends no more sharply, where φ is ReLU."""
    scales = torch.logspace(-1, 2, 49, dtype=torch.float64)
    one, keys, q = 16, draw(generator, 1, T, H, K), draw(generator, 1, 1, H, K)
    queries = scales[None, :, None, None] * q
    linear = {name: shares(weights(FEATURE_MAPS[name](queries), FEATURE_MAPS[name](keys)))[0, :, 0] for name in LOOKS}
    change = {name: (w - w[one]).abs().amax(-1) / w[one].abs().max() for name, w in linear.items()}
    lowest = {name: float(w.min()) for name, w in linear.items()}
    sharp = {
        "linear attention, ReLU": (entropy(linear["relu"]), BLUE),
        "linear attention, elu+1": (entropy(linear["elu+1"]), YELLOW),
        "softmax attention": (entropy(softmax_weights(queries, keys)[0, :, 0]), "#333"),
        "head competition: the gates": (entropy(competition(draw(generator, H, K) / K**0.5)(queries)[0]), RED),
    }
    figure, (left, right) = panels(2)
    for label, (curve, colour) in sharp.items():
        left.plot(scales, curve, label=label, color=colour, lw=2)
    for name, colour in LOOKS.items():
        sign = "" if lowest[name] >= 0 else " (negative weights: no entropy)"
        right.plot(scales, change[name].clamp(min=1e-17), label=f"φ = {name}{sign}", color=colour, lw=2)
    left.set(xscale="log", xlabel="length of the query, times λ", ylabel="entropy / log(choices)", ylim=(-0.03, 1.4))
    right.set(
        xscale="log", yscale="log", xlabel="length of the query, times λ", ylim=(1e-17, 1e7),
        ylabel="largest change of a weight since λ = 1\n(relative)",
    )  # fmt: skip
    left.set_yticks([0, 0.25, 0.5, 0.75, 1])
    right.set_yticks([1e-16, 1e-12, 1e-8, 1e-4, 1])
    for ax in (left, right):
        ax.legend(fontsize=8, loc="upper left")
    falls = {label: float((curve[0] - curve[-1]).clamp(min=0)) for label, (curve, _) in sharp.items()}
    rows = [
        Row("ReLU: change of a weight by λ", float(change["relu"].max()), "≤", EXACT),
        Row("ReLU: smallest weight", lowest["relu"], "≥", 0),
        Row("identity: change of a weight by λ", float(change["identity"].max()), "≤", EXACT),
        Row("identity: smallest weight (negative: no entropy)", lowest["identity"], "≤", -1e-3),
        Row("elu+1 is not homogeneous: change by λ", float(change["elu+1"].max()), "≥", 1e-3),
        Row("SiLU is not homogeneous: change by λ", float(change["silu"].max()), "≥", 1e-3),
        Row("softmax attention: fall of the entropy", falls["softmax attention"], "≥", 0.5),
        Row("head competition: fall of the gates' entropy", falls["head competition: the gates"], "≥", 0.5),
    ]
    return Finding(
        rows,
        f"From λ = {scales[0]:g} to {scales[-1]:g} the entropy falls by {falls['softmax attention']:.2f} in softmax "
        f"attention, by {falls['head competition: the gates']:.2f} between competing heads, by "
        f"{falls['linear attention, elu+1']:.2f} under elu+1 and by {falls['linear attention, ReLU']:.2g} under ReLU; "
        f"identity and SiLU have weights down to {min(lowest['identity'], lowest['silu']):.2g} and so no entropy.",
        figure,
    )


def gates_of(scores: Tensor) -> Tensor:
    """[..., H] -> head competition's gates, of the same shape."""
    heads = scores.reshape(1, -1, scores.shape[-1], 1)
    return competition(torch.ones(scores.shape[-1], 1, dtype=scores.dtype))(heads).view_as(scores)


def winner(generator: Generator) -> Finding:
    """Winner takes all (Theorems 4.2, 4.3): as scores grow, heads pass on what was written where it is read, or half of
    it in a tie."""
    scales = torch.cat([torch.zeros(1), torch.logspace(-1, 2, 46)]).double()
    reads, writes = draw(generator, 200, 4), draw(generator, 200, 4)
    tie, level = torch.tensor([1.0, 1.0, -0.5, -1.0]).double(), torch.zeros(4).double()
    scaled = scales[:, None, None]
    gates_read, gates_write = gates_of(scaled * reads), gates_of(scaled * writes)
    flow, agree = (gates_read * gates_write).sum(-1), reads.argmax(-1) == writes.argmax(-1)
    gap = torch.minimum(*(x.topk(2).values.diff().abs()[:, 0] for x in (reads, writes)))
    beyond = (flow - agree.double()).abs() - 2 * 3 * (-scales[:, None] * gap).exp()
    tied = gates_of(scales[:, None] * tie)
    tied_flow, tied_entropy = tied.square().sum(-1), entropy(tied)
    levels = entropy(gates_of(scales[:, None] * level))
    entropies = entropy(gates_read)
    figure, (left, right) = panels(2)
    for curve, label, colour in (
        (entropies.mean(1), "one head is first (mean of 200)", BLUE), (tied_entropy, "two heads tie for it", RED),
        (levels, "all scores equal", YELLOW),
    ):  # fmt: skip
        left.plot(scales[1:], curve[1:], label=label, color=colour, lw=2)
    for curve, label, colour in (
        (flow[:, agree].mean(1), "the same head wins", BLUE), (tied_flow, "two heads tie, in both", RED),
        (flow[:, ~agree].mean(1), "different heads win", GREEN),
    ):  # fmt: skip
        right.plot(scales[1:], curve[1:], label=label, color=colour, lw=2)
    left.set(xscale="log", xlabel="scores, times λ", ylabel="entropy of the gates / log(heads)", ylim=(-0.03, 1.35))
    right.set(
        xscale="log", xlabel="scores, times λ", ylabel="information flow Σ gate of q × gate of k", ylim=(-0.03, 1.35)
    )
    for ax in (left, right):
        ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
        ax.legend(fontsize=8, loc="upper left")
    rows = [
        Row("4.2: largest rise of an entropy as λ grows", float(entropies.diff(dim=0).max()), "≤", EXACT),
        Row("4.3: flow's distance from 1 or 0, beyond 6 e^(−λ gap)", float(beyond.max()), "≤", EXACT),
        Row("4.3 fails in a tie: flow's distance from 1/2", abs(float(tied_flow[-1]) - 0.5), "≤", EXACT),
        Row("4.2 fails in a tie: entropy's distance from 1/2", abs(float(tied_entropy[-1]) - 0.5), "≤", EXACT),
        Row("4.2 fails for equal scores: change of the entropy", float((levels - 1).abs().max()), "≤", EXACT),
        flows_through_the_op(generator, gates_read, gates_write, flow),
    ]  # fmt: skip
    return Finding(
        rows,
        f"At λ = {scales[-1]:g} a mean of {float(flow[-1, agree].mean()):.3f} passes where the same head wins reading "
        f"and writing, {float(flow[-1, ~agree].mean()):.3f} where different heads do, {float(tied_flow[-1]):.3f} where "
        f"two tie; the entropy falls to {float(entropies[-1].mean()):.3f}, with a tie to "
        f"{float(tied_entropy[-1]):.3f}, and of equal scores stays {float(levels[-1]):.3f}.",
        figure,
    )


def flows_through_the_op(generator: Generator, reads: Tensor, writes: Tensor, flow: Tensor) -> Row:
    """One pair in heads that are all alike: what they give together is C(λ) times what one would."""
    k, v = F.normalize(draw(generator, 1, 1, 1, K), dim=-1), draw(generator, 1, 1, 1, K)
    k, v = k.expand(1, 1, 4, K), v.expand(1, 1, 4, K)
    state = written(k, v, write_gate=writes[10, :1][None])
    out = read(state, k, read_gate=reads[10, :1][None])
    return exact("the op with both gates passes C(λ) v", out.sum(2), flow[10, 0] * v[:, :, 0])
