"""Trains one arm, which is a model with one mixer and one seed, and evaluates it on held-out rows during training."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import set_seed

from ..files.engine import Row
from ..files.memory import fitting
from ..files.workers import Worker
from ..history.specs.encoder_decoder import RecurrentSpec
from ..spec.mixer import ModelSpec
from ..spec.serialize import from_json
from ..spec.stack import as_decoder
from ..tasks import IGNORED, Answers, Sequences
from ..tasks.base import Batch
from ..training.compiled import compile_for_training, is_compiled, report_compiler_errors
from ..training.gate_statistics import GateWatch
from ..training.loop import Updates
from ..training.parameters import gate_parameters
from ..training.processes import Processes, device_of_this_process
from .model import build, flops, model_inputs
from .plan import Arm

Tell = Callable[[int, dict[str, float] | None], None]  # (step, scores after an evaluation, else None)


def measure(arm: Arm, worker: Worker) -> Row:
    """The result of an arm, as `engine.run` takes it; reports (step, scores)."""
    shape, rows = arm.plan.shape, f"{arm.plan.recipe.batch_size} rows of {arm.plan.task.length} tokens"
    with fitting(f"mixer {arm.mixer!r} with hidden_size={shape.hidden_size}, layers={shape.layers} and {rows}"):
        return train(arm, lambda *news: worker.report(news), worker.device or "cpu")[1]


def train(arm: Arm, tell: Tell, device: str = "cpu", weights: dict[str, Tensor] | None = None) -> tuple[nn.Module, Row]:
    """Trains and evaluates an arm, and returns the model and its result.

    device: "cpu"; any other value means the one accelerator that is visible to this process.
    weights: the parameters and buffers of a model without some of the gates, which the model begins with."""
    started, plan = time.perf_counter(), arm.plan
    set_seed(arm.seed)
    model = build(arm)
    if weights is not None:
        begin(model, weights)
    compile_for_training(model, plan.recipe.compile, cuda=device != "cpu" and torch.cuda.is_available(), packed=False)
    place = torch.device("cpu") if device == "cpu" else device_of_this_process()
    updates = Updates(model.to(place), plan.recipe, lambda model, batch, count: model(**batch).loss, Processes(place))
    curve = Curve(arm, updates, tell)
    with report_compiler_errors():
        curve.train()
    return model, result(arm, curve) | {"seconds": time.perf_counter() - started}


def begin(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Gives the model the weights; what they lack must be gates, which are left as they are."""
    lacking, unknown = model.load_state_dict(weights, strict=False)
    gates = {id(parameter) for parameter in gate_parameters(model)}
    assert not unknown and all(id(model.get_parameter(name)) in gates for name in lacking), (lacking, unknown)


class Curve:
    """The training of an arm. Evaluates at equal intervals, from before the first step to after the last, and measures
    the training speed in each interval."""

    def __init__(self, arm: Arm, updates: Updates, tell: Tell):
        self.arm, self.updates, self.tell, self.recipe = arm, updates, tell, arm.plan.recipe
        self.held_out = model_inputs(arm, arm.plan.task.held_out(self.recipe.held_out, arm.plan.part))
        self.points: list[dict[str, Any]] = []
        self.losses: list[Tensor] = []  # of the training steps since the last point
        self.speeds: list[float] = []  # training tokens per second between two evaluations

    def train(self) -> None:
        """Trains to the last step, or to an evaluation whose loss is not finite."""
        steps = self.recipe.steps
        every = math.ceil(steps / self.recipe.evaluations)
        self.point(0)
        for step, batch in enumerate(self.batches(), 1):
            self.losses += self.updates.backward([batch])
            self.updates.clip()
            self.updates.step()
            if step % every == 0 or step == steps:
                self.speeds.append(self.speed(step))
                self.point(step)
                if not self.points[-1]["scores"]:
                    break
            elif step % max(steps // 100, 1) == 0:
                self.tell(step, None)

    def batches(self) -> Iterator[Batch]:
        arm, steps, size = self.arm, self.recipe.steps, self.recipe.batch_size
        rows = arm.plan.task.training(arm.seed, steps * size)
        for step in range(steps):
            batch = default_collate([rows[i] for i in range(step * size, (step + 1) * size)])
            yield self.updates.processes.put(model_inputs(arm, batch))

    def speed(self, step: int) -> float:
        """Training tokens per second since the last evaluation."""
        if self.updates.processes.device.type != "cpu":
            torch.accelerator.synchronize()
        tokens = (step - self.points[-1]["step"]) * self.recipe.batch_size * self.arm.plan.task.length
        return tokens / (time.perf_counter() - self.resumed)

    def point(self, step: int) -> None:
        answers, gates = evaluate(self.updates.model, self.held_out, self.recipe.batch_size)
        scores = self.arm.plan.task.scores(answers) if math.isfinite(answers.loss) else {}
        self.points.append({"step": step, "scores": scores, "train_loss": self.train_loss(), "gates": gates})
        self.tell(step, scores)
        self.resumed = time.perf_counter()

    def train_loss(self) -> float | None:
        """The mean training loss since the last evaluation; None if there was no step."""
        mean = torch.stack(self.losses).mean().item() if self.losses else None
        self.losses.clear()
        return mean


@torch.no_grad()
def evaluate(model: nn.Module, rows: Batch, batch_size: int) -> tuple[Answers, list[dict[str, Any]]]:
    """(answers, gate statistics) of the model on the rows; positions without a label are not scored."""
    training, device = model.training, next(model.parameters()).device
    losses, right = [], []
    model.eval()
    with GateWatch().on(model) as watch:
        for begin in range(0, len(rows["shift_labels"]), batch_size):
            batch = {name: values[begin : begin + batch_size].to(device) for name, values in rows.items()}
            ids, labels = batch["input_ids"], batch["shift_labels"]
            # a position without a token in any channel is as empty as padding
            watch.mask = (ids >= 0).any(2) if ids.dim() == 3 else batch.get("attention_mask")
            watch.labelled = labels != IGNORED
            logits = model(**batch).logits
            losses.append(nn.functional.cross_entropy(logits.float().mT, labels, reduction="none").cpu())
            right.append((logits.argmax(-1) == labels).cpu())
    model.train(training)
    answers = Answers(rows, torch.cat(losses), torch.cat(right))
    return answers, watch.summary() if math.isfinite(answers.loss) else []


def result(arm: Arm, curve: Curve) -> Row:
    plan, last, spec, model = arm.plan, curve.points[-1], from_json(arm.spec), curve.updates.model
    tokens, shape = curve.held_out["input_ids"].shape[1], plan.shape
    stack = spec if isinstance(spec, ModelSpec) else as_decoder(spec)
    return {
        "comparison": plan.name,
        "mixer": arm.mixer,
        "seed": arm.seed,
        "lr": plan.recipe.lr,
        "steps": plan.recipe.steps,
        "spec": arm.spec,
        "parameters": sum(p.numel() for p in model.parameters()),
        "gate_parameters": sum(p.numel() for p in gate_parameters(model)),
        "intermediate_size": arm.width,
        "state_bytes": stack.state_bytes(shape.hidden_size, shape.heads, tokens, shape.layers),  # of one row
        "scores": last["scores"],
        "diverged": not last["scores"],
        **({"batches_without_labels": empty} if (empty := int(curve.updates.unlabelled)) else {}),
        "curve": curve.points,
        **(by_length(arm, model) if last["scores"] and plan.part == "held-out" else {}),
        "flops": flops(model, {name: values[:1] for name, values in curve.held_out.items()}, shape),
        "speeds": curve.speeds,
        "compiled": is_compiled(model),
    }


def by_length(arm: Arm, model: nn.Module) -> dict[str, Any]:
    """Scores on held-out rows of other lengths, for tasks that have them, and the alignment of one held-out row. A
    score is NaN where the loss is not finite, as the largest of NaN logits means nothing."""
    task, recipe, scores = arm.plan.task, arm.plan.recipe, {}
    for n, rows in task.by_length(max(recipe.held_out // 2, 1)).items():
        answers, _ = evaluate(model, model_inputs(arm, rows), max(recipe.batch_size * task.length // n, 1))
        scores[str(n)] = task.scores(answers)[task.metric.name] if math.isfinite(answers.loss) else math.nan
    return {"by_length": scores, "alignment": alignment(arm, model)}


@torch.no_grad()
def alignment(arm: Arm, model: nn.Module) -> dict[str, Any] | None:
    """Alignment of the longest of 16 held-out rows: {source: characters, target: characters, weights [target, source]}.
    None for a model without alignments."""
    spec, task = from_json(arm.spec), arm.plan.task
    if not (isinstance(spec, RecurrentSpec) and isinstance(task, Sequences) and spec.alignment):
        return None
    rows = task.held_out(16)
    longest = rows["attention_mask"].sum(1).argmax()
    row = {name: values[longest, None].to(next(model.parameters()).device) for name, values in rows.items()}
    weights = model.eval()(**row, output_alignments=True).alignments
    source, target = (task.text(row[name][0]) for name in ("input_ids", "shift_labels"))
    return {"source": source, "target": target, "weights": weights[0, : len(target), : len(source)].tolist()}
