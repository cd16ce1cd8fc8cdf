"""What single families of dense models have, beside what tests/convert/test_families.py compares of all."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from families import logits, read, relative, rewrite, save
from families.every import described
from headrace import InputError, load
from headrace.convert import export_checkpoint, import_checkpoint
from headrace.convert.files import WEIGHTS


def saved(kind, path, **changes):
    """Their model, and tokens."""
    return save(described(kind, **changes), path), torch.randint(1, 61, (2, 12))


@torch.no_grad()
def test_a_mistral_with_kinds_of_layers_is_a_ministral(tmp_path):
    """As transformers takes it."""
    theirs, ids = saved("ministral", tmp_path)
    rewrite(tmp_path, model_type="mistral")
    assert read(tmp_path).config.model_type == "ministral"
    assert relative(import_checkpoint(tmp_path)(ids).logits, logits(theirs, ids)) < 1e-12


ORIGINAL = {"original_max_position_embeddings": 7}
MISTAKES = {
    "alpha": ("hunyuan_v1_dense", {"rope_type": "dynamic", "factor": 1.0, "alpha": "1"}, 8),
    "alpha below 0": ("hunyuan_v1_dense", {"rope_type": "dynamic", "factor": 1.0, "alpha": -2.0}, 8),
    "two channels": ("hunyuan_v1_dense", {"rope_type": "dynamic", "factor": 1.0, "alpha": 2.0}, 2),
    "growth": ("ministral3", {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": "1", **ORIGINAL}, 8),
    "no period": ("ministral3", {"rope_type": "linear", "factor": 2.0, "llama_4_scaling_beta": 1.0}, 8),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_numbers_of_rotations_are_refused_by_name(mistake, tmp_path):
    kind, rope, head_dim = MISTAKES[mistake]
    saved(kind, tmp_path)
    rewrite(tmp_path, rope_parameters={"rope_theta": 50.0} | rope, head_dim=head_dim)
    with pytest.raises(InputError, match=r"config\.json has rope_parameters=.*; expected "):
        import_checkpoint(tmp_path)


@torch.no_grad()
def test_constants_of_xielu_are_those_of_the_checkpoint(tmp_path):
    """Which transformers reads, although its config.json has no field for them; and a new model has theirs."""
    (theirs, ids), name = saved("apertus", tmp_path), "model.layers.0.mlp.act_fn.beta"
    tensors = load_file(tmp_path / WEIGHTS)
    save_file(tensors | {name: tensors[name] + 1}, tmp_path / WEIGHTS, metadata={"format": "pt"})
    changed = logits(read(tmp_path), ids)
    assert relative(changed, logits(theirs, ids)) > 1e-3
    ours = import_checkpoint(tmp_path)
    assert relative(ours(ids).logits, changed) < 1e-12
    ours.save_pretrained(tmp_path / "ours")
    assert torch.equal(load(tmp_path / "ours")(ids).logits, ours(ids).logits)
    of_both = (AutoModelForCausalLM.from_config(theirs.config).model, type(ours)(ours.config).model.backbone)
    first, own = of_both[0].layers[0].mlp.act_fn, of_both[1].layers[0].mlp.activation
    x = torch.linspace(-3, 3, 13)
    torch.testing.assert_close(own(x), first.float()(x), rtol=1e-2, atol=0)  # theirs are rounded to bfloat16


@torch.no_grad()
def test_positions_of_padding_are_0_on_the_way_back(tmp_path):
    """OPT's first two rows, which the tokens of a text do not read."""
    theirs, ids = saved("opt", tmp_path)
    export_checkpoint(import_checkpoint(tmp_path), "opt", tmp_path / "back")
    table = read(tmp_path / "back").model.decoder.embed_positions.weight
    assert not table[:2].any() and torch.equal(table[2:], theirs.model.decoder.embed_positions.weight[2:])
    assert relative(logits(read(tmp_path / "back"), ids), logits(theirs, ids)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_factor_of_embeddings_is_rounded_to_their_precision(dtype, tmp_path):
    _, ids = saved("gemma", tmp_path, hidden_size=24)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    theirs.save_pretrained(tmp_path / "saved")
    for ours in (import_checkpoint(tmp_path, dtype=dtype), load(tmp_path / "saved")):
        scaled = ours.model.embed_tokens(ids) * ours.model.backbone.embedding_scale
        assert scaled.dtype == dtype and torch.equal(scaled, theirs.model.embed_tokens(ids))
