"""Exported models in ONNX Runtime beside the same models in PyTorch with headrace's kernels, in turn, in one process.

    python benchmarks/export.py --mixer softmax-gla --mixer gated-deltanet

Time is the process's CPU time on one thread. Weights are random; both compute the logits of every token.
"""

import tempfile
from pathlib import Path
from typing import Annotated

import onnxruntime
import torch
import typer

from headrace import HeadraceConfig
from headrace.export.graph import states, trace
from headrace.export.onnx import MODEL, Runtime, quantize
from headrace.hf import HeadraceForCausalLM
from program import Log, Output, show
from record import RESULTS, Row
from turns import CPU, Runner, take_turns

SIZES = {"vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 5, "num_heads": 4}  # the recipe laptop-5m
PROMPT, STEPS = 512, 64


def ours(model: HeadraceForCausalLM, task: str) -> Runner:
    """As `generate` runs a model: one call for a prompt, then the blocks with their states changed in place."""
    prompt = torch.randint(SIZES["vocab_size"], (1, PROMPT))

    def decode(_):
        states = None
        for token in prompt[:, :STEPS].split(1, 1):
            x, states = model.model.backbone(model.model.embed_tokens(token), states, in_place=True)
            model.lm_head(x)

    return Runner("headrace", decode if task == "decode" else lambda _: model(prompt, use_cache=True).logits, {})


def theirs(name: str, path: Path, model: HeadraceForCausalLM, task: str) -> Runner:
    prompt, run = torch.randint(SIZES["vocab_size"], (1, PROMPT)), Runtime(path, states(model), threads=1)

    def call(_):
        for piece in [prompt] if task == "prefill" else prompt[:, :STEPS].split(1, 1):
            run(piece)

    return Runner(name, call, {})


def main(
    mixer: Annotated[list[str], typer.Option(help="Mixers.")] = ["gla", "softmax-gla", "softmax-gated-deltanet"],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 9,
    output: Output = RESULTS / "export.csv",
) -> None:
    """Time prompts of 512 tokens, and 64 tokens one by one, at five million parameters."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    log = Log(output)
    for name in mixer:
        model = HeadraceForCausalLM(HeadraceConfig(mixer=name, **SIZES)).eval()
        with tempfile.TemporaryDirectory() as folder:
            log.add(measured(name, model, Path(folder), rounds))
    lines = [
        [f"{x['mixer']}, {x['task']}: {x['runner']}", f"{x['over_ours']:.2f}", f"{x['tokens_per_second']:.0f}",
         f"{x['megabytes']:.1f}"]
        for x in log.rows
    ]  # fmt: skip
    show(f"ONNX Runtime {onnxruntime.__version__}", ["", "time over ours", "tokens/s", "MB"], lines)
    log.end()


def measured(name: str, model: HeadraceForCausalLM, folder: Path, rounds: int) -> list[Row]:
    """over_ours: the time over that of PyTorch, the median over rounds."""
    paths = {"ONNX Runtime": folder / MODEL, "ONNX Runtime, int8": folder / "int8.onnx"}
    program = trace(model)
    for path in paths.values():
        program.save(path)
    quantize(paths["ONNX Runtime, int8"])
    size = {runner: path.stat().st_size / 1e6 for runner, path in paths.items()}
    size["headrace"] = sum(p.nbytes for p in model.parameters()) / 1e6
    rows = []
    for task, tokens in (("prefill", PROMPT), ("decode", STEPS)):
        runners = [ours(model, task), *(theirs(runner, path, model, task) for runner, path in paths.items())]
        take_turns(runners, backward=False, rounds=rounds)
        rows += [
            {
                "onnxruntime": onnxruntime.__version__, "mixer": name, "task": task, "runner": runner.name,
                "rounds": rounds, "tokens_per_second": 1e3 * tokens / runner.milliseconds(CPU),
                "over_ours": runner.over(runners[0], CPU), "megabytes": size[runner.name],
            }
            for runner in runners
        ]  # fmt: skip
    return rows


if __name__ == "__main__":
    typer.run(main)
