"""Whole models that headrace exported, in ONNX Runtime and in llama.cpp, called as `headrace bench` calls models.

Both are found as packages. llama.cpp is `llama-cpp-python`, which need not be in headrace's environment: PYTHONPATH
says where it is, and LLAMA_CPP_LIB_PATH where another build of its libraries is.

Dimensions: B batch, T tokens.
"""

import ctypes
import math
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from headrace.benchmarking.models import Shape, build
from headrace.data.tokenizer import byte_level
from headrace.export import gguf
from headrace.export.graph import states, trace
from headrace.export.onnx import quantize
from headrace.hf.cache import NAME as CACHE
from runtimes import Session

PACKAGES = {"ONNX Runtime": "onnxruntime", "llama.cpp": "llama_cpp"}
ROOM = 4096  # tokens that llama.cpp can count in a sequence
Q8_0 = 7  # of enum llama_ftype


def missing(runtime: str) -> str | None:
    """Why no model can run there, or None."""
    return None if find_spec(PACKAGES[runtime]) else f"{PACKAGES[runtime]} is not installed"


@cache
def folder(mixer: str, shape: Shape) -> TemporaryDirectory:
    """For the files of one model, until the program ends."""
    return TemporaryDirectory()


class Exported(nn.Module):
    """A model in another runtime; its own cache, which only the runtime sees. `start(batch)` makes the states before
    the first token, `run(ids [B, T])` returns the logits [B, 1 or T, vocabulary]."""

    layers = ()  # of the cache

    def __init__(self, model: Any):
        super().__init__()
        self.config = model.config
        self.device_of = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, input_ids: Tensor, use_cache: bool, logits_to_keep: int, **past: Any) -> Any:
        if not past:
            self.start(len(input_ids))
        return SimpleNamespace(**{CACHE: self, "logits": self.run(input_ids)})


class InOnnxRuntime(Exported):
    """The states before and after a call are two sets of tensors that change places: nothing is copied."""

    def __init__(self, model: Any, mixer: str, shape: Shape, weights: str):
        super().__init__(model)
        self.states, path = states(model), Path(folder(mixer, shape).name, f"{weights}.onnx")
        if not path.exists():
            write_onnx(model, path.parent)
        self.session = Session(path)

    def start(self, batch: int) -> None:
        self.sets = [{s.name: s.zeros(batch=batch, past=0) for s in self.states} for _ in range(2)]
        self.layers = [SimpleNamespace(**self.sets[0])]
        self.ids = torch.empty(batch, 1, dtype=torch.long)
        self.logits = torch.empty(batch, 1, self.config.vocab_size)
        self.steps = [self._bound(self.ids, self.logits, *sets) for sets in (self.sets, self.sets[::-1])]

    def _bound(self, ids: Tensor, logits: Tensor, before: dict, after: dict) -> Callable[[], None]:
        past = {f"past.{name}": x for name, x in before.items()}
        present = {f"present.{name}": x for name, x in after.items()}
        return self.session.bind({"input_ids": ids} | past, {"logits": logits} | present)

    def run(self, ids: Tensor) -> Tensor:
        logits = self.logits
        if ids.shape[1] == 1:
            self.ids.copy_(ids)
            self.steps[0]()
        else:
            ids, logits = ids.contiguous(), torch.empty(*ids.shape, self.config.vocab_size)
            self._bound(ids, logits, *self.sets)()
        self.steps.reverse()
        self.sets.reverse()
        return logits


def write_onnx(model: Any, into: Path) -> None:
    """float32.onnx and int8.onnx, of one trace."""
    program = trace(model)
    for weights in ("float32", "int8"):
        program.save(into / f"{weights}.onnx")
    quantize(into / "int8.onnx")


@cache
def llama_cpp() -> Any:
    """The package, which says nothing of its own."""
    package = import_module("llama_cpp")
    silent = package.llama_log_callback(lambda *_: None)
    package.llama_log_set(silent, None)
    package.silent = silent  # called later on
    return package


class InLlamaCpp(Exported):
    """Every sequence of a batch is a sequence of one context."""

    def __init__(self, model: Any, mixer: str, shape: Shape, weights: str):
        super().__init__(model)
        self.llama, self.context, path = llama_cpp(), None, Path(folder(mixer, shape).name, f"{weights}.gguf")
        if not path.exists():
            write_gguf(self.llama, model, path.parent)
        self.model = self.llama.llama_model_load_from_file(str(path).encode(), self.llama.llama_model_default_params())

    def start(self, batch: int) -> None:
        if self.context is not None:
            self.llama.llama_free(self.context)
        settings = self.llama.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max, settings.n_batch = ROOM * batch, batch, ROOM
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        self.context, self.position = self.llama.llama_init_from_model(self.model, settings), 0

    def run(self, ids: Tensor) -> Tensor:
        """The logits of the last token alone. Prompts are computed one by one: of several at once it keeps wrong token
        shifts."""
        sequences = range(len(ids))
        together = [sequences] if ids.shape[1] == 1 else [[i] for i in sequences]
        logits = [self._decode(ids[own], own) for own in map(list, together)]
        self.position += ids.shape[1]
        return torch.cat(logits)

    def _decode(self, ids: Tensor, sequences: list[int]) -> Tensor:
        B, T = ids.shape
        batch = self.llama.llama_batch_init(B * T, 0, 1)
        batch.n_tokens = B * T
        for i, token in enumerate(ids.flatten().tolist()):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, self.position + i % T, 1
            batch.seq_id[i][0], batch.logits[i] = sequences[i // T], i % T == T - 1
        if self.llama.llama_decode(self.context, batch):
            raise RuntimeError(f"llama.cpp could not compute {B} sequences of {T} tokens")
        self.llama.llama_batch_free(batch)
        shape = B, 1, self.config.vocab_size
        first = ctypes.addressof(self.llama.llama_get_logits(self.context).contents)
        numbers = (ctypes.c_float * math.prod(shape)).from_address(first)
        return torch.frombuffer(numbers, dtype=torch.float32).view(shape).clone()


def write_gguf(llama: Any, model: Any, into: Path) -> None:
    """float32.gguf, and int8.gguf with matrices in Q8_0."""
    with TemporaryDirectory() as checkpoint:
        for part in (model, byte_level()):
            part.save_pretrained(checkpoint)
        gguf.export(Path(checkpoint), into)
    (into / gguf.NAME).rename(into / "float32.gguf")
    settings = llama.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = Q8_0, torch.get_num_threads()
    paths = [str(into / f"{weights}.gguf").encode() for weights in ("float32", "int8")]
    if llama.llama_model_quantize(*paths, ctypes.byref(settings)):
        raise RuntimeError("llama.cpp could not write Q8_0")


RUNTIMES = {"ONNX Runtime": InOnnxRuntime, "llama.cpp": InLlamaCpp}


def exported(runtime: str, mixer: str, weights: str, shape: Shape) -> nn.Module:
    """A model in a runtime; on the meta device the model itself, for its sizes."""
    model = build(mixer, shape).eval()
    return model if next(model.parameters()).is_meta else RUNTIMES[runtime](model, mixer, shape, weights)
