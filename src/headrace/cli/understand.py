"""Understand: inspect."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from .console import (
    Checkpoint,
    Device,
    PromptFile,
    read_prompt,
    telling,
    track,
)
from .options import setting, takes


@dataclass(frozen=True)
class InspectOptions:
    """The options of `headrace inspect`."""

    checkpoint: Checkpoint
    prompt: str | None = setting(
        "Text for the model to read.", None, "--prompt", "--text", shown="--file or standard input"
    )
    file: PromptFile = None
    tokens: int | None = setting("Number of tokens to keep of a longer text.", shown="all; more than 2000 are refused")
    device: Device = None
    output: Path = setting("HTML file to write.", Path("inspect.html"))


@takes(InspectOptions)
def inspect(options: InspectOptions) -> Path:
    """Write an interactive page of what a model computes on a text.

    The page shows, for each token, the gates, decay horizons and effective attention of every head."""
    from .. import inspection
    from ..files.processes import locked_beside

    text, output = read_prompt(options.prompt, options.file), options.output
    with telling(Console(stderr=True)) as tell, locked_beside(output):
        tell(f"reading {options.checkpoint}")
        layers = partial(track, name="layer", tell=tell)
        page = inspection.inspect(options.checkpoint, text, options.tokens, layers, options.device)
        inspection.write(page, output)
    print(f"{output}: {len(page.encode()) / 1e6:.1f} MB; open it in a browser")
    return output
