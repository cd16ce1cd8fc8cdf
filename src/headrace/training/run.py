"""A training run in a folder that belongs to one recipe and one data set:

run.json                   the recipe and the data; the folder is for these only
checkpoint-<step>/         the newest two complete checkpoints
model/                     the trained model: safetensors, tokenizer, README.md with curves
runs/                      the logs of TensorBoard, if it is one of the trackers
"""

import errno
import json
import math
import shlex
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import set_seed

from ..convert.checkpoint import fetched, read_tokenizer
from ..data import Collator, PackedData, open_data, unigram_loss
from ..data.rows import ORDER, evenly_spaced, full_rows, order
from ..files.checks import damage, read_record
from ..files.hub import GGUF, RUN
from ..files.processes import handling
from ..files.provenance import claim, defaults, release
from ..files.results import restored
from ..utils.errors import InputError
from ..utils.extras import named
from ..utils.integrity import CHECKSUMS, write_json
from . import checkpoints
from .card import baseline_sentence, can_draw, read_history, write_card
from .compiled import compile_for_training, is_compiled, report_compiler_errors
from .distillation import teacher_of
from .history import Measures, check_trackers, open_trackers
from .loop import Batches, Loop, answers
from .machine import peak
from .model import build, count, flops_per_token, meta_model, recompute_blocks
from .processes import TIMEOUT, Processes, agreed, answering, connect, errors_in_all, gathered
from .recipes import FROM_DATA, About, Recipe, to_yaml
from .sharding import shard
from .watch import Stop

OF_THE_MACHINE = ("context_parallel", "shard", "compile", "threads")  # fields of a recipe that do not identify the run


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
        The loop, or None for a run that has ended before.

    Raises:
        InputError: data, tokenizer, trackers or launcher do not fit the recipe, the folder belongs to another run, a
            checkpoint is damaged or cannot be written, training diverged, or a process no longer answers.
    """
    check_trackers(trackers)
    processes = connect(timeout, recipe.context_parallel, recipe.shard)
    with answering(processes), errors_in_all():
        opened = open_data(data) if isinstance(data, Path) else data
        check_tokenizer(recipe, opened)
        check_data(recipe, opened)
        recipe.share(processes.count)
    with answering(processes), agreed(folder, partial(begin, folder, recipe, opened)) as last:
        if gathered(is_finished(folder, last, recipe))[0]:  # as process 0 sees it, whose files others may see later
            if processes.rank == 0:
                print(f"{folder} is finished, and nothing is left to do; {next_command(folder, opened)}")
            return None
        set_seed(recipe.seed)
        try:
            loop, stop = make_loop(recipe, opened, folder, processes), Stop()
            if processes.rank == 0:
                print(describe_start(loop, last))
            with report_failures(loop), report_compiler_errors(), closing(loop.history):
                with errors_in_all():
                    if processes.rank == 0:
                        loop.history.trackers = open_trackers(trackers, folder, to_yaml(recipe, about))
                if last is not None:
                    loop.resume(last)
                with handling(stop.on_signal, signal.SIGTERM, signal.SIGINT):
                    loop.run(stop)
                stop.end()
                finish(loop, about, opened)
        except BaseException:  # such as rows that are too long for the weights, more than the memory, or Ctrl-C
            release(folder, RUN)  # so that a corrected command can take it, if it has no results
            raise
    return loop


def describe_start(loop: Loop, last: Path | None) -> str:
    """What a run is about to do: the model, the tokens and how often each row of the data is read."""
    model, recipe = loop.model, loop.recipe
    parameters = count(model)["tied" if recipe.tie else "untied"]
    passes = recipe.steps * recipe.rows / len(loop.batches.rows)
    begins = "" if last is None else f"; it resumes from {last}"
    uncompiled = "; blocks are not compiled" if torch.cuda.is_available() else ""
    compiled = "; blocks are compiled" if is_compiled(model) else uncompiled
    return (
        f"{recipe.mixer}: {recipe.layers} layers of width {recipe.hidden_size}, {parameters / 1e6:,.2f} M parameters\n"
        f"{recipe.trained_tokens:,} tokens in {recipe.steps:,} steps of {recipe.rows} rows of {recipe.length}: "
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
    fields = {name: value for name, value in asdict(recipe).items() if name not in OF_THE_MACHINE}
    plan = {"recipe": json.loads(json.dumps(fields)), "data": data.identity, "order": ORDER}  # lists for tuples
    claim(folder, plan, RUN, defaults({"recipe": recipe}))
    checkpoints.discard_unfinished(folder)
    return checkpoints.newest(folder)


@contextmanager
def report_failures(loop: Loop) -> Iterator[None]:
    """Raises an InputError that names the last complete checkpoint for a file that cannot be read or written, a
    connection that fails, and a process that does not answer."""
    try:
        with answering(loop.processes, lambda who: checkpoints.stopped_run(f"{who} at step {loop.step}", loop.folder)):
            yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):  # not raised by torch.save
            raise
        elif getattr(error, "errno", None) == errno.ENOSPC:
            reason = "the disk is full"
        else:
            writes = (loop.folder / "model").exists() or any((loop.folder / checkpoints.UNFINISHED).glob("*"))
            other = "data cannot be read, or numbers not be logged"
            what = f"a checkpoint cannot be written to {loop.folder}" if writes else other
            reason = f"{what} ({next(iter(str(error).splitlines()), type(error).__name__)})"
        raise checkpoints.stopped_run(f"{reason} at step {loop.step}", loop.folder) from error


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
        how = f"set batch_tokens={recipe.even(count) * length}" if count else "prepare more text, or a smaller --length"
        raise InputError(
            f"batch_tokens={recipe.batch_tokens} is {recipe.rows} rows per step, but the data have {count} full rows; "
            f"expected at most {count}; {how}"
        )
    if recipe.separate_documents and "shift_labels" in data.held_out[0]:
        raise InputError("separate_documents=true, and a row of a task has no documents; expected false")
    collate, evaluated = Collator(0, recipe.separate_documents), evenly_spaced(data.held_out, recipe.evaluate_rows)
    if not any(answers(collate([row])).any() for row in evaluated):
        raise InputError(
            "the held-out rows have no labels; expected a document of at least 2 tokens among them; prepare data with "
            "a larger --held-out"
        )


def check_tokenizer(recipe: Recipe, data: PackedData) -> None:
    """InputError if a checkpoint of the recipe has another tokenizer than the data."""
    for name in ("weights", "teacher"):
        checkpoint = getattr(recipe, name)
        if checkpoint is None or data.tokenizer is None:
            continue
        folder = fetched(checkpoint)
        has_one = folder.suffix == GGUF or (folder / "tokenizer.json").is_file()
        if has_one and read_tokenizer(folder).get_vocab() != data.tokenizer.get_vocab():
            other = f"{name}={checkpoint!r} has another tokenizer than the data"
            raise InputError(f"{other}; prepare the data with --tokenizer {checkpoint}")


def make_loop(recipe: Recipe, data: PackedData, folder: Path, processes: Processes) -> Loop:
    with errors_in_all():
        model, teacher = build(recipe), teacher_of(recipe)
    rows = full_rows(data.train, recipe.length)
    end = None if data.tokenizer is None else data.tokenizer.eos_token_id
    model.config.eos_token_id = model.generation_config.eos_token_id = ends(model.generation_config.eos_token_id, end)
    model.generation_config._original_object_hash = hash(model.generation_config)  # as `import_checkpoint` does
    text = data.manifest["held_out"]
    collate = Collator(end or 0, recipe.separate_documents)
    return Loop(
        model,
        shared_model(model, recipe, processes),
        Batches(rows, partial(order, rows, recipe.seed), collate, recipe, processes),
        evenly_spaced(data.held_out, recipe.evaluate_rows),
        Measures(recipe.batch_tokens, text["bytes"] / text["tokens"], seconds_per_token(recipe, processes.count)),
        folder,
        teacher and teacher.to(processes.device),
    )


def ends(known: int | list[int] | None, end: int | None) -> int | list[int] | None:
    """The end tokens of a model: those of its initial weights' checkpoint, as of a turn, and that of the documents."""
    found = [*dict.fromkeys(x for x in [*(known if isinstance(known, list) else [known]), end] if x is not None)]
    return found if len(found) > 1 else next(iter(found), None)


def shared_model(model: Any, recipe: Recipe, processes: Processes) -> torch.nn.Module:
    """The model on its device, with what lets the processes share its gradients, or its weights too."""
    if recipe.recompute:
        recompute_blocks(model)
    wanted = False if recipe.compile is None and max(recipe.shard, recipe.context_parallel) > 1 else recipe.compile
    compile_for_training(model, wanted, cuda=torch.cuda.is_available(), packed=recipe.separate_documents)
    if recipe.shard > 1:
        shard(model, processes.mesh(recipe.shard))
        return model
    return processes.shared(model.to(processes.device), unused=not recipe.recompute)


def seconds_per_token(recipe: Recipe, devices: int) -> float | None:
    """The seconds of training per token at the peak of the devices' data sheets; None if it is not known. To count the
    operations takes seconds."""
    flops = peak(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return None if flops is None else flops_per_token(meta_model(recipe), recipe) / (flops * devices)


def finish(loop: Loop, about: About, data: PackedData) -> None:
    """Evaluates the trained model on all held-out rows, and writes the model, tokenizer, history and card."""
    folder = loop.folder / "model"
    (folder / "README.md").unlink(missing_ok=True)  # of a model that was damaged: it is the last file of the new one
    loop.save_model(folder)
    loss = loop.evaluate(data.held_out, "final")
    with errors_in_all():
        if loop.processes.rank > 0:
            return
        if data.tokenizer is not None:
            data.tokenizer.save_pretrained(folder)
        history, unigram = loop.history.points, unigram_loss(data.held_out)
        write_json(folder / "history.json", history)
        recipe = replace(loop.recipe, compile=is_compiled(loop.model))
        write_card(folder, recipe, about, data.manifest, restored(history), unigram)
        result = f"{loss:.4f} nats per held-out token" if math.isfinite(loss) else "its held-out loss is not finite"
        print(f"{folder} is the trained model: {result}. {baseline_sentence(loss, unigram)}")
        if not can_draw():
            curves = shlex.join(["headrace", "curves", str(loop.folder)])
            print(f"curves.png needs {named('studies')}; then {curves}")
        print(next_command(loop.folder, data))
