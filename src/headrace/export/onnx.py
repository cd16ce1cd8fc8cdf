"""`headrace export --to onnx`: writes a language model for ONNX Runtime, and compares the file with PyTorch there."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..convert.checkpoint import load
from ..hf.model import HeadraceForCausalLM
from ..ops.dispatch import set_backend
from ..utils.errors import InputError
from ..utils.integrity import write_json
from ..utils.provenance import running
from .graph import OPSET, State, check_exportable, silent, states, trace

# Largest error of a logit in float32, as a share of the largest logit. A multiple of PyTorch's own error passes too,
# because deep models amplify rounding: over models and processors, ONNX Runtime's error was 0.6 to 12 times PyTorch's.
TOLERANCE, MAX_ERROR_RATIO = 1e-5, 30
MODEL, ABOUT = "model.onnx", "headrace.json"
PIECES = 7, 5, *[1] * 8  # tokens per call of the comparison
STANDARD = 27  # the first opset of ONNX with LinearAttention
WEIGHTS = ("float32", "int8")


def export(checkpoint: Path, folder: Path, weights: str = "float32", opset: int = OPSET) -> str:
    """Writes model.onnx, and headrace.json with the names and shapes of the states.

    Args:
        weights: "float32", or "int8" for the matrices of linear layers.
        opset: 23, with ONNX Runtime's own node for the recurrence, or 27, with ONNX's.

    Raises:
        InputError: for an option that is not one of these, for a model that ONNX cannot express, and if ONNX Runtime
            computes other logits than PyTorch.
    """
    if weights not in WEIGHTS:
        raise InputError(f"--weights {weights}; expected {' or '.join(WEIGHTS)}")
    if opset not in (OPSET, STANDARD):
        raise InputError(f"--opset {opset}; expected {OPSET}, or {STANDARD} for ONNX's own LinearAttention")
    model = load(checkpoint).float()
    set_backend(model, "auto")  # that of ONNX in the export, PyTorch's in float64
    check_exportable(model)
    path = folder / MODEL
    trace(model).save(path)
    error, torch_error = errors(path, model)
    if not error <= max(TOLERANCE, MAX_ERROR_RATIO * torch_error):
        raise InputError(
            f"the logits of {MODEL} are wrong by {error:.1e} of the largest, those of PyTorch by {torch_error:.1e}"
        )
    sentence = f"its logits differ from float64's by {error:.1e} of the largest, PyTorch's by {torch_error:.1e}"
    if weights == "int8":
        quantize(path)
        sentence += f", with int8 weights by {errors(path, model)[0]:.1e}"
    if opset == STANDARD:
        standardize(path)
    write_json(folder / ABOUT, about(model) | {"opset": opset, "weights": weights, "made_by": running(**versions())})
    size = sum(file.stat().st_size for file in folder.glob(f"{MODEL}*"))
    return f"{MODEL} of {size / 1e6:.1f} MB; {sentence}"


def versions() -> dict[str, str]:
    import onnx
    import onnxruntime

    return {"onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__}


def about(model: HeadraceForCausalLM) -> dict[str, Any]:
    """Returns what a program needs in order to run the graph."""
    return {
        "vocab_size": model.config.vocab_size,
        "eos_token_ids": _several(model.generation_config.eos_token_id),
        "states": [
            {
                "past": f"past.{state.name}", "present": f"present.{state.name}", "shape": state.shape,
                "dtype": str(state.dtype).removeprefix("torch."),
            }
            for state in states(model)
        ],
    }  # fmt: skip


def _several(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else value


class Runtime:
    """An exported model in ONNX Runtime on the CPU. Each call computes the next tokens of the same sequences.

    Args:
        path: model.onnx.
        known: the model's states.
        batch: number of sequences.
        threads: number of threads; 0: ONNX Runtime's choice.
    """

    def __init__(self, path: Path, state_tensors: list[State], batch: int = 1, threads: int = 0):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
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
    largest = float(truth.abs().max())
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
