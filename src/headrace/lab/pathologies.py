"""Two more of what arXiv 2602.01744 (section 2.2) names as lost without softmax: polarity and distinct queries. The
third, magnitude, is Proposition 4.1."""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from ..gates import FEATURE_MAPS
from .base import (
    BLUE,
    EXACT,
    RED,
    Finding,
    Row,
    competition,
    draw,
    exact,
    panels,
    shares,
    softmax_weights,
    unit,
    weights,
)

H, K, T = 4, 16, 400
RINGS = ("#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#084594")  # from short queries to long ones


def polarity(generator: Generator) -> Finding:
    """Loss of polarity: a kernel that is never negative cannot tell an opposite key from one unrelated, and gates
    that are never negative do not bring the sign back."""
    cosine = torch.linspace(-1, 1, T).double()
    q = unit(generator, 1, 1, H, K)
    side = draw(generator, 1, T, H, K)
    side = F.normalize(side - (side * q).sum(-1, keepdim=True) * q, dim=-1)
    keys = cosine[None, :, None, None] * q + (1 - cosine**2).sqrt()[None, :, None, None] * side
    relu = FEATURE_MAPS["relu"]
    gates = competition(2 * draw(generator, H, K))
    gated = weights(relu(q), relu(keys), write_gate=gates(keys)) * gates(q)[..., None]
    kernels = {
        "softmax attention": softmax_weights(4 * K**0.5 * q, keys)[0, 0, 0],
        "φ = identity": weights(q, keys)[0, 0, 0],
        "φ = ReLU": weights(relu(q), relu(keys))[0, 0, 0],
        "φ = ReLU, 4 heads compete": gated[0, 0].sum(0),
    }
    below = cosine < 0
    order = {name: rank_correlation(w[below], cosine[below]) for name, w in kernels.items()}
    figure, axes = panels(4, 2.9, 3.0)
    for ax, (name, w) in zip(axes, kernels.items(), strict=True):
        ax.plot(cosine, w / w.abs().max(), ".", ms=3, color=RED if "compete" in name else BLUE)
        ax.set(title=name, xlabel="cosine of q and k", ylim=(-1.08, 1.08))
        ax.title.set_fontsize(10)
    axes[0].set_ylabel("weight, over the largest")
    parts = [sa * sb * weights(relu(sa * q), relu(sb * keys)) for sa in (1, -1) for sb in (1, -1)]
    rows = [
        exact("q·k is ReLU's part and the three of other signs", sum(parts), weights(q, keys)),  # type: ignore[arg-type]
        Row("ReLU: weight of the opposite key", float(kernels["φ = ReLU"][0].abs()), "≤", EXACT),
        Row("ReLU: smallest weight", float(kernels["φ = ReLU"].min()), "≥", 0),
        Row("ReLU with competition: weight of the opposite key", float(gated[..., 0].abs().max()), "≤", EXACT),
        Row("ReLU with competition: smallest weight", float(gated.min()), "≥", 0),
        Row("identity: weight of the opposite key", float(kernels["φ = identity"][0]), "≤", -1 + EXACT),
        Row("softmax: rank correlation with q·k, where it is negative", order["softmax attention"], "≥", 1 - EXACT),
        Row("ReLU: rank correlation with q·k, where it is negative", order["φ = ReLU"], "≤", 0.97),
    ]
    said = ", ".join(f"{value:.2f} ({name})" for name, value in order.items())
    sentence = f"Among keys on the far side of the query, weights follow q·k with a rank correlation of {said}."
    return Finding(rows, sentence, figure)


def rank_correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x.argsort().argsort().double() for x in (a, b)]))[0, 1])


def collapse(generator: Generator) -> Finding:
    """Context collapse: queries that differ in length alone read the same of linear attention (φ = ReLU); softmax
    attention and competing heads tell them apart."""
    radius, turn = torch.linspace(0.4, 2, 5).double(), torch.linspace(0, 2 * torch.pi, 97)[:-1].double()
    plane = radius[:, None, None] * torch.stack([turn.cos(), turn.sin()], -1)
    into, keys, values = draw(generator, 2, 2, K), draw(generator, 1, 8, 2, K), draw(generator, 1, 8, 2, 1)
    relu, gates = FEATURE_MAPS["relu"], competition(draw(generator, 2, K) / K**0.5)

    def queries(x: Tensor) -> Tensor:
        return torch.einsum("np,phk->nhk", x, into)[None]

    def softmax(x: Tensor) -> Tensor:
        return torch.einsum("bnht,bthv->nh", softmax_weights(queries(x), keys), values)

    def linear(x: Tensor) -> Tensor:
        return torch.einsum("bnht,bthv->nh", shares(weights(relu(queries(x)), relu(keys))), values)

    def competing(x: Tensor) -> Tensor:
        return 2 * gates(queries(x))[0] * linear(x)

    figure, axes = panels(3, 3.6, 3.7)
    maps = {"softmax attention": softmax, "linear attention, φ = ReLU": linear, "the same, 2 heads compete": competing}
    kept, along = {}, {}
    for ax, (name, reads) in zip(axes, maps.items(), strict=True):
        out, slopes = differentiated(reads, plane.flatten(0, 1))
        singular = torch.linalg.svdvals(slopes)
        kept[name] = float((singular[:, 1] / singular[:, 0]).median())
        along[name] = float((slopes @ plane.flatten(0, 1)[..., None]).abs().max())
        for ring, colour in zip(out.view(5, 96, 2), RINGS, strict=True):
            ax.plot(*ring[[*range(96), 0]].T, color=colour, lw=1.6)
        ax.set(title=name, xlabel="read by head 1")
        ax.title.set_fontsize(10)
    axes[0].set_ylabel("read by head 2")
    axes[0].legend(axes[0].lines, [f"|x| = {r:.1f}" for r in radius], fontsize=7)
    plain, other = "linear attention, φ = ReLU", "the same, 2 heads compete"
    rows = [
        Row("linear: change of what is read along the query", along[plain], "≤", EXACT),
        Row("linear: smaller over larger slope, median", kept[plain], "≤", EXACT),
        Row("softmax: smaller over larger slope, median", kept["softmax attention"], "≥", 1e-3),
        Row("with competition: smaller over larger slope, median", kept[other], "≥", 1e-3),
    ]
    said = ", ".join(f"{value:.2g} ({name})" for name, value in kept.items())
    sentence = f"Of two directions in which queries differ, the weaker moves what is read by {said} of the stronger."
    return Finding(rows, sentence, figure)


def differentiated(function, x: Tensor) -> tuple[Tensor, Tensor]:
    """function(x) [N, 2] for x [N, 2], row by row, and its derivative [N, 2 of the output, 2 of x]."""
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        out = function(x)
        slopes = [torch.autograd.grad(out[:, i].sum(), x, retain_graph=True)[0] for i in (0, 1)]
    return out.detach(), torch.stack(slopes, 1)
