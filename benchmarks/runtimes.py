"""ONNX Runtime, which is found as a package: graphs that read and write tensors of torch, and the recurrence as a node.

Dimensions: B batch, T tokens, H heads, K key, V value dimension per head.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

OPSET, IR_VERSION = 22, 11  # of the graph around the node
INPUTS = "q", "k", "v", "state", "log_decay", "beta"  # of the node, in its order
NUMPY = {torch.float32: np.float32, torch.int64: np.int64}


def require() -> None:
    """Raises ImportError where ONNX Runtime, or what writes its graphs, is not installed."""
    for package in ("onnx", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"{package} is not installed")


class Session:
    """A graph in ONNX Runtime, on as many threads as torch had when this was made, which reads and writes tensors where
    they lie."""

    def __init__(self, graph: bytes | Path):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.force_spinning_stop", "1")  # or it takes the time of the next in turn
        self.session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

    def bind(self, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> Callable[[], None]:
        """Returns the call that computes the outputs of the inputs, which must live as long as it."""
        binding = self.session.io_binding()
        for put, tensors in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, x in tensors.items():
                put(name, "cpu", 0, NUMPY[x.dtype], tuple(x.shape), x.data_ptr())
        return lambda: self.session.run_with_iobinding(binding)


class Node:
    """LinearAttention of ONNX Runtime, applied once to each of a list of arguments: one graph, one call. Arguments are
    [B, T, H, ·]. What `run` returns is written over by the next call."""

    def __init__(self, rule: str, several: list[dict[str, Tensor]]):
        self.inputs, self.outputs, nodes = dict[str, Tensor](), dict[str, Tensor](), []
        self.shapes = [tensors["v"].shape for tensors in several]
        for i, tensors in enumerate(several):
            (B, T, H, V), K = tensors["v"].shape, tensors["k"].shape[-1]
            tensors = {"state": torch.zeros(B, H, K, V)} | tensors
            given = {n: f"{n}{i}" if n in tensors else "" for n in INPUTS if n in tensors or "beta" in tensors}
            self.inputs |= {
                f"{n}{i}": (x if n == "state" else x.flatten(2)).detach().contiguous() for n, x in tensors.items()
            }
            self.outputs |= {f"out{i}": torch.empty(B, T, H * V), f"after{i}": torch.empty(B, H, K, V)}
            nodes.append(([*given.values()], [f"out{i}", f"after{i}"], H, K))
        self.compute = Session(self._graph(rule, nodes)).bind(self.inputs, self.outputs)

    def _graph(self, rule: str, nodes: list[tuple[list[str], list[str], int, int]]) -> bytes:
        from onnx import TensorProto, helper

        made = [
            helper.make_node(
                "LinearAttention", read, written, domain="com.microsoft", update_rule=rule, q_num_heads=H,
                kv_num_heads=H, scale=K**-0.5,
            )
            for read, written, H, K in nodes
        ]  # fmt: skip
        inputs, outputs = (
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name, x in tensors.items()]
            for tensors in (self.inputs, self.outputs)
        )
        domains = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        graph = helper.make_graph(made, "peer", inputs, outputs)
        return helper.make_model(graph, opset_imports=domains, ir_version=IR_VERSION).SerializeToString()

    def run(self) -> list[tuple[Tensor, Tensor]]:
        """[(out [B, T, H, V], final state [B, H, K, V]), ...]"""
        self.compute()
        return [(self.outputs[f"out{i}"].view(shape), self.outputs[f"after{i}"]) for i, shape in enumerate(self.shapes)]
