"""The arguments of transformers' Trainer that follow from the settings of an optimizer."""

from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from .optimization import Optimization


def training_arguments(
    recipe: Optimization, folder: Path, steps: int, warmup_steps: int, cpu: bool, **more: Any
) -> TrainingArguments:
    """The arguments for a run of `steps` updates, of which the first `warmup_steps` are warm-up.

    folder: where the Trainer writes. cpu: whether to ignore accelerators. more: other fields of TrainingArguments."""
    cosine = recipe.schedule == "cosine"
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        learning_rate=recipe.lr,
        warmup_steps=warmup_steps,
        lr_scheduler_type="cosine_with_min_lr" if cosine else "linear",
        lr_scheduler_kwargs={"min_lr_rate": recipe.min_lr} if cosine else {},
        max_grad_norm=recipe.clips or 0.0,
        remove_unused_columns=False,
        use_cpu=cpu,
        **more,
    )
