"""Models on Apple's GPUs, which have no float64, by a stand-in that refuses it."""

import json
from functools import cache
from pathlib import Path

import pytest
import torchgen
import yaml

import fresh
from headrace import zoo
from tiny import covering

SCRIPT = """
import apple
import json, sys, warnings
import torch
from headrace.utils import device
from tiny import config, perturbed
from headrace import set_backend
from headrace.hf import HeadraceForCausalLM

device.WITHOUT_FLOAT64.append(apple.DEVICE)
warnings.simplefilter("ignore")

def measured(mixer):
    torch.manual_seed(0)
    model = perturbed(HeadraceForCausalLM(config(mixer))).eval()
    ids, mask = torch.randint(29, (2, 70)), torch.ones(2, 70, dtype=torch.bool)
    mask[0, :7] = False
    ends = torch.tensor([0, 30, 70])
    found = []
    for place, backend in ("cpu", "torch"), (apple.DEVICE, "auto"):
        model.zero_grad()
        set_backend(model, backend)
        with apple.Present():
            model.to(place)
            row, padded, pack = ids.to(place), mask.to(place), ends.to(place)
            loss = model(row, attention_mask=padded, labels=row).loss
            loss = loss + model(row[:1], labels=row[:1], cu_seqlens=pack).loss
            loss.backward()
            size = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).to("cpu")
            tokens = model.generate(row[:, :9], max_new_tokens=5, do_sample=False).to("cpu")
            found.append([loss.detach().to("cpu"), size, tokens])
    (loss, size, tokens), (own, own_size, own_tokens) = found
    gradients = (own_size - size).abs().max() / size.max()
    return (own - loss).abs().item(), gradients.item(), torch.equal(tokens, own_tokens)

results = {}
for mixer in sys.argv[1:]:
    try:
        results[mixer] = measured(mixer)
    except Exception as error:
        results[mixer] = f"{type(error).__name__}: {str(error)[:500]}"
print(json.dumps({"mixers": results, "operators": sorted(op.name() for op in apple.operators)}))
"""
FLOAT64 = {"s4", "s4d"}  # whose kernels are powers of matrices


@cache
def on_apple():
    """What the script says of a few mixers that have every part of the others."""
    folder = Path(__file__).parents[1]
    done = fresh.run(SCRIPT, *covering(zoo.names()), before="", PYTHONPATH=str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow(seconds=30)
@pytest.mark.parametrize("mixer", covering(zoo.names()))
def test_a_model_computes_without_float64(mixer):
    found = on_apple()["mixers"][mixer]
    if mixer in FLOAT64:
        assert found == "InputError: x is on apple, which has no float64; expected the CPU or a GPU of another kind"
    else:
        loss, gradients, same_tokens = found
        assert loss < 1e-5 and gradients < 1e-4 and same_tokens


def test_pytorch_has_every_operator_for_apples_gpus():
    folder = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
    listed = yaml.safe_load((folder / "native_functions.yaml").read_text("utf-8"))
    known = {entry["func"].partition("(")[0]: entry for entry in listed}
    used = {name.removeprefix("aten::") for name in on_apple()["operators"]}
    assert len(used) > 100
    missing = {name: entry for name in used if not _has_kernel(entry := known[name], known)}
    assert not missing


def _has_kernel(entry, known):
    entry = known[entry["structured_delegate"]] if "structured_delegate" in entry else entry
    kinds = ", ".join(entry.get("dispatch", {"Composite": ""}))
    return "MPS" in kinds or "Composite" in kinds
