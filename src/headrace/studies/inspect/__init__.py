"""What a trained model does with a text, token by token, as one page that needs nothing but a browser."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ...hf.generate import read_tokenizer
from ...hf.model import load
from ...utils.device import on_device
from ...utils.errors import InputError
from .page import describe, render, tokens_of
from .recorder import record

LIMIT = 2000  # tokens of a page


def inspect(
    checkpoint: Path,
    text: str,
    tokens: int | None = None,
    track: Callable[[list[Any]], Iterable[Any]] = iter,
    device: str | None = "cpu",
) -> str:
    """The page, as HTML, of a checkpoint of ours and a text. Everything is computed in float64.

    Args:
        tokens: the text is cut after so many; None: one longer than LIMIT is refused.
        track: shows how far the layers are that it is handed.
        device: as `on_device` takes it, one that has float64.
    Raises InputError for a checkpoint that cannot be read and a text that is too short or too long.
    """
    if tokens is not None and not 2 <= tokens <= LIMIT:
        raise InputError(f"--tokens={tokens}; expected 2 to {LIMIT:,}")
    device = on_device(device, float64=True)
    model: Any = load(checkpoint)
    tokenizer = read_tokenizer(checkpoint)
    ids, labels = tokens_of(tokenizer, text)
    if len(ids) < 2:
        raise InputError(f"the text is {len(ids)} token{'s' * (len(ids) != 1)} long; expected at least 2")
    if tokens is None and len(ids) > LIMIT:
        raise InputError(
            f"the text is {len(ids):,} tokens long; expected at most {LIMIT:,}, or --tokens to cut it after so many"
        )
    kept = min(tokens or LIMIT, len(ids))
    with torch.no_grad(), torch.device(device):
        hidden, layers = record(model.double().to(device), torch.tensor([ids[:kept]]))
        data = describe(model, tokenizer, hidden, ids[:kept], layers, track)
    return render(data | {"labels": labels[:kept], "cut": len(ids) - kept, "checkpoint": str(checkpoint)})


def write(page: str, output: Path) -> None:
    """Beside it first: a reader finds the whole page or the one before."""
    beside = output.with_name(f".{output.name}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(page, "utf-8")
        beside.replace(output)
    except OSError as error:
        raise InputError(f"--output {str(output)!r} cannot be written: {error.strerror}") from None
