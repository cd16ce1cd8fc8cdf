"""A training run in a folder that belongs to one recipe and one data set:

run.json                   the recipe and the data; the folder is for these only
checkpoint-<step>/         the newest two complete checkpoints
model/                     the trained model: safetensors, tokenizer, README.md with curves
runs/                      the logs of TensorBoard, if it is one of the trackers
"""

import errno
import json
import math
import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from safetensors import SafetensorError
from transformers import AutoTokenizer, ProgressCallback, TrainerState, TrainingArguments, set_seed
from transformers.trainer import TRAINER_STATE_NAME

from .. import zoo
from ..convert.checkpoint import fetched
from ..data import Collator, PackedData, open_data, unigram_loss
from ..layers.blocks.compiled import compile_for_training, is_compiled, report_compiler_errors
from ..utils.errors import InputError, reading
from ..utils.extras import named, require
from ..utils.integrity import CHECKSUMS, damage, read_record, write_json
from ..utils.processes import handling
from ..utils.provenance import claim, defaults
from . import checkpoints
from .agreement import agreed, errors_in_all
from .arguments import training_arguments
from .card import baseline_sentence, can_draw, read_history, write_card
from .machine import peak
from .model import build, count, estimate, recompute_blocks
from .optimizer import optimizer
from .processes import PARALLEL, TIMEOUT, check_launcher, grid, is_connection_error, unresponsive_processes
from .recipes import FROM_DATA, About, Recipe
from .results import finite, restored
from .sharding import shard
from .trainer import HeadraceTrainer, Measures, Progress, TimedSteps, answers
from .watch import Stop, Watch

TRACKERS = ("tensorboard", "wandb", "trackio", "none")
NOT_IDENTIFYING = ("seconds", "megabytes_per_second", "files")  # fields of a manifest that do not identify the data
OF_THE_MACHINE = (*PARALLEL, "compile", "threads")  # fields of a recipe that do not identify the run
LOG_EVERY = 10  # steps between logs if save_every is a multiple, else their greatest common divisor


def train(
    recipe: Recipe, about: About, data: PackedData | Path, folder: Path, trackers: str = "none",
    timeout: int = TIMEOUT,
):  # fmt: skip
    """Trains the model of a recipe to the end, from the newest checkpoint in the folder if there is one.

    Args:
        data: prepared data, or their folder.
        trackers: names from TRACKERS, separated by commas.
        timeout: seconds that a process waits for the others.

    Returns:
        The Trainer, or None for a run that has ended before.

    Raises:
        InputError: data, tokenizer, trackers or launcher do not fit the recipe, the folder belongs to another run, a
            checkpoint is damaged or cannot be written, training diverged, or a process no longer answers.
    """
    check_trackers(trackers)
    check_launcher(recipe, timeout)
    settings = arguments(recipe, folder, trackers, timeout)
    processes = settings.world_size  # initializes torch.distributed
    with errors_in_all():
        opened = open_data(data) if isinstance(data, Path) else data
        check_data(recipe, opened)
        check_tokenizer(recipe, opened)
        recipe.share(processes)
    with agreed(folder, partial(begin, folder, recipe, opened)) as last:
        if is_finished(folder, last, recipe):
            print_once(f"{folder} is finished, and nothing is left to do; {next_command(folder, opened)}")
            return None
        set_seed(recipe.seed)
        trainer = make_trainer(recipe, opened, settings)
        print_once(describe_start(trainer, recipe, last))
        with report_failures(trainer, folder), report_compiler_errors():
            train_to_end(trainer, last, recipe, folder)
            finish(trainer, recipe, about, opened, folder / "model")
    return trainer


def print_once(lines: str) -> None:
    if PartialState().is_main_process:
        print(lines)


def describe_start(trainer: HeadraceTrainer, recipe: Recipe, last: Path | None) -> str:
    """What a run is about to do: the model, the tokens and how often each row of the data is read."""
    parameters = count(trainer.model)["tied" if recipe.tie else "untied"]
    passes = recipe.steps * recipe.rows / len(trainer.train_dataset)  # type: ignore[arg-type]
    begins = "" if last is None else f"; it resumes from {last}"
    model: Any = trainer.model
    compiled = ""
    if is_compiled(model) or torch.cuda.is_available():
        compiled = f"; blocks are {'' if is_compiled(model) else 'not '}compiled"
    return (
        f"{recipe.mixer}: {recipe.layers} layers of width {recipe.hidden_size}, {parameters / 1e6:,.2f} M parameters\n"
        f"{recipe.tokens:,.0f} tokens in {recipe.steps:,} steps of {recipe.rows} rows of {recipe.length}: "
        f"{passes:,.3g} passes over the data{begins}{compiled}"
    )


def is_finished(folder: Path, last: Path | None, recipe: Recipe) -> bool:
    """Whether the run has ended and its model is whole, so that the same command has nothing to do."""
    model = folder / "model"
    if last is None or checkpoints.step(last) < recipe.steps or not (model / "README.md").is_file():
        return False
    ended = any("final_loss" in point and point["step"] == recipe.steps for point in read_history(folder))
    whole = (model / CHECKSUMS).is_file() and damage(model, read_record(model / CHECKSUMS), contents=False) is None
    return ended and whole


def next_command(folder: Path, data: PackedData) -> str:
    """The command to run next: a model of tokens that are not text has no prompt."""
    generate = shlex.join(["headrace", "generate", str(folder / "model"), "--prompt", "It was"])
    return f"next: {generate if data.tokenizer is not None else shlex.join(['headrace', 'curves', str(folder)])}"


def begin(folder: Path, recipe: Recipe, data: PackedData) -> Path | None:
    """Claims the folder for the run and returns the checkpoint to resume from. Called in process 0 only. A run may go
    on with another number of processes per row.

    Raises:
        InputError: the folder belongs to another run.
    """
    identity = {name: value for name, value in data.manifest.items() if name not in NOT_IDENTIFYING}
    fields = {name: value for name, value in asdict(recipe).items() if name not in OF_THE_MACHINE}
    plan = {"recipe": json.loads(json.dumps(fields)), "data": identity}  # as it is read back: lists for tuples
    claim(folder, plan, "run.json", defaults({"recipe": recipe}))
    checkpoints.discard_unfinished(folder)
    return checkpoints.newest(folder)


@contextmanager
def report_failures(trainer: HeadraceTrainer, folder: Path) -> Iterator[None]:
    """Raises an InputError that names the last complete checkpoint for a file that cannot be written, and for a process
    that does not answer."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if is_connection_error(error):
            reason = unresponsive_processes(trainer.args.ddp_timeout)
        elif isinstance(error, RuntimeError) and "inline_container" not in str(error):  # not raised by torch.save
            raise
        elif getattr(error, "errno", None) == errno.ENOSPC:
            reason = "the disk is full"
        else:
            reason = f"a checkpoint cannot be written ({str(error).splitlines()[0]})"
        raise stopped_run(f"{reason} at step {trainer.state.global_step}", folder) from error


def stopped_run(what: str, folder: Path) -> InputError:
    return InputError(f"{what}; the last complete checkpoint is {checkpoints.newest(folder)}")


def train_to_end(trainer: HeadraceTrainer, last: Path | None, recipe: Recipe, folder: Path) -> None:
    """Trains to the last step. InputError if too many gradients were not finite; KeyboardInterrupt or Terminated if a
    signal stopped the run."""
    stop, watch = Stop(), Watch(trainer, recipe.warmup_steps)
    for callback in (stop, watch, checkpoints.MarkComplete()):
        trainer.add_callback(callback)
    with handling(stop.on_signal, signal.SIGTERM, signal.SIGINT):
        train_from(trainer, last)
    if watch.broken:
        raise stopped_run(f"training diverged and was stopped at step {trainer.state.global_step}", folder)
    stop.end()


def train_from(trainer: HeadraceTrainer, last: Path | None) -> None:
    """Trains from a checkpoint, or from the start. A checkpoint of the last step is only loaded, as the Trainer would
    take one step more."""
    state = None if last is None else TrainerState.load_from_json(str(last / TRAINER_STATE_NAME))
    if state is None or state.global_step < trainer.args.max_steps:
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
    else:
        trainer.state = state
        trainer._load_from_checkpoint(str(last))
        for begins in ("on_train_begin", "on_train_end"):  # trackers open the folder of the run
            getattr(trainer.callback_handler, begins)(trainer.args, trainer.state, trainer.control)


def check_data(recipe: Recipe, data: PackedData) -> None:
    length, vocab_size = (data.manifest[name] for name in FROM_DATA)
    if length != recipe.length:
        raise InputError(
            f"the data were prepared with length={length}; the recipe has length={recipe.length}; prepare data with "
            f"--length {recipe.length}, or set length={length}"
        )
    if vocab_size > recipe.vocab_size:
        raise InputError(
            f"the data were prepared with vocab_size={vocab_size}; the recipe has vocab_size={recipe.vocab_size}; "
            f"prepare data with a smaller --tokenizer or --train-bpe, or set vocab_size={vocab_size}"
        )
    if recipe.rows > (count := len(full_rows(data.train, length))):
        fewer = f"set batch_tokens={count * length}" if count else "prepare more text, or a smaller --length"
        raise InputError(
            f"batch_tokens={recipe.batch_tokens} is {recipe.rows} rows per step, but the data have {count} full rows; "
            f"expected at most {count}; {fewer}"
        )
    collate, evaluated = Collator(0, recipe.separate_documents), evenly_spaced(data.held_out, recipe.evaluate_rows)
    if not any(answers(collate([row])).any() for row in evaluated):
        raise InputError(
            "the held-out rows have no labels; expected a document of at least 2 tokens among them; prepare data with "
            "a larger --held-out"
        )


def check_tokenizer(recipe: Recipe, data: PackedData) -> None:
    """InputError if the checkpoint of the recipe has another tokenizer than the data."""
    if recipe.weights is None or data.tokenizer is None:
        return
    file = fetched(recipe.weights) / "tokenizer.json"
    if not file.is_file():
        return
    with reading(f"weights={recipe.weights!r} has no readable tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, local_files_only=True)
    if tokenizer.get_vocab() != data.tokenizer.get_vocab():
        raise InputError(
            f"weights={recipe.weights!r} has another tokenizer than the data; prepare the data with --tokenizer "
            f"{recipe.weights}"
        )


def check_trackers(trackers: str) -> None:
    for name in zoo.split(trackers):
        if name not in TRACKERS:
            raise InputError(f"--trackers={trackers!r}; expected {', '.join(TRACKERS)}, or several separated by commas")
        if name != "none":
            require(f"--trackers={trackers}", name)


def make_trainer(recipe: Recipe, data: PackedData, settings: TrainingArguments) -> HeadraceTrainer:
    settings.per_device_train_batch_size, settings.gradient_accumulation_steps = recipe.share(settings.world_size)
    with errors_in_all():
        model = build(recipe)
    if recipe.recompute:
        recompute_blocks(model)
    splits = recipe.shard > 1 or recipe.context_parallel > 1
    wanted = False if splits and recipe.compile is None else recipe.compile
    compile_for_training(model, wanted, cuda=torch.cuda.is_available(), packed=recipe.separate_documents)
    if recipe.shard > 1:
        replicas = settings.world_size // recipe.shard
        shard(model, grid(settings, dp_replicate=replicas, dp_shard=recipe.shard))
    end = None if data.tokenizer is None else data.tokenizer.eos_token_id
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    held_out = data.manifest["held_out"]
    counted = estimate(recipe)["flops_per_token"]
    trainer = HeadraceTrainer(
        model,
        settings,
        data_collator=Collator(end or 0, recipe.separate_documents),
        train_dataset=full_rows(data.train, recipe.length),
        eval_dataset=evenly_spaced(data.held_out, recipe.evaluate_rows),
        optimizers=(optimizer(model, recipe), None),
        measures=Measures(recipe.batch_tokens, held_out["bytes"] / held_out["tokens"], counted, peak_flops()),
        per_row=recipe.context_parallel,
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Progress)
    if settings.device.type == "cpu":
        trainer.add_callback(TimedSteps(recipe.threads))
    check_started(trainer, recipe)
    return trainer


def check_started(trainer: HeadraceTrainer, recipe: Recipe) -> None:
    """InputError if accelerate started with other settings than requested, which it does not report by itself."""
    started = trainer.accelerator
    processes = int(os.environ.get("WORLD_SIZE", 1))
    precision = "bf16" if recipe.precision == "bfloat16" else "no"
    compiled = started.state.dynamo_plugin.backend.value != "NO"
    for name, requested, actual in (
        ("processes", processes, started.num_processes),
        ("mixed precision", precision, started.mixed_precision),
        ("compilation by accelerate", False, compiled),  # blocks are compiled, not the whole model
    ):
        if actual != requested:
            raise InputError(f"{name}: {requested} was requested, but accelerate started with {actual}")


def full_rows(rows: Dataset, length: int) -> Dataset:
    """The rows without the last one if it is not full, as it would make a step smaller."""
    return rows if len(rows[-1]["input_ids"]) == length else rows.select(range(len(rows) - 1))


def evenly_spaced(rows: Dataset, count: int) -> Dataset:
    """At most `count` of the rows, evenly spaced."""
    return rows if len(rows) <= count else rows.select(torch.linspace(0, len(rows) - 1, count).long().tolist())


def arguments(recipe: Recipe, folder: Path, trackers: str, timeout: int = TIMEOUT) -> TrainingArguments:
    cpu = not torch.accelerator.is_available()
    return training_arguments(
        recipe,
        folder,
        recipe.steps,
        recipe.warmup_steps,
        cpu,
        bf16=recipe.precision == "bfloat16",
        ddp_timeout=timeout,
        seed=recipe.seed,
        data_seed=recipe.seed,
        dataloader_pin_memory=not cpu,
        dataloader_drop_last=True,
        eval_strategy="steps",
        eval_steps=recipe.evaluate_every,
        save_steps=recipe.save_every,
        logging_steps=math.gcd(recipe.save_every, LOG_EVERY),
        logging_nan_inf_filter=False,
        report_to=list(zoo.split(trackers)),
        per_device_eval_batch_size=recipe.micro_batch,
    )


def peak_flops() -> float | None:
    """Peak bfloat16 FLOPs per second of all devices without sparsity, by the data sheets; None if not known."""
    if not torch.cuda.is_available():
        return None
    per_device = peak(torch.cuda.get_device_name())
    count = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return None if per_device is None else per_device * count


def finish(trainer: HeadraceTrainer, recipe: Recipe, about: About, data: PackedData, folder: Path) -> None:
    """Evaluates the trained model on all held-out rows, and writes the model, tokenizer, history and card."""
    model: Any = trainer.model
    recipe = replace(recipe, compile=is_compiled(model))
    model.config.use_cache = True  # the Trainer turned it off
    trainer.save_model(str(folder))
    loss = trainer.evaluate(data.held_out, metric_key_prefix="final")["final_loss"]
    with errors_in_all():
        if not trainer.is_world_process_zero():
            return
        if data.tokenizer is not None:
            data.tokenizer.save_pretrained(folder)
        history = finite(trainer.state.log_history)
        write_json(folder / "history.json", history)
        unigram = unigram_loss(data.held_out)
        write_card(folder, recipe, about, data.manifest, restored(history), unigram)
        result = f"{loss:.4f} nats per held-out token" if math.isfinite(loss) else "its held-out loss is not finite"
        print_once(f"{folder} is the trained model: {result}. {baseline_sentence(loss, unigram)}")
        if not can_draw():
            curves = shlex.join(["headrace", "curves", str(folder.parent)])
            print_once(f"curves.png needs {named('studies')}; then {curves}")
        print_once(next_command(folder.parent, data))
