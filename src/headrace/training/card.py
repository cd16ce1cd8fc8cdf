"""The README.md of a trained model, as the Hub shows it, and its curves."""

from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.trainer import TRAINER_STATE_NAME

from ..utils.environment import environment
from ..utils.errors import InputError
from ..utils.integrity import read_json
from ..utils.provenance import sentence
from .checkpoints import whole
from .recipes import About, Recipe, to_yaml

TEXT = """---
{data}
---

# {mixer}, trained with headrace

{sentence}

![Loss on training text and on held-out text](curves.png)

| step | held-out loss, nats per token | perplexity | bits per byte |
|---:|---:|---:|---:|
{rows}

## Use

It needs `pip install "headrace[models]"`; `trust_remote_code=True` lets transformers import that package.

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("PATH OR NAME OF THIS MODEL", trust_remote_code=True)
```

## Data

{documents:,} documents and {tokens:,} tokens for training, {held_documents:,} held out; rows of {length} tokens.
Sources: {sources}.

## Recipe

`assumed` names what the source leaves open.

```yaml
{recipe}```

## Where

{where}
"""


def write_card(
    folder: Path, recipe: Recipe, about: About, manifest: dict[str, Any], history: list[dict[str, Any]], unigram: float
) -> None:
    """unigram: what a model would lose on the held-out text that knew how frequent its tokens are, and no more."""
    draw_curves(folder / "curves.png", {recipe.mixer: history})
    evaluations = [point for point in history if "eval_loss" in point]
    final = next(point for point in reversed(history) if "final_loss" in point)
    sentence = (
        f"After {recipe.tokens:g} tokens: {final['final_loss']:.4f} nats per held-out token, perplexity "
        f"{final['final_perplexity']:.2f}, {final['final_bits_per_byte']:.4f} bits per byte. "
        + beside(final["final_loss"], unigram)
    )
    results = [
        EvalResult("text-generation", "text", "held-out documents", metric, final[f"final_{metric}"])
        for metric in ("loss", "perplexity", "bits_per_byte")
    ]
    card = ModelCardData(
        library_name="transformers", license="other", tags=["headrace", "linear-attention"],
        model_name=recipe.mixer, eval_results=results,
    )  # fmt: skip
    rows = "\n".join(
        f"| {e['step']} | {e['eval_loss']:.4f} | {e['eval_perplexity']:.2f} | {e['eval_bits_per_byte']:.4f} |"
        for e in evaluations
    )
    text = TEXT.format(
        data=card.to_yaml(), mixer=recipe.mixer, sentence=sentence, rows=rows, recipe=to_yaml(recipe, about),
        documents=manifest["train"]["documents"], tokens=manifest["train"]["tokens"],
        held_documents=manifest["held_out"]["documents"], length=manifest["length"],
        sources=", ".join(source["name"] for source in manifest["sources"]),
        where=", ".join(f"{name} {value}" for name, value in environment().items()) + mixed(folder.parent),
    )  # fmt: skip
    ModelCard(text).save(folder / "README.md")


def mixed(run: Path) -> str:
    told = sentence(run)
    return f".\n\n{told}" if told else ""


def read_history(run: Path) -> list[dict[str, Any]]:
    """What a run logged: all of it where it has ended, else up to its newest whole checkpoint. Deletes nothing: the
    run may be at work."""
    ended = run / "model" / "history.json"
    if ended.is_file():
        return read_json(ended)
    found = whole(run)
    if not found:
        raise InputError(
            f"{str(run)!r} holds neither model/history.json nor a whole checkpoint; expected a run's folder"
        )
    return read_json(found[-1] / TRAINER_STATE_NAME)["log_history"]


def named(runs: list[Path]) -> dict[str, Path]:
    """By their folders' names, or by their whole paths where two folders have one name."""
    if len({run.resolve() for run in runs}) < len(runs):
        raise InputError("a run is given twice; expected each once")
    names = [run.resolve().name for run in runs]
    return {name if names.count(name) == 1 else str(run): run for name, run in zip(names, runs, strict=True)}


def beside(loss: float, unigram: float) -> str:
    if loss >= unigram:
        return f"It learnt nothing: the frequencies of these tokens alone give {unigram:.4f} nats."
    return f"The frequencies of these tokens alone give {unigram:.4f} nats."


def draw_curves(path: Path, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Loss by step of one run or several: training text thin, held-out text with dots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for i, (name, history) in enumerate(runs.items()):
        train = [(point["step"], point["loss"]) for point in history if "loss" in point]
        held = [(point["step"], point["eval_loss"]) for point in history if "eval_loss" in point]
        axes.plot(*zip(*train, strict=True), color=f"C{i}", linewidth=0.8, alpha=0.6, label=f"{name}, training")
        if held:
            axes.plot(*zip(*held, strict=True), color=f"C{i}", marker="o", markersize=3, label=f"{name}, held out")
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
