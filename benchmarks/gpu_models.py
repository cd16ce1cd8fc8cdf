"""Whole models on a GPU: training steps and `generate`, headrace's beside those of flash-linear-attention (FLA).

    python benchmarks/gpu_models.py train|decode NAME ...        started by gpu.py; rows are lines of JSON

NAME: headrace:MIXER or fla:MIXER, then the options :compiled (`compile_blocks`) and :profile (device time by class).
A model that fails is a row with the error. After an error of the device the process ends with code 3.

Processes that run side by side compile together and measure one after the other, once all of them have compiled.
"""

import fcntl
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
SIZES = SMALL if os.environ.get("SMALL") else {"hidden_size": 1024, "num_hidden_layers": 24, "vocab_size": 32_000}
B, T = (2, 128) if os.environ.get("SMALL") else (4, 4096)
NEW, STEPS, BATCHES = ((8, 16), 2, (1, 2)) if os.environ.get("SMALL") else ((128, 512), 8, (1, 64))
CASES = (False, NEW[0]), (False, NEW[1]), (True, NEW[0])  # of generation: whether it samples, and tokens
HEADS = {"kda": 8, "mamba2": 32}  # at a hidden size of 1,024, as published; other mixers have 4
# Classes of kernels by their names; the first that fits counts.
CLASSES = {
    "optimizer": r"multi_tensor|fused_adam",
    "copies": r"copy|memcpy|memset|catarray|fill|transpose_kernel",
    "convolution": r"conv|dgrad|wgrad",
    "attention": r"flash|fmha|attention",
    "products": r"gemm|cutlass|cublas|nvjet|xmma|gemv|splitk",
    "elementwise, fused": r"triton_(poi|red|per|tem|for)",
    "elementwise": r"elementwise|reduce|norm|softmax|embedding|index|sort|scan_dim|nll|entropy|swiglu|dropout"
    r"|silu_product|rotate|softplus_decay|head_gate",
}


def say(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def headrace_model(mixer: str, layers: int) -> Any:
    from headrace import HeadraceConfig
    from headrace.hf import HeadraceForCausalLM

    heads = HEADS.get(mixer, 4) * SIZES["hidden_size"] // 1024 or 2
    sizes = SIZES | {"num_hidden_layers": layers, "num_heads": heads}
    return HeadraceForCausalLM(HeadraceConfig(mixer=mixer, tie_word_embeddings=True, **sizes))


def fla_model(mixer: str, layers: int) -> Any:
    few_configurations(int(os.environ.get("FEW", "3")))
    import fla.models as models

    D, common = SIZES["hidden_size"], SIZES | {"num_hidden_layers": layers, "tie_word_embeddings": True}
    name, options = {
        "gla": ("GLA", {"num_heads": 4}),
        "retnet": ("RetNet", {"num_heads": 4}),
        "gated-deltanet": ("GatedDeltaNet", {"num_heads": 4, "head_dim": 192 * D // 1024, "expand_v": 2}),
        "kda": ("KDA", {"num_heads": max(D // 128, 1), "head_dim": min(D, 128)}),
        "mamba2": ("Mamba2", {"head_dim": 64, "num_heads": 2 * D // 64}),
    }[mixer]
    return getattr(models, f"{name}ForCausalLM")(getattr(models, f"{name}Config")(**options, **common))


def few_configurations(few: int) -> None:
    """Lets Triton's autotuner try a few configurations of a kernel, spread over all: tuning takes minutes otherwise."""
    from triton.runtime.autotuner import Autotuner

    if few < 2 or hasattr(Autotuner, "all_configs"):
        return
    Autotuner.all_configs = Autotuner.prune_configs

    def prune(self: Any, kwargs: Any) -> list[Any]:
        found = self.all_configs(kwargs)
        n = len(found)
        return found if n <= few else [found[i * (n - 1) // (few - 1)] for i in range(few)]

    Autotuner.prune_configs = prune


def build(name: str, layers: int = SIZES["num_hidden_layers"]) -> Any:
    library, mixer, *options = name.split(":")
    with torch.device(DEVICE):
        model = (fla_model if library == "fla" else headrace_model)(mixer, layers).to(DEVICE, torch.bfloat16)
    if "compiled" in options:
        from headrace import compile_blocks

        compile_blocks(model)
    return model.train()


def training_step(model: Any) -> Callable[[], Any]:
    ids = torch.randint(SIZES["vocab_size"], (B, T), device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    asks = {"skip_logits": True} if model.config.model_type == "headrace" else {}  # FLA's models skip them unasked

    def step() -> Any:
        loss = model(input_ids=ids, labels=ids, use_cache=False, **asks).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@contextmanager
def turn(alone: bool) -> Iterator[None]:
    """Holds the GPU: alone, or beside other processes that compile. A process that compiles for too long fails."""
    path = os.environ.get("TURNS", os.path.join(tempfile.gettempdir(), f"headrace-turns-{os.getpid()}"))
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            signal.signal(signal.SIGALRM, late)
            signal.alarm(int(os.environ.get("COMPILING_S", "600")))
        yield
        signal.alarm(0)
        wait()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()  # room for the other processes


def late(*_: Any) -> None:
    raise TimeoutError("not compiled in the time that the run has for it")


def train(name: str) -> Iterator[dict[str, Any]]:
    started = time.perf_counter()
    with turn(alone=False):
        model = build(name)
        step = training_step(model)
        for _ in range(2):
            loss = step()
    ready, times = time.perf_counter() - started, []
    with turn(alone=True):
        for _ in range(2):
            step()
        wait()
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(STEPS):
            began = time.perf_counter()
            step()
            wait()
            times.append(time.perf_counter() - began)
        seconds = statistics.median(times)
        yield {
            "tokens_per_second": B * T / seconds, "ms": 1e3 * seconds, "best_ms": 1e3 * min(times),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else None,
            "parameters": sum(p.numel() for p in model.parameters()), "loss": float(loss.detach()), "ready_s": ready,
        }  # fmt: skip
        if "profile" in name.split(":") and DEVICE == "cuda":
            yield profiled(step)


def profiled(step: Callable[[], Any]) -> dict[str, Any]:
    """Device time of a step in ms and launches, by class and of the longest kernels."""
    from torch.profiler import DeviceType, ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        wait()
    events = [e for e in found.key_averages() if e.device_type == DeviceType.CUDA and e.self_device_time_total > 0]
    by_class: dict[str, list[float]] = {}
    for event in events:
        kind = kind_of(event.key)
        ms, n = by_class.get(kind, [0.0, 0])
        by_class[kind] = [ms + event.self_device_time_total / 1e3, n + event.count]
    longest = sorted(events, key=lambda e: -e.self_device_time_total)[:40]
    return {
        "device_ms": sum(ms for ms, _ in by_class.values()), "launches": sum(n for _, n in by_class.values()),
        "classes": {kind: [round(ms, 2), int(n)] for kind, (ms, n) in sorted(by_class.items(), key=lambda x: -x[1][0])},
        "longest": [[e.key[:90], round(e.self_device_time_total / 1e3, 2), e.count] for e in longest],
    }  # fmt: skip


def kind_of(kernel: str) -> str:
    """The class of a kernel; what has no PyTorch name is a kernel of the recurrence."""
    return next((kind for kind, names in CLASSES.items() if re.search(names, kernel, re.IGNORECASE)), "recurrence")


def decode(name: str) -> Iterator[dict[str, Any]]:
    """Tokens per second of whole calls of `generate`, greedy and sampled, after a prompt of 16 tokens: of the faster of
    two calls, after one that captures; and their peak memory."""
    ours = name.startswith("headrace")
    cases = [(rows, *case) for rows in BATCHES for case in (CASES if ours else CASES[:1])]
    with turn(alone=False):
        model = build(name).eval()
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        for rows in BATCHES:
            generation(model, rows, False, 8)()
    with turn(alone=True):
        for rows, sampled, new in cases:
            call, times = generation(model, rows, sampled, new), []
            for i in range(3):
                wait()
                if DEVICE == "cuda" and i == 1:  # an earlier case may have needed more
                    torch.cuda.reset_peak_memory_stats()
                began = time.perf_counter()
                out = call()
                wait()
                times.append(time.perf_counter() - began)
            assert out.shape[1] == 16 + new
            yield {
                "batch": rows, "sampled": sampled, "new": new, "tokens_per_second": rows * new / min(times[1:]),
                "first_s": times[0], "engine": model.engine.about(model) if ours else "",
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else None,
            }  # fmt: skip


def generation(model: Any, rows: int, sampled: bool, new: int) -> Callable[[], torch.Tensor]:
    ids = torch.randint(3, SIZES["vocab_size"], (rows, 16), device=DEVICE)
    options = {"do_sample": sampled, "max_new_tokens": new, "pad_token_id": 0, "top_k": 50 if sampled else None}
    return partial(model.generate, ids, attention_mask=torch.ones_like(ids), **options)


def main(what: str, *names: str) -> int:
    measure = {"train": train, "decode": decode}[what]
    for name in names:
        say(stage=what, name=name, begun=True)
        try:
            for row in measure(name):
                say(stage=what, name=name, **row)
        except Exception as error:
            traceback.print_exc()
            say(stage=what, name=name, failed=f"{type(error).__name__}: {str(error)[:400]}")
            if isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError):
                return 3  # the process cannot use the device any more
        if DEVICE == "cuda":
            import gc

            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        torch.compiler.reset()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
