"""Experts in MXFP4: the numbers, the model that transformers makes of the same files, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from families import float64_throughout, logits, read, relative, rewrite, save
from families.every import described
from headrace.convert import export_checkpoint, import_checkpoint
from headrace.convert.files import WEIGHTS
from headrace.convert.mxfp4 import dequantized
from headrace.utils.errors import InputError

VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
NAME = "model.layers.1.mlp.experts.down_proj"


def random_bytes(*shape, low=0, high=256):
    return torch.randint(low, high, shape, dtype=torch.uint8)


@pytest.mark.parametrize("exponent", [0, 1, 100, 127, 252])
def test_every_byte_is_two_numbers(exponent):
    """The first one is the lower half."""
    blocks, scales = torch.arange(256).byte().view(1, 1, 16, 16), torch.full((1, 1, 16), exponent, dtype=torch.uint8)
    expected = [VALUES[half] * 2.0 ** (exponent - 127) for byte in range(256) for half in (byte % 16, byte // 16)]
    assert dequantized(blocks, scales).double().flatten().tolist() == expected


def test_matrices_are_those_of_transformers():
    blocks, scales = random_bytes(3, 10, 4, 16), random_bytes(3, 10, 4, low=100, high=150)
    assert torch.equal(dequantized(blocks, scales), convert_moe_packed_tensors(blocks, scales))


@pytest.fixture
def packed(tmp_path):
    """A folder of gpt-oss as it was released, and its tensors."""
    save(described("gpt_oss", hidden_size=64, intermediate_size=32), tmp_path)
    tensors = {name: x.bfloat16() for name, x in load_file(tmp_path / WEIGHTS).items()}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        E, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = random_bytes(E, outputs, inputs // 32, 16)
        tensors[f"{name}_scales"] = random_bytes(E, outputs, inputs // 32, low=120, high=127)
    rewrite(tmp_path, dtype="bfloat16", quantization_config={"quant_method": "mxfp4"})
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    return tmp_path, tensors


@torch.no_grad()
def test_a_model_in_mxfp4_is_that_of_transformers(packed, tmp_path):
    """In bfloat16, which has its numbers, and on the way back, which is not quantized."""
    path, _ = packed
    ours = import_checkpoint(path)
    assert ours.dtype is torch.bfloat16
    with float64_throughout():
        theirs = AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager").double().eval()
    ids = torch.randint(1, 61, (2, 20))
    expected = logits(theirs, ids)
    assert relative(ours.double()(ids).logits, expected) < 1e-12
    export_checkpoint(ours, "gpt_oss", tmp_path / "back")
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert relative(logits(read(tmp_path / "back"), ids), expected) < 1e-12


def test_wrong_tensors_are_refused(packed):
    path, tensors = packed
    blocks, scales = f"{NAME}_blocks", f"{NAME}_scales"
    twice = {name: torch.cat([tensors[name]] * 2) for name in (blocks, scales)}
    for changes, sentence in (
        ({scales: None}, f"it has no tensor '{scales}'"),
        ({blocks: None}, f"it has no tensor '{NAME}'"),
        ({scales: tensors[scales][:, 1:].contiguous()}, rf"{blocks}' has shape \[4, 64, 1, 16] and scales \[4, 63, 1]"),
        ({scales: tensors[scales].int()}, r"expected bytes \[E, R, G, 16\] and \[E, R, G\]"),
        ({scales: tensors[scales] | 255}, rf"'{scales}' has a scale of 2\^128; expected at most 2\^125"),
        ({name: x[:3].clone() for name, x in twice.items()}, rf"{NAME}' has shape \[3, 32, 64], which does not fit"),
        ({name: x[:5].clone() for name, x in twice.items()}, rf"{NAME}' has shape \[5, 32, 64], which does not fit"),
    ):
        changed = {name: x for name, x in (tensors | changes).items() if x is not None}
        save_file(changed, path / WEIGHTS, metadata={"format": "pt"})
        with pytest.raises(InputError, match=sentence):
            import_checkpoint(path)


@pytest.mark.parametrize("other", [{"quant_method": "awq"}, {}, "mxfp4", ["mxfp4"]])  # the last two by transformers
def test_another_quantization_is_refused(other, packed):
    path, _ = packed
    rewrite(path, quantization_config=other)
    with pytest.raises(InputError, match=r"quantization_config=.*; expected a quant_method|is refused by transformers"):
        import_checkpoint(path)
