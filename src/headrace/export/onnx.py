"""`headrace export --to onnx`: a language model as one ONNX graph, tokens and the states before them -> logits and the
states after them. The file is compared with PyTorch in ONNX Runtime.

Dimensions: B batch, T tokens.
"""

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..convert.checkpoint import load
from ..extra.capped import CappedAttention
from ..extra.growing import GrowingAttention
from ..extra.late_norm import LateNormAttention
from ..extra.latent import LatentAttention
from ..extra.moe import MixtureOfExperts
from ..files.provenance import running
from ..hf.model import HeadraceForCausalLM
from ..layers.attention.attention import SoftmaxAttention
from ..layers.base import ANY, INTEGERS, Mixer
from ..layers.linear.mixer import LinearMixer
from ..ops.dispatch import set_backend
from ..utils.errors import InputError, require
from ..utils.integrity import write_json

OPSET = 23  # the first with RMSNormalization
SOFTMAX = SoftmaxAttention, CappedAttention, GrowingAttention, LateNormAttention, LatentAttention
FIELDS: dict[type, tuple[str, ...]] = {  # of a layer's state
    LinearMixer: ("memory", "conv", "shift", "tokens"),
    **dict.fromkeys(SOFTMAX, ("k", "v")),
}  # fmt: skip
TRACED = {"batch": 2, "tokens": 6, "past": 3}  # sizes while the graph is traced; 0 and 1 would become constants
PARTS = {"shared": "a block that several layers share", "positions": "absolute positions"}
# Largest error of a logit in float32, as a share of the largest logit. A multiple of PyTorch's own error passes too,
# because deep models amplify rounding: over models and processors, ONNX Runtime's error was 0.6 to 12 times PyTorch's.
TOLERANCE, MAX_ERROR_RATIO = 1e-5, 30
MODEL, ABOUT = "model.onnx", "headrace.json"
PIECES = 7, 5, *[1] * 8  # tokens per call of the comparison
STANDARD = 27  # the first opset of ONNX with LinearAttention
WEIGHTS = ("float32", "int8")


class State(NamedTuple):
    """One tensor of the states. A dimension is a size, or the name of one that varies."""

    name: str  # "<layer>.<field>": the graph's input is past.<name>, its output present.<name>
    shape: tuple[int | str, ...]
    dtype: torch.dtype

    def zeros(self, **sizes: int) -> Tensor:
        """Returns zeros, which with past=0 are the state before the first token. sizes: batch and past."""
        return torch.zeros([sizes[n] if isinstance(n, str) else n for n in self.shape], dtype=self.dtype)


def states(model: HeadraceForCausalLM) -> list[State]:
    """Returns the states of a model, in the order of the graph's inputs and outputs."""
    tensors = []
    for i, layer in enumerate(model.model.backbone.layers):
        for field in _fields(layer.mixer):
            sizes: Any = layer.mixer.state_shapes[field]  # type: ignore[index, union-attr]
            shape = ("batch", *("past" if n == ANY else n for n in sizes))
            tensors.append(State(f"{i}.{field}", shape, torch.int64 if field in INTEGERS else torch.float32))
    return tensors


def _fields(mixer: Any) -> list[str]:
    return [name for name in FIELDS[type(mixer)] if name in mixer.state_shapes]


def check_exportable(model: HeadraceForCausalLM) -> None:
    """Raises InputError for a model that ONNX's nodes cannot express, with the first part that they cannot."""
    for i, layer in enumerate(model.model.backbone.layers):
        if (reason := _reason(layer)) is not None:
            raise InputError(f"--to onnx cannot write layer {i} of the model: {reason}")
    for name, what in PARTS.items():
        if getattr(model.model.backbone, name) is not None:
            raise InputError(f"--to onnx cannot write a model with {what}; expected linear mixers or softmax attention")


def _reason(layer: Any) -> str | None:
    """Returns why a layer cannot be exported, or None."""
    mixer, mlp = layer.mixer, layer.mlp
    if isinstance(mlp, MixtureOfExperts):
        return "it has a mixture of experts, which chooses the weights of each token"
    if layer.parallel is not None or isinstance(mlp, Mixer):
        return "it has several states; expected one mixer and an MLP without a state"
    if type(mixer) not in FIELDS:
        return f"its mixer is {type(mixer).__name__}, without nodes in ONNX; expected a linear mixer or attention"
    if isinstance(mixer, LinearMixer):
        if mixer.general is not None:
            return f"its delta rule (write.erase={mixer.spec.write.erase}) has no node in ONNX"
        if mixer.spec.write.beta in ("exp", "trapezoid") or mixer.spec.inputs.turns:
            return f"write.beta={mixer.spec.write.beta!r} and inputs.turns={mixer.spec.inputs.turns} are not written"
        chunks = "its write strength β (write.residual_chunk) is computed in a loop over chunks"
        return None if mixer.residual is None else chunks
    if mixer.spec.rotary and mixer.spec.rope.by_length:
        return f"its rotary frequencies (rope.kind={mixer.spec.rope.kind!r}) depend on the length of the sequence"
    if mixer.spec.forget:
        return "its softmax attention forgets (forget=True), by sums in float64"
    dense = mixer.spec.pattern is None and mixer.spec.form != "tiles"
    return None if dense else "its softmax attention is sparse or tiled; expected dense attention"


class Pass(nn.Module):
    """What the graph computes: (input_ids [B, T], states before) -> (logits [B, T, vocabulary], states after)."""

    def __init__(self, model: HeadraceForCausalLM):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, past: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        mixers: Any = [layer.mixer for layer in self.model.model.backbone.layers]
        remaining = iter(past)
        before = [mixer.state_kind(**{name: next(remaining) for name in _fields(mixer)}) for mixer in mixers]
        x, after = self.model.model.backbone(self.model.model.embed_tokens(input_ids), before)
        present = [getattr(state, name) for mixer, state in zip(mixers, after, strict=True) for name in _fields(mixer)]
        return self.model.logits(x), present


def trace(model: HeadraceForCausalLM) -> Any:
    """Returns the `torch.onnx.ONNXProgram` of a model, for any batch size and number of tokens from 1."""
    state_tensors = states(model)
    ids = torch.ones(TRACED["batch"], TRACED["tokens"], dtype=torch.long)
    varying = [{i: n for i, n in enumerate(state.shape) if isinstance(n, str)} for state in state_tensors]
    with silent(), torch.no_grad():
        program: Any = torch.onnx.export(
            Pass(model), (ids, [state.zeros(**TRACED) for state in state_tensors]), dynamo=True, verbose=False,
            opset_version=OPSET, dynamic_shapes=({0: "batch", 1: "tokens"}, varying),
            input_names=["input_ids", *(f"past.{state.name}" for state in state_tensors)],
            output_names=["logits", *(f"present.{state.name}" for state in state_tensors)],
            custom_translation_table={torch.ops.aten.log_sigmoid.default: _log_sigmoid},
        )  # fmt: skip
    for state, output in zip(state_tensors, program.model.graph.outputs[1:], strict=True):
        if "past" not in state.shape:  # traced as a function of `tokens`, from which the end of a longer tensor is cut
            output.shape = type(output.shape)(state.shape)
    for node in program.model.graph:  # stack traces, with paths of this machine
        node.metadata_props.clear()
    return program


@contextmanager
def silent() -> Iterator[None]:
    """Suppresses what other packages say about their own code, and about packages that are not needed."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _log_sigmoid(x: Any) -> Any:
    """−log(1 + e^−x). The exporter's log(σ(x)) loses the digits of results near 0, as those of slow decays are."""
    from onnxscript import opset18 as op

    return op.Neg(op.Softplus(op.Neg(x)))


def export(checkpoint: Path, folder: Path, weights: str = "float32", opset: int = OPSET) -> str:
    """Writes model.onnx, and headrace.json with the names and shapes of the states.

    Args:
        weights: "float32", or "int8" for the matrices of linear layers.
        opset: 23, with ONNX Runtime's own node for the recurrence, or 27, with ONNX's.

    Raises:
        InputError: for an option that is not one of these, for a model in float64 or one that ONNX cannot express, and
            if ONNX Runtime computes other logits than PyTorch.
    """
    require(weights in WEIGHTS, f"--weights {weights}; expected {' or '.join(WEIGHTS)}")
    if opset not in (OPSET, STANDARD):
        raise InputError(f"--opset {opset}; expected {OPSET}, or {STANDARD} for ONNX's own LinearAttention")
    model = load(checkpoint)
    require(model.dtype != torch.float64, "the weights are float64, which --to onnx would round to float32")
    set_backend(model.float(), "auto")  # that of ONNX in the export, PyTorch's in float64
    check_exportable(model)
    path = folder / MODEL
    trace(model).save(path)
    error, torch_error = errors(path, model)
    require(torch_error < float("inf"), f"checkpoint {str(checkpoint)!r} gives NaN or infinite logits; expected finite")
    wrong = f"the logits of {MODEL} are wrong by {error:.1e} of the largest, those of PyTorch by {torch_error:.1e}"
    require(error <= max(TOLERANCE, MAX_ERROR_RATIO * torch_error), wrong)
    sentence = f"its logits differ from float64's by {error:.1e} of the largest, PyTorch's by {torch_error:.1e}"
    if weights == "int8":
        quantize(path)
        sentence += f", with int8 weights by {errors(path, model)[0]:.1e}"
    if opset == STANDARD:
        standardize(path)
    sizes = {file.name: file.stat().st_size for file in folder.glob(f"{MODEL}*")}
    made = {"data": sorted({*sizes} - {MODEL}), "opset": opset, "weights": weights, "made_by": running(**versions())}
    write_json(folder / ABOUT, about(model) | made)
    return f"{MODEL} of {sum(sizes.values()) / 1e6:.1f} MB; {sentence}"


def versions() -> dict[str, str]:
    import onnx
    import onnxruntime

    return {"onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__}


def about(model: HeadraceForCausalLM) -> dict[str, Any]:
    """Returns what a program needs in order to run the graph."""
    ends: int | list[int] | None = model.generation_config.eos_token_id
    return {
        "vocab_size": model.config.vocab_size,
        "eos_token_ids": [] if ends is None else [ends] if isinstance(ends, int) else ends,
        "states": [
            {
                "past": f"past.{state.name}", "present": f"present.{state.name}", "shape": state.shape,
                "dtype": str(state.dtype).removeprefix("torch."),
            }
            for state in states(model)
        ],
    }  # fmt: skip


class Runtime:
    """An exported model in ONNX Runtime on the CPU. Each call computes the next tokens of the same sequences.

    Args:
        path: model.onnx.
        state_tensors: the model's states.
        batch: number of sequences.
    """

    def __init__(self, path: Path, state_tensors: list[State], batch: int = 1):
        import onnxruntime

        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.names = [state.name for state in state_tensors]
        self.states = [state.zeros(batch=batch, past=0).numpy() for state in state_tensors]

    def __call__(self, input_ids: Tensor) -> Tensor:
        """input_ids [B, T] -> logits [B, T, vocabulary]."""
        past = {f"past.{name}": state for name, state in zip(self.names, self.states, strict=True)}
        logits, *self.states = self.session.run(None, {"input_ids": input_ids.numpy(), **past})
        return torch.from_numpy(logits)


@torch.no_grad()
def errors(path: Path, model: HeadraceForCausalLM) -> tuple[float, float]:
    """Returns the largest errors of the logits of the file and of the model, as a share of the largest logit, for two
    sequences of random tokens, which the file computes in pieces. The truth is the model in float64."""
    ids = torch.randint(model.config.vocab_size, (2, sum(PIECES)), generator=torch.Generator().manual_seed(0))
    run = Runtime(path, states(model), batch=2)
    logits = torch.cat([run(piece) for piece in ids.split(PIECES, 1)], 1)
    own, truth = model(ids).logits, copy.deepcopy(model).double()(ids).logits
    largest = float(truth.abs().max()) or 1.0
    return float((logits - truth).abs().max()) / largest, float((own - truth).abs().max()) / largest


def quantize(path: Path) -> None:
    """Replaces the constant matrices of products by int8, with one scale per 32 numbers. The products are computed in
    int8 too, with one scale per 32 numbers of the input."""
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    model, data = onnx.load(path), path.with_name(f"{path.name}.data")
    with silent():
        quantizer = MatMulNBitsQuantizer(model, bits=8, block_size=32, is_symmetric=True, accuracy_level=4)
        quantizer.process()
    external = data.exists()
    data.unlink(missing_ok=True)
    quantizer.model.save_model_to_file(str(path), use_external_data_format=external)


def standardize(path: Path) -> None:
    """Replaces ONNX Runtime's node of the recurrence by ONNX's, which has the same inputs and attributes."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "LinearAttention":
            node.domain = ""
    for imported in model.opset_import:
        if not imported.domain:
            imported.version = STANDARD
    onnx.save(model, path)
