"""One arm: a model of one mixer, trained from one seed, evaluated on held-out rows as it goes."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

from ..spec import CACHED, from_json
from ..tasks import IGNORED, Rows
from ..tasks.base import Batch
from .environment import environment
from .folder import write_json
from .gates import GateWatch
from .model import build, gate_parameters
from .plan import Arm, Recipe

Tell = Callable[[int, dict[str, float] | None], None]  # step, scores where there are new ones


def train(arm: Arm, path: Path, tell: Tell) -> None:
    """Train and evaluate an arm; its result is written to `path` at the end, whole or not at all."""
    started, plan = time.perf_counter(), arm.plan
    set_seed(arm.seed)
    model = build(arm)
    curve = Curve(arm, tell)
    rows = Rows(plan.task.sample, arm.seed, plan.recipe.steps * plan.recipe.batch_size)
    trainer = Trainer(
        model,
        arguments(plan.recipe, arm.seed, path.parent),
        train_dataset=rows,
        callbacks=[curve],
        optimizers=(optimizer(model, plan.recipe), None),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    write_json(path, result(arm, model, curve) | {"seconds": time.perf_counter() - started})


def arguments(recipe: Recipe, seed: int, folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch_size,
        learning_rate=recipe.lr,
        warmup_steps=round(recipe.warmup * recipe.steps),
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.05},
        max_grad_norm=1.0,
        seed=seed,
        train_sampling_strategy="sequential",  # rows are drawn at random already
        label_names=["shift_labels"],
        remove_unused_columns=False,
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; norms, biases and gates do not decay: a gate that decays is pulled towards no competition."""
    gates = {id(p) for p in gate_parameters(model)}
    decayed = [p for p in model.parameters() if p.dim() > 1 and id(p) not in gates]
    free = [p for p in model.parameters() if p.dim() <= 1 or id(p) in gates]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95), fused=True)


class Curve(TrainerCallback):
    """Evaluates at equal distances, from before the first step to after the last, and keeps time between."""

    def __init__(self, arm: Arm, tell: Tell):
        self.arm, self.tell = arm, tell
        self.every = math.ceil(arm.plan.recipe.steps / arm.plan.recipe.evaluations)
        self.held_out = arm.plan.task.held_out(arm.plan.recipe.held_out)
        self.points: list[dict[str, Any]] = []
        self.seconds_per_step = math.inf  # in the fastest stretch between evaluations: others may use the machine too

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.point(0, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        step = state.global_step
        if step % self.every == 0 or step == state.max_steps:
            synchronise()
            stretch = (time.perf_counter() - self.resumed) / (step - self.points[-1]["step"])
            self.seconds_per_step = min(self.seconds_per_step, stretch)
            self.point(step, model)
            control.should_training_stop |= not finite(self.points[-1])
        elif step % max(state.max_steps // 100, 1) == 0:
            self.tell(step, None)

    def point(self, step: int, model: nn.Module) -> None:
        recipe, task = self.arm.plan.recipe, self.arm.plan.task
        loss, accuracy, gates = evaluate(model, self.held_out, recipe.batch_size)
        scores = task.scores(loss, accuracy) if math.isfinite(loss) else {}
        self.points.append({"step": step, "scores": scores, "gates": gates})
        self.tell(step, scores)
        self.resumed = time.perf_counter()


def finite(point: dict[str, Any]) -> bool:
    return bool(point["scores"])


def synchronise() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


@torch.no_grad()
def evaluate(model: nn.Module, rows: Batch, batch_size: int) -> tuple[float, float, list[dict[str, Any]]]:
    """(mean loss in nats, share of right answers, gate statistics) over the positions with a label."""
    training, device = model.training, next(model.parameters()).device
    loss, right, count = 0.0, 0, 0
    model.eval()
    with GateWatch().on(model) as watch:
        for batch in batches(rows, batch_size, device):
            labels = batch["shift_labels"]
            watch.asked = labels != IGNORED
            asked = int(watch.asked.sum())
            output = model(**batch)
            loss += output.loss.item() * asked
            right += int((output.logits.argmax(-1) == labels)[watch.asked].sum())
            count += asked
    model.train(training)
    return loss / count, right / count, watch.summary() if math.isfinite(loss) else []


def batches(rows: Batch, size: int, device: torch.device):
    parts = {name: values.to(device).split(size) for name, values in rows.items()}
    for values in zip(*parts.values(), strict=True):
        yield dict(zip(parts, values, strict=True))


def result(arm: Arm, model: nn.Module, curve: Curve) -> dict[str, Any]:
    plan, last = arm.plan, curve.points[-1]
    return {
        "comparison": plan.name,
        "mixer": arm.mixer,
        "seed": arm.seed,
        "spec": arm.spec,
        "parameters": sum(p.numel() for p in model.parameters()),
        "gate_parameters": sum(p.numel() for p in gate_parameters(model)),
        "intermediate_size": arm.width,
        "state_bytes": plan.shape.layers * state_bytes(arm),
        "scores": last["scores"],
        "diverged": not finite(last),
        "curve": curve.points,
        "tokens_per_second": plan.recipe.batch_size * plan.task.length / curve.seconds_per_step,
        "environment": environment(),
    }


def state_bytes(arm: Arm) -> int:
    """Of one layer and one sequence, at the end of a row."""
    spec, shape = from_json(arm.spec), arm.plan.shape
    at = {"tokens": arm.plan.task.length} if isinstance(spec, CACHED) else {}
    return spec.state_bytes(shape.hidden_size, shape.heads, **at)
