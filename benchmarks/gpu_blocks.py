"""Whether `compile_blocks` compiles each mixer's blocks on this GPU to whole graphs, and whether they compute the same.

    python benchmarks/gpu_blocks.py [--seconds 150] [--processes 12] [--dry] [MIXER ...]

For each mixer, the most important first: a model of two blocks is trained for a step at three lengths and two packs, in
bfloat16 and under autocast. A line says how often blocks were compiled, how far loss and gradients are from those of
the same model uncompiled, and the seconds; or the whole error. --dry: on a CPU, by the compiler "aot_eager".
"""

import argparse
import copy
import os
import sys
import time
import traceback
import warnings
from concurrent.futures import ProcessPoolExecutor, TimeoutError, as_completed
from multiprocessing import get_context
from typing import Any

import torch

VOCABULARY = 256
FIRST = (
    "softmax-gla", "softmax-gated-deltanet", "gla", "gated-deltanet", "softmax-retnet", "retnet", "kda", "mamba2",
    "transformer", "deltanet", "linear-attention", "rwkv6", "rwkv7", "mamba3", "mamba", "softmax-kda",
)  # fmt: skip
WAYS = "bfloat16", "autocast"
ROWS, PACKS = ((2, 200), (3, 512), (4, 333)), ((3, 700), (6, 1100))  # (B, T); (N, T)


def batches(device: str) -> list[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(0)

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(VOCABULARY, shape, generator=drawn).to(device)

    def bounds(N: int, T: int) -> torch.Tensor:
        inner = torch.randperm(T - 1, generator=drawn)[: N - 1].sort().values + 1
        return torch.cat([torch.tensor([0]), inner, torch.tensor([T])]).to(device)

    return [{"input_ids": ids(*shape)} for shape in ROWS] + [
        {"input_ids": ids(1, T), "cu_seqlens": bounds(N, T)} for N, T in PACKS
    ]


def steps(model: torch.nn.Module, device: str, way: str) -> list[torch.Tensor]:
    """Returns the losses of all batches, and the sum of their gradients."""
    losses = []
    for batch in batches(device):
        with torch.autocast(device, torch.bfloat16, enabled=way == "autocast"):
            loss = model(**batch, labels=batch["input_ids"], skip_logits=True, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach().double())
    gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    return [torch.stack(losses), torch.cat(gradients)]


def probe(mixer: str, way: str, dry: bool) -> str:
    """Compiles the blocks of a mixer's model, and returns the line about it."""
    from torch._dynamo.testing import CompileCounterWithBackend

    from headrace import HeadraceConfig, compile_blocks
    from headrace.hf import HeadraceForCausalLM

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    started, device = time.perf_counter(), "cpu" if dry else "cuda"
    counter = CompileCounterWithBackend("aot_eager" if dry else "inductor")
    sizes: Any = {"hidden_size": 64 if dry else 256, "num_heads": 2}
    try:
        torch.manual_seed(0)
        config: Any = HeadraceConfig(mixer=mixer, vocab_size=VOCABULARY, num_hidden_layers=2, **sizes)
        model: Any = HeadraceForCausalLM(config)
        model = model.to(device, torch.bfloat16 if way == "bfloat16" else torch.float32).train()
        expected = steps(copy.deepcopy(model), device, way)
        found = steps(compile_blocks(model, backend=counter, fullgraph=True), device, way)
        error = max(float((x - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True))
        line = f"ok      compiled {counter.frame_count} times, at most {error:.1e} from uncompiled"
    except Exception as failed:
        line = f"FAILED  {type(failed).__name__} after {counter.frame_count} graphs: {failed}\n{traceback.format_exc()}"
    return f"{mixer:24} {way:9} {time.perf_counter() - started:5.0f} s  {line}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mixers", nargs="*", default=FIRST)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--processes", type=int, default=max(1, len(os.sched_getaffinity(0)) - 2))
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    jobs = [(mixer, way, given.dry) for way in WAYS for mixer in given.mixers]
    started, left = time.perf_counter(), len(jobs)
    pool = ProcessPoolExecutor(given.processes, get_context("spawn"))
    waiting = {pool.submit(probe, *job): job for job in jobs}
    try:
        for done in as_completed(waiting, given.seconds):
            print(done.exception() or done.result(), flush=True)
            left -= 1
    except TimeoutError:
        unfinished = ", ".join(f"{mixer} {way}" for done, (mixer, way, _) in waiting.items() if not done.done())
        print(f"not finished after {given.seconds:g} s: {unfinished}", flush=True)
    print(f"{len(jobs) - left} of {len(jobs)} in {time.perf_counter() - started:.0f} s", flush=True)
    for process in list((pool._processes or {}).values()):
        process.kill()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
