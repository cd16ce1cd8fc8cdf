"""Attention transfer: new layers of a model learn to imitate the attention layers whose place they take.

The old model reads text; each new layer gets what the old one got, and the loss is the mean over the layers of

    ‖new(x) − old(x)‖² / ‖old(x)‖²

so that all layers train at once, in one pass of the old model, and none is disturbed by the errors of those before it
(LoLCATs, arXiv 2410.10254, section 3.1). Only what the old layers do not have trains, unless `trains` is "all".
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..convert.linearize import attention_of
from ..data import Collator, PackedData
from ..data.rows import by_step, evenly_spaced, full_rows, order
from ..extra.windowed import WindowedMixer
from ..files.checks import read_json
from ..hf.model import HeadraceForCausalLM
from ..layers.linear.mixer import LinearMixer
from ..ops.call import accumulator
from ..spec.record import NonNegativeFloat, PositiveFloat, PositiveInt, Range
from ..utils.errors import InputError, require
from ..utils.integrity import write_json
from . import checkpoints
from .loop import Batch, Updates
from .optimization import Optimization, Seed
from .processes import Processes, errors_in_all, gathered, timed_steps

WEIGHTS = "layers.safetensors"  # of the new layers in a checkpoint
TAKEN_OVER = "q_norm", "k_norm", "o_proj"  # modules of a new layer that the old one has too
PARTS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "gate": "g_proj"}  # parts of in_proj: the old layer's modules
Tell = Callable[[int, float], None]  # (step, its error)


@dataclass(frozen=True)
class Transfer(Optimization):
    """The settings of attention transfer. Those of the optimizer have other defaults than in a recipe, as few weights
    are trained, to a target that does not move."""

    lr: PositiveFloat = 1e-2
    warmup: NonNegativeFloat = 0.1
    weight_decay: NonNegativeFloat = 0.0
    clip: PositiveFloat | None = 10.0
    steps: PositiveInt = 200
    rows: PositiveInt = 2  # per step
    held_out: PositiveInt = 16  # rows of an evaluation
    save_every: PositiveInt = 50  # steps
    trains: Literal["new", "all"] = "new"  # what the old layers do not have, or all weights of the new layers
    # share of the steps in which layers with a window read their memory alone
    window_dropout: Annotated[float, Range("0 to 1, a share of the steps", lambda x: 0 <= x <= 1)] = 0.0
    # bfloat16: autocast, with weights as the checkpoint has them; the new layers' weights are float32
    precision: Literal["bfloat16", "float32"] = "float32"
    seed: Seed = 0

    def weights(self, stored: torch.dtype) -> torch.dtype:
        """The data type of the old model's weights. stored: that of the checkpoint."""
        return torch.promote_types(stored, torch.float32) if self.precision == "float32" else stored

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context in which layers of both precisions compute; it keeps no copies of weights, 2 bytes for each."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bfloat16", cache_enabled=False)


class Imitation(nn.Module):
    """The new layers of `linear`, which `linearize` made of the model. Its parameters are those that train. Processes
    share the rows of a step; each has the whole model."""

    def __init__(
        self, model: HeadraceForCausalLM, linear: HeadraceForCausalLM, trains: str = "new",
        processes: Processes | None = None,
    ):  # fmt: skip
        super().__init__()
        self.processes = processes or Processes(model.device)
        blocks: Any = linear.model.backbone.layers
        self.old = attention_of(model)
        changed = [i for i in self.old if isinstance(blocks[i].mixer, LinearMixer)]
        self.layers = nn.ModuleDict({str(i): blocks[i].mixer for i in changed})
        self.model = [model.eval()]  # in a list, as its parameters are not those of this module
        for i in changed if trains == "new" else ():
            _keep_what_is_taken_over(self.layers[str(i)], self.old[i])
        if not any(p.requires_grad for p in self.parameters()):
            raise InputError("--trains new, and the new layers have no weights that the old do not; expected all")

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [B, T] -> the relative squared error of each layer, [layers]. Of several processes, whose rows
        differ, the mean is that of all rows. A layer's gradients are computed when the old layer has its output, so
        that no more than one layer's activations are in memory."""
        found: dict[str, Tensor] = {}
        kind, trains = input_ids.device.type, torch.is_grad_enabled()

        def note(name: str, module: nn.Module, given: Any, out: Any) -> None:
            layer, error = self.layers[name], partial(self.error, self.layers[name], given[0], out[0])
            weights = [p for p in layer.parameters() if p.requires_grad] if trains else []
            with torch.set_grad_enabled(trains):
                found[name] = _AtOnce.apply(error, *weights) if weights else error()

        with ExitStack() as hooks:
            for name in self.layers:
                hooks.enter_context(self.old[int(name)].register_forward_hook(partial(note, name)))
            with torch.no_grad(), torch.autocast(kind, enabled=torch.is_autocast_enabled(kind), cache_enabled=False):
                self.model[0].model(input_ids, use_cache=False)
        return torch.stack([found[name] for name in self.layers])

    def error(self, layer: nn.Module, x: Tensor, expected: Tensor) -> Tensor:
        whole = self.processes.sum(_square(expected))
        return _square(layer(x)[0] - expected) * self.processes.count / whole

    def finish(self) -> None:
        """Makes the layers those of an ordinary model again, all of whose weights can train."""
        for layer in self.layers.values():
            in_proj: Any = layer.in_proj
            for kind in [*getattr(in_proj, "parametrizations", ())]:
                parametrize.remove_parametrizations(in_proj, kind)
            layer.requires_grad_(True)


class _AtOnce(torch.autograd.Function):
    """A number and its gradients of weights, which alone are kept for the backward."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[], Tensor], *weights: Tensor) -> Tensor:
        with torch.enable_grad():
            result = function()
        with torch.autocast(result.device.type, enabled=False):
            ctx.save_for_backward(*torch.autograd.grad(result, weights, allow_unused=True))
        return result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return None, *(None if x is None else x * gradient for x in ctx.saved_tensors)


def _square(x: Tensor) -> Tensor:
    return x.to(accumulator(x)).square().sum()


class RowsOfTwo(nn.Module):
    """A parametrization of in_proj's weight or bias by two tensors: the rows of the parts that the old layer has too,
    and the others, which alone have gradients and an optimizer's moments.

    taken: the size of each part, and whether the old layer has it."""

    def __init__(self, taken: list[tuple[int, bool]]):
        super().__init__()
        self.taken = taken

    def forward(self, *tensors: Tensor) -> Tensor:
        sizes = [[size for size, is_taken in self.taken if is_taken == kind] for kind in (True, False)]
        pieces = [iter(x.split(of_kind)) for x, of_kind in zip(tensors, sizes, strict=True)]
        return torch.cat([next(pieces[not is_taken]) for _, is_taken in self.taken])

    def right_inverse(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        parts = list(zip(whole.split([size for size, _ in self.taken]), self.taken, strict=True))
        taken, new = (torch.cat([x for x, (_, is_taken) in parts if is_taken == kind]) for kind in (True, False))
        return taken, new


def _keep_what_is_taken_over(layer: Any, old: nn.Module) -> None:
    """Freezes the weights that the old layer has too: those of q, k, v, o, a gate, and the norms of q and k."""
    own = {part for part, module in PARTS.items() if getattr(old, module) is not None}
    for name in TAKEN_OVER:
        if (module := getattr(layer, name, None)) is not None:
            module.requires_grad_(False)
    taken = [(size, name in own) for name, size in layer.parts.items() if size]
    for kind in [name for name, _ in layer.in_proj.named_parameters()]:
        layer.in_proj.get_parameter(kind).requires_grad_(False)
        if not all(is_taken for _, is_taken in taken):
            parametrize.register_parametrization(layer.in_proj, kind, RowsOfTwo(taken))
            layer.in_proj.parametrizations[kind].original1.requires_grad_(True)


def transfer(
    imitation: Imitation, data: PackedData, settings: Transfer, folder: Path,
    tell: Tell = lambda step, error: None, threads: int | None = None,
) -> tuple[dict[str, dict[str, float]], list[float]]:  # fmt: skip
    """Trains the new layers, from the newest checkpoint in the folder if there is one. All processes must call it.

    Args:
        imitation: on the device of its process, as is its model.
        data: prepared with the model's tokenizer.
        tell: gets the number of each step and the mean error of its layers, in process 0.
        threads: number of PyTorch's threads on a CPU; None: measured.

    Returns:
        {"before": error of each layer on held-out rows by its index, "after": the same}, and the mean error of the
        layers in each step.
    """
    processes, device = imitation.processes, imitation.processes.device
    shared = processes.shared(imitation, unused=settings.window_dropout > 0)  # a window that is dropped
    updates = Updates(shared, settings, mean_error, processes, settings.precision)
    given, diverged = (imitation, data, settings, device), f"the training diverged with --lr={settings.lr:g}"
    zero = "layer {} gives 0, or numbers that are not finite; expected it among --keep"
    before = {i: _finite(error, zero.format(i)) for i, error in errors(*given).items()}
    windows = [x.near for x in imitation.layers.values() if isinstance(x, WindowedMixer) and x.summands]
    curve = _resumed(imitation, updates, folder)
    first = len(curve)
    with timed_steps(device, threads) as took:
        left = enumerate(batches(data, settings, processes, first), first + 1)
        for step, batch in islice(left, settings.steps - first):
            begun = time.perf_counter()
            with silent(windows if drops_windows(settings, step) else ()):
                (error,) = updates.backward([batch])
            updates.clip()
            updates.step()
            took(time.perf_counter() - begun)
            curve.append(_finite(processes.sum(error).item() / processes.count, diverged))
            if processes.rank == 0:
                tell(step, curve[-1])
            if step % settings.save_every == 0 and step < settings.steps:
                _save(imitation, updates, folder, curve)
    return {"before": before, "after": {i: _finite(error, diverged) for i, error in errors(*given).items()}}, curve


def _finite(error: float, cause: str) -> float:
    require(math.isfinite(error), f"the error of the layers is {error}: {cause}")
    return error


def drops_windows(settings: Transfer, step: int) -> bool:
    """Whether the windows give 0 in a step, so that the memories alone imitate attention: a layer with both learns to
    ignore its memory (arXiv 2510.05901). The answer is the same after an interruption."""
    return Random(f"{settings.seed} {step}").random() < settings.window_dropout


@contextmanager
def silent(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Lets modules give 0 within the block."""
    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(_nothing))
        yield


def _nothing(module: nn.Module, given: Any, out: Any) -> Any:
    return (torch.zeros_like(out[0]), out[1]) if isinstance(out, tuple) else torch.zeros_like(out)


def mean_error(imitation: nn.Module, batch: Batch, count: Tensor) -> Tensor:
    return imitation(batch["input_ids"]).mean()


@torch.no_grad()
def errors(imitation: Imitation, data: PackedData, settings: Transfer, device: torch.device) -> dict[str, float]:
    """Returns the error of each layer by its index, the mean over held-out rows."""
    rows = evenly_spaced(data.held_out, settings.held_out)
    with settings.autocast(device):
        found = [imitation(batch_of([rows[i]], device)["input_ids"]) for i in range(len(rows))]
    mean = torch.stack(found).cpu().double().mean(0)  # Apple's GPUs have no float64
    return dict(zip(imitation.layers, mean.tolist(), strict=True))


def batches(data: PackedData, settings: Transfer, processes: Processes, after: int = 0) -> Iterator[Batch]:
    """This process's rows of each step that follows step number `after`, without an end."""
    rows = full_rows(data.train, data.manifest["length"])
    for numbers in by_step(partial(order, rows, settings.seed), len(rows), settings.rows, after):
        yield batch_of([rows[i] for i in numbers[processes.rank :: processes.count]], processes.device)


def batch_of(rows: list[Any], device: torch.device) -> Batch:
    return {name: x.to(device) for name, x in Collator(0)(rows).items()}


def _save(imitation: Imitation, updates: Updates, folder: Path, curve: list[float]) -> None:
    written, first = folder / checkpoints.UNFINISHED / checkpoints.name(len(curve)), imitation.processes.rank == 0
    with errors_in_all():
        if first:
            written.mkdir(parents=True)
            save_model(imitation, str(written / WEIGHTS))
            write_json(written / checkpoints.HISTORY, curve)
    checkpoints.save_optimizer(written, imitation, updates.optimizer, updates.schedule)
    with errors_in_all():
        if first:
            checkpoints.complete(folder, written.name)


def _resumed(imitation: Imitation, updates: Updates, folder: Path) -> list[float]:
    """Goes on from the newest checkpoint, and returns the errors of the steps that are done."""
    last = None
    with errors_in_all():
        if imitation.processes.rank == 0:
            checkpoints.discard_unfinished(folder)
            last = checkpoints.newest(folder)
    if (last := gathered(last)[0]) is None:
        return []
    load_model(imitation, str(last / WEIGHTS))
    checkpoints.load_optimizer(last, imitation, updates.optimizer, updates.schedule)
    return read_json(last / checkpoints.HISTORY, [float])
