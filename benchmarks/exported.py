"""Whole models that headrace exported, in ONNX Runtime and in llama.cpp, called as `headrace bench` calls models.

Both are found as packages. llama.cpp is `llama-cpp-python`, which need not be in headrace's environment: PYTHONPATH
says where it is, and LLAMA_CPP_LIB_PATH where another build of its libraries is.

Dimensions: B batch, T tokens.
"""

import copy
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
from transformers import LlamaForCausalLM

from headrace import quantize
from headrace.benchmarking.models import Shape, build
from headrace.convert import export_checkpoint, import_gguf
from headrace.data.tokenizer import byte_level
from headrace.export import gguf, onnx
from headrace.export.onnx import states, trace
from headrace.hf.cache import NAME as CACHE
from runtimes import Session

PACKAGES = {"ONNX Runtime": "onnxruntime", "llama.cpp": "llama_cpp"}
ROOM = 4096  # tokens that llama.cpp can count in a sequence
F32, Q8_0 = 0, 7  # of enum llama_ftype


def missing(runtime: str) -> str | None:
    """Why no model can run there, or None."""
    return None if find_spec(PACKAGES[runtime]) else f"{PACKAGES[runtime]} is not installed"


@cache
def folder(mixer: str, shape: Shape) -> TemporaryDirectory:
    """For the files of one model, until the program ends."""
    return TemporaryDirectory()


class Exported(nn.Module):
    """A model in another runtime. It is its own cache, as only the runtime sees the states. `start(batch)` makes the
    states before the first token, `run(ids [B, T])` returns the logits [B, 1 or T, vocabulary]."""

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

    suffix = "onnx"

    def __init__(self, model: Any, path: Path):
        super().__init__(model)
        self.states, self.session = states(model), Session(path)

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

    @staticmethod
    def write(model: Any, into: Path) -> None:
        """float32.onnx and int8.onnx, of one trace."""
        program = trace(model)
        for weights in ("float32", "int8"):
            program.save(into / f"{weights}.onnx")
        onnx.quantize(into / "int8.onnx")

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


@cache
def llama_cpp() -> Any:
    """The package, without its messages."""
    package = import_module("llama_cpp")
    silent = package.llama_log_callback(lambda *_: None)
    package.llama_log_set(silent, None)
    package.silent = silent  # called later on
    return package


class InLlamaCpp(Exported):
    """Every sequence of a batch is a sequence of one context."""

    suffix = "gguf"

    def __init__(self, model: Any, path: Path):
        super().__init__(model)
        self.llama, self.context = llama_cpp(), None
        self.model = self.llama.llama_model_load_from_file(str(path).encode(), self.llama.llama_model_default_params())

    @staticmethod
    def write(model: Any, into: Path) -> None:
        """float32.gguf, and int8.gguf with matrices in Q8_0."""
        with TemporaryDirectory() as checkpoint:
            for part in (model, byte_level()):
                part.save_pretrained(checkpoint)
            gguf.export(Path(checkpoint), into)
        (into / gguf.NAME).rename(into / "float32.gguf")
        requantize(into / "float32.gguf", into / "int8.gguf", Q8_0)

    def start(self, batch: int) -> None:
        if self.context is not None:
            self.llama.llama_free(self.context)
        settings = self.llama.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max, settings.n_batch = ROOM * batch, batch, ROOM
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        self.context, self.position = self.llama.llama_init_from_model(self.model, settings), 0

    def run(self, ids: Tensor) -> Tensor:
        """The logits of the last token alone. Prompts are computed one by one: llama.cpp keeps wrong token shifts of
        several that it computes at once."""
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


def requantize(file: Path, into: Path, kind: int) -> None:
    """Writes a GGUF file with matrices of another type: F32 or Q8_0."""
    llama = llama_cpp()
    settings = llama.llama_model_quantize_default_params()
    settings.ftype, settings.nthread, settings.allow_requantize = kind, torch.get_num_threads(), True
    if llama.llama_model_quantize(str(file).encode(), str(into).encode(), ctypes.byref(settings)):
        raise RuntimeError(f"llama.cpp could not write {into.name}")


RUNTIMES = {"ONNX Runtime": InOnnxRuntime, "llama.cpp": InLlamaCpp}


def exported(runtime: str, mixer: str, weights: str, shape: Shape) -> nn.Module:
    """A model in a runtime; on the meta device the model itself, for its sizes."""
    model = build(mixer, shape).eval()
    if next(model.parameters()).is_meta:
        return model
    kind = RUNTIMES[runtime]
    path = Path(folder(mixer, shape).name, f"{weights}.{kind.suffix}")
    if not path.exists():
        kind.write(model, path.parent)
    return kind(model, path)


def released(file: Path, into: Path) -> dict[str, nn.Module]:
    """The model of a GGUF file of llama.cpp in transformers, here, and in llama.cpp, whose Q8_0 is int8."""
    model, _ = import_gguf(file)
    export_checkpoint(model, "llama", into)
    models = {"transformers": LlamaForCausalLM.from_pretrained(into), "headrace": model}
    models |= {"headrace, weights in bfloat16": copy.deepcopy(model).bfloat16()}
    for kind, said in {"int8": "int8", "bfloat16": "bfloat16, numbers in float32"}.items():
        models[f"headrace, weights in {said}"] = quantize(copy.deepcopy(model), kind)
    if reason := missing("llama.cpp"):
        raise ModuleNotFoundError(reason)
    for said, kind in {"": F32, ", weights in int8": Q8_0}.items():
        requantize(file, into / f"{kind}.gguf", kind)
        models[f"llama.cpp{said}"] = InLlamaCpp(model, into / f"{kind}.gguf")
    return models | {"llama.cpp, weights in the types of the file": InLlamaCpp(model, file)}
