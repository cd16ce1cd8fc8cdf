"""Matrices in FP8 with scales of blocks: the numbers, the model that has them, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from families import rewrite, save
from families.every import described
from headrace.convert import export_checkpoint, import_checkpoint
from headrace.convert.files import WEIGHTS
from headrace.convert.fp8 import scaled
from headrace.convert.importing import import_config
from headrace.utils.errors import InputError

BLOCK = [16, 8]
QUANTIZED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": BLOCK}
NAME = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"  # of 20 rows, and so of a block and a part of one


def test_each_block_has_a_scale():
    """Also the last ones, which are not whole."""
    matrix, scales = torch.randn(37, 21).to(torch.float8_e4m3fn), torch.rand(3, 3)
    found = scaled(matrix, scales, (16, 8))
    expected = [[float(matrix[r, c]) * float(scales[r // 16, c // 8]) for c in range(21)] for r in range(37)]
    assert torch.equal(found, torch.tensor(expected))
    matrix = torch.randn(32, 24).to(torch.float8_e4m3fn)
    scales = scales[:2].contiguous()
    assert torch.equal(scaled(matrix, scales, (16, 8)), Fp8Dequantize(None)._dequantize_one(matrix, scales))


@pytest.fixture
def packed(tmp_path):
    """A folder of DeepSeek-V3 as it was released, its tensors, and the folder of the same model in float32."""
    plain, path = tmp_path / "plain", tmp_path / "packed"
    save(described("deepseek_v3"), plain)
    path.mkdir()
    config, tensors, exact = json.loads((plain / "config.json").read_text()), {}, {}
    for name, x in load_file(plain / WEIGHTS).items():
        tensors[name] = exact[name] = x.float()
        if "proj" in name:
            shape = [-(-n // size) for n, size in zip(x.shape, BLOCK, strict=True)]
            tensors[name], tensors[f"{name}_scale_inv"] = x.to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
            exact[name] = scaled(tensors[name], tensors[f"{name}_scale_inv"], BLOCK)
    save_file(exact, plain / WEIGHTS, metadata={"format": "pt"})
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZED}))
    return path, tensors, plain


@torch.no_grad()
def test_a_model_in_fp8_is_that_of_its_products(packed, tmp_path):
    """On the way back it is not quantized."""
    path, _, plain = packed
    ours, exact, ids = import_checkpoint(path), import_checkpoint(plain), torch.randint(1, 61, (2, 20))
    assert ours.dtype is import_config(path).dtype is torch.float32 and torch.equal(ours(ids).logits, exact(ids).logits)
    lower = import_checkpoint(path, dtype=torch.bfloat16)
    assert all(torch.equal(a, b.to(a)) for a, b in zip(lower.parameters(), ours.parameters(), strict=True))
    export_checkpoint(ours, "deepseek_v3", str(tmp_path / "back"))
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert torch.equal(import_checkpoint(str(tmp_path / "back"))(ids).logits, ours(ids).logits)


def test_wrong_tensors_are_refused(packed):
    path, tensors, _ = packed
    scales = f"{NAME}_scale_inv"
    for changes, sentence in (
        ({NAME: None}, f"it has no tensor '{NAME}'"),
        ({scales: None}, f"tensor '{NAME}' has dtype torch.float8_e4m3fn; expected one of"),
        ({scales: tensors[scales][1:].clone()}, rf"'{NAME}' has .* shape \[20, 32\] and scales \[1, 4\]"),
        ({scales: tensors[scales].half()}, "a scale of float32 or bfloat16 for each block of"),
        ({NAME: tensors[NAME].half()}, "has torch.float16, shape .* expected float8_e4m3fn"),
    ):
        changed = {name: x for name, x in (tensors | changes).items() if x is not None}
        save_file(changed, path / WEIGHTS, metadata={"format": "pt"})
        with pytest.raises(InputError, match=sentence):
            import_checkpoint(path)


@pytest.mark.parametrize(
    "changes", [{"weight_block_size": None}, {"weight_block_size": [0, 8]}, {"quant_method": "fbgemm_fp8"}]
)
def test_another_quantization_is_refused(changes, packed):
    path, *_ = packed
    rewrite(path, quantization_config=QUANTIZED | changes)
    with pytest.raises(InputError, match=r"config\.json has quantization_config="):
        import_checkpoint(path)
