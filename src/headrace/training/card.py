"""The model card (README.md) of a trained model, and its learning curves."""

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..files.checks import read_json
from ..files.environment import environment
from ..files.provenance import sentence
from ..files.results import restored
from ..utils.errors import InputError
from . import checkpoints
from .recipes import About, Recipe, to_yaml

NO_NUMBER = "not finite"
HISTORY = [{"step": int, ...: (float, str, None, {})}]  # the form of history.json, and of a checkpoint's
TEXT = Path(__file__).with_name("card.md")  # with the fields of `str.format`
PICTURE = "\n![Loss on training text and on held-out text](curves.png)\n"


def can_draw() -> bool:
    """Whether matplotlib is installed, which training does without."""
    return find_spec("matplotlib") is not None


def write_card(
    folder: Path, recipe: Recipe, about: About, manifest: dict[str, Any], history: list[dict[str, Any]], unigram: float
) -> None:
    """Writes README.md to the folder of a model, and curves.png if matplotlib is installed.

    Args:
        manifest: the manifest of the prepared data.
        history: what was logged, with its numbers that are not finite.
        unigram: nats per held-out token of a unigram model with the token frequencies of the held-out text.
    """
    if can_draw():
        draw_curves(folder / "curves.png", {recipe.mixer: history})
    evaluations = [point for point in history if "eval_loss" in point]
    final = next(point for point in reversed(history) if "final_loss" in point)
    loss = final["final_loss"]
    scores = (
        f": {loss:.4f} nats per held-out token, perplexity {number(final['final_perplexity'], 2)}, "
        f"{final['final_bits_per_byte']:.4f} bits per byte."
    )
    scores = scores if math.isfinite(loss) else f", the loss on held-out text is {NO_NUMBER}."
    summary = f"After {recipe.trained_tokens:,} tokens{scores} {baseline_sentence(loss, unigram)}"
    results = [
        EvalResult("text-generation", "text", "held-out documents", metric, value)
        for metric in ("loss", "perplexity", "bits_per_byte")
        if math.isfinite(value := final[f"final_{metric}"])
    ]
    card = ModelCardData(
        library_name="transformers", license="other", tags=["headrace", "linear-attention"],
        model_name=recipe.mixer, eval_results=results,
    )  # fmt: skip
    rows = "\n".join(
        f"| {e['step']} | {number(e['eval_loss'])} | {number(e['eval_perplexity'], 2)} | "
        f"{number(e['eval_bits_per_byte'])} |"
        for e in evaluations
    )
    text = TEXT.read_text("utf-8").format(
        data=card.to_yaml(), mixer=recipe.mixer, summary=summary, picture=PICTURE if can_draw() else "", rows=rows,
        recipe=to_yaml(recipe, about), documents=manifest["train"]["documents"], tokens=manifest["train"]["tokens"],
        held_documents=manifest["held_out"]["documents"], length=manifest["length"],
        sources=", ".join(source["name"] for source in manifest["sources"]),
        where=", ".join(f"{name} {value}" for name, value in environment().items()),
        versions=f".\n\n{several}" if (several := sentence(folder.parent)) else "",
    )  # fmt: skip
    ModelCard(text).save(folder / "README.md")


def number(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else NO_NUMBER


def read_history(run: Path) -> list[dict[str, Any]]:
    """The log of a run, with its numbers that are not finite: the whole log if the run has ended, else up to its newest
    complete checkpoint. InputError for a folder that is not a run's. The folder is not changed, as the run may be in
    progress."""
    ended = run / "model" / "history.json"
    if ended.is_file():
        return restored(read_json(ended, HISTORY))
    complete = checkpoints.complete_checkpoints(run)
    if not complete:
        raise InputError(
            f"{str(run)!r} holds neither model/history.json nor a complete checkpoint; expected the folder of a run"
        )
    return restored(read_json(complete[-1] / checkpoints.HISTORY, HISTORY))


def baseline_sentence(loss: float, unigram: float) -> str:
    """A sentence that compares the loss with that of a unigram model."""
    baseline = f"a unigram model of these tokens has {unigram:.4f} nats"
    return f"For comparison, {baseline}." if loss < unigram else f"The model learnt nothing: {baseline}."


def draw_curves(path: Path, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Draws the loss by step of one or more runs: training loss as a thin line, held-out loss with dots; a cross on the
    axis of steps where either is not finite."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for i, (name, history) in enumerate(runs.items()):
        train = [(point["step"], point["loss"]) for point in history if "loss" in point]
        held = [(point["step"], point["eval_loss"]) for point in history if "eval_loss" in point]
        axes.plot(*zip(*train, strict=True), color=f"C{i}", linewidth=0.8, alpha=0.6, label=f"{name}, training")
        if held:
            axes.plot(*zip(*held, strict=True), color=f"C{i}", marker="o", markersize=3, label=f"{name}, held out")
        if broken := [step for step, loss in train + held if not math.isfinite(loss)]:
            (crosses,) = axes.plot(broken, [0] * len(broken), "x", color=f"C{i}", label=f"{name}, {NO_NUMBER}")
            crosses.set(transform=axes.get_xaxis_transform(), clip_on=False)
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.legend()
    figure.savefig(path, dpi=120)
