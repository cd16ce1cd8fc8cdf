"""A self-contained HTML page that shows what a trained model computes for a text, token by token."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ..convert import load
from ..convert.checkpoint import check_tokens, read_tokenizer
from ..files.devices import on_device
from ..ops.dispatch import set_backend
from ..utils.errors import require
from .page import describe, render, tokens_of
from .recorder import record

LIMIT = 2000  # largest number of tokens of a page


def inspect(
    checkpoint: Path, text: str, tokens: int | None = None, track: Callable[[list[Any]], Iterable[Any]] = iter,
    device: str | None = "cpu",
) -> str:  # fmt: skip
    """The HTML page for a headrace checkpoint and a text. All numbers are computed in float64.

    Args:
        tokens: number of tokens after which the text is cut; None: a text longer than LIMIT is an error.
        track: wraps the list of layers to show progress.
        device: a device with float64, as for `on_device`.

    Raises:
        InputError: the checkpoint cannot be read, or the text is too short or too long.
    """
    require(tokens is None or 2 <= tokens <= LIMIT, f"--tokens={tokens}; expected 2 to {LIMIT:,}")
    device = on_device(device, float64=True)
    model: Any = load(checkpoint)
    set_backend(model, "auto")  # HEADRACE_BACKEND may name one without float64
    tokenizer = read_tokenizer(checkpoint)
    ids, labels = tokens_of(tokenizer, text)
    require(len(ids) >= 2, f"the text is {len(ids)} token{'s' * (len(ids) != 1)} long; expected at least 2")
    expected = f"expected at most {LIMIT:,}, or --tokens to cut the text"
    require(tokens is not None or len(ids) <= LIMIT, f"the text is {len(ids):,} tokens long; {expected}")
    kept = min(tokens or LIMIT, len(ids))
    check_tokens(torch.tensor(ids[:kept]), model)
    with torch.no_grad(), torch.device(device):
        hidden, layers = record(model.double().to(device), torch.tensor([ids[:kept]]))
        data = describe(model, tokenizer, hidden, ids[:kept], layers, track)
    return render(data | {"labels": labels[:kept], "cut": len(ids) - kept, "checkpoint": str(checkpoint)})
