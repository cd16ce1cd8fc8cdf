"""Packs the recorded tensors into a compact form and renders the page with them.

Dimensions: T tokens, H heads, L layers.
"""

import base64
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import zoo
from ..files.environment import environment
from ..files.results import finite
from ..layers.maps import weights
from ..report.page import template
from .recorder import RULES, Recorded, findings

GUESSES = 3  # number of likeliest next tokens shown
STRONGEST = 16  # largest number of attention weights kept per row
ENTRIES = 3_000_000  # largest number of kept attention weights in a page
SIDE, PIXELS = 256, 4_000_000  # largest side of a picture of attention weights; largest number of pixels in a page
COLUMNS = 120  # columns of the picture of read distances
LONGEST_HORIZON = 1e9  # tokens; a longer horizon is shown as no decay
NONE = (
    "This mixer has no effective attention: it weights earlier tokens per channel, so a head has no single weight for "
    "a pair of tokens."
)
PIECE = 256  # tokens whose logits are in memory at once


def pack(x: Tensor, bits: int = 16, log: bool = False) -> dict[str, Any]:
    """Quantizes numbers (log=True: their logarithms) to integers of `bits` bits between the smallest and the largest,
    with an error of at most half a step. A number that is not finite becomes the largest integer."""
    x = x.double().cpu()
    x = x.clamp(min=1e-12).log() if log else x
    numbers = x[x.isfinite()]
    low, high = (float(numbers.min()), float(numbers.max())) if numbers.numel() else (0.0, 0.0)
    levels = 2**bits - 2
    steps = (x - low) / ((high - low) or 1.0) * levels
    whole = torch.where(x.isfinite(), steps.round(), levels + 1).numpy().astype(f"<u{bits // 8}")
    return {"bits": bits, "low": low, "high": high, "log": log, "data": base64.b64encode(whole.tobytes()).decode()}


def integers(x: Tensor) -> dict[str, Any]:
    """Packs integers from 0 to 65535 without loss."""
    return {"bits": 16, "raw": True, "data": base64.b64encode(x.cpu().numpy().astype("<u2").tobytes()).decode()}


def tokens_of(tokenizer: Any, text: str) -> tuple[list[int], list[str]]:
    """(token ids of a text, the piece of the text that each token adds). For a character of several tokens, the first
    token adds the character and the others an empty string, as special tokens do."""
    encoding = tokenizer(text, return_offsets_mapping=True)
    pieces, end = [], 0
    for _, until in encoding.offset_mapping:
        pieces.append(text[end : max(end, until)])
        end = max(end, until)
    return encoding.input_ids, pieces


def describe(
    model: Any, tokenizer: Any, hidden: Tensor, ids: list[int], layers: list[Recorded],
    track: Callable[[list[Any]], Iterable[Any]] = iter,
) -> dict[str, Any]:  # fmt: skip
    """The data of a page without the text."""
    heads = sum(getattr(recorded.mixer, "H", model.config.num_heads) for recorded in layers)
    strongest = max(4, min(STRONGEST, ENTRIES // (heads * len(ids))))
    side = max(32, min(SIDE, int((PIXELS / heads) ** 0.5)))
    shown, sentences = [], []
    for recorded in track(layers):
        layer, A = describe_layer(recorded, min(strongest, len(ids)), side)
        shown.append(layer)
        sentences += findings(layer["name"], recorded, A)
    loss, guesses, chances = predictions(model, hidden, ids)
    vocabulary = {i: tokenizer.decode([i]) for i in {*ids, *guesses.flatten().tolist()}}
    return {
        "ids": ids, "vocabulary": vocabulary, "loss": pack(loss), "mean": float(loss[1:].mean()), "rules": RULES,
        "guesses": guesses.tolist(), "chances": pack(chances), "layers": shown, "findings": sentences,
        "parameters": model.num_parameters(), "environment": environment(str(model.device)) | {"backend": "auto"},
    }  # fmt: skip


def describe_layer(recorded: Recorded, strongest: int, side: int) -> tuple[dict[str, Any], Tensor | None]:
    """A layer's data, and its effective attention [H, T, T] if it has one."""
    A = None if recorded.reading is None else weights(recorded.reading)[0]
    horizon, beta, number = recorded.horizon, recorded.beta, f"layer {recorded.layer}"
    by_head = [x for x in (*recorded.gates.values(), horizon, beta) if x is not None]
    layer = {
        "name": f"{number}, {recorded.place}" if recorded.place else number, "mixer": zoo.name_of(recorded.mixer.spec),
        "heads": len(A) if A is not None else by_head[0].shape[1] if by_head else 1,
        "gates": {gate: pack(g) for gate, g in recorded.gates.items()},
        "horizon": None if horizon is None else pack(horizon.clamp(max=LONGEST_HORIZON), log=True),
        "beta": None if beta is None else pack(beta),
        "attention": None if A is None else compress_attention(A, strongest, side),
        "none": None if A is not None else NONE,
    }  # fmt: skip
    return layer, A


def compress_attention(A: Tensor, strongest: int, side: int) -> dict[str, Any]:
    """Compresses attention weights A [H, T, T]. Weights are divided by the row's sum of absolute values. Kept are the
    `strongest` weights of each row with the part of the row that they cover, the mean distance of each row, and a
    picture: signed square roots of the means over blocks."""
    T = A.shape[-1]
    total = A.abs().sum(-1)
    share = A / total.clamp(min=torch.finfo(A.dtype).tiny)[..., None]
    places = share.abs().topk(strongest, -1).indices
    kept = share.gather(-1, places)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    block, width = -(-T // side), -(-T // COLUMNS)
    picture = F.avg_pool2d(share[None], block, ceil_mode=True)[0]
    height = picture.abs().amax((1, 2), keepdim=True).clamp(min=torch.finfo(A.dtype).tiny)
    roots = picture.sign() * (picture.abs() / height).sqrt()
    ends = torch.tensor([-1.0, 1.0], dtype=A.dtype)  # gives all pictures one scale with 0 in the middle
    return {
        "strongest": strongest, "places": integers(places), "shares": pack(kept), "covered": pack(kept.abs().sum(-1)),
        "reach": pack((share.abs() * distance).sum(-1)),
        "profile": pack(F.avg_pool1d(profile(share.abs(), distance), width, ceil_mode=True), bits=8),
        "block": block, "side": picture.shape[-1],
        "picture": pack(torch.cat([roots.flatten(), ends]), bits=8),
    }  # fmt: skip


def profile(share: Tensor, distance: Tensor) -> Tensor:
    """The sum of each row of `share` [H, T, T] over distances 0, 1, 2 to 3, 4 to 7, …, [H, distances, T]."""
    farthest = (len(distance) - 1).bit_length()
    bounds = [0, *(2**i for i in range(farthest + 1))]
    near = [(low <= distance) & (distance < high) for low, high in pairwise(bounds)]
    return torch.stack([(share * within).sum(-1) for within in near], 1)


def predictions(model: Any, hidden: Tensor, ids: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """(loss of each token in nats [T], likeliest tokens in its place [T, GUESSES], their probabilities [T, GUESSES]).
    The loss of the first token is NaN."""
    target, loss, guesses, chances = torch.tensor(ids), [torch.full((1,), torch.nan)], [], []
    for start in range(0, len(ids) - 1, PIECE):
        logits = model.logits(hidden[0, start : min(start + PIECE, len(ids) - 1)])
        log_p = logits.log_softmax(-1)
        loss.append(-log_p.gather(1, target[start + 1 :][: len(log_p), None])[:, 0])
        best = log_p.topk(min(GUESSES, log_p.shape[1]), -1)
        guesses.append(best.indices)
        chances.append(best.values.exp())
    none = torch.zeros_like(guesses[0][:1])
    return torch.cat(loss), torch.cat([none, *guesses]), torch.cat([none * torch.nan, *chances])


def render(data: dict[str, Any]) -> str:
    return template("page.html", "headrace.inspection").render(data=finite(data))
