"""Models on Apple's GPUs, which have no float64, by a stand-in that refuses it."""

import json
from pathlib import Path

import pytest
import torchgen
import yaml

import fresh
from equation import MAX_ERROR_RATIO
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
    for place, dtype, backend in ("cpu", "double", "torch"), ("cpu", "float", "torch"), (apple.DEVICE, "float", "auto"):
        model.zero_grad()
        set_backend(model, backend)
        with apple.Present():
            getattr(model, dtype)().to(place)
            row, padded, pack = ids.to(place), mask.to(place), ends.to(place)
            loss = model(row, attention_mask=padded, labels=row).loss
            loss = loss + model(row[:1], labels=row[:1], cu_seqlens=pack).loss
            loss.backward()
            size = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).to("cpu").double()
            tokens = model.generate(row[:, :9], max_new_tokens=5, do_sample=False).to("cpu")
            found.append([loss.detach().to("cpu"), size, tokens])
    (_, exact, _), (loss, size, tokens), (own, own_size, own_tokens) = found
    gradients = [((x - exact).abs().max() / exact.max()).item() for x in (size, own_size)]
    return (own - loss).abs().item(), *gradients, torch.equal(tokens, own_tokens)

results = {}
for mixer in sys.argv[1:]:
    try:
        results[mixer] = measured(mixer)
    except Exception as error:
        results[mixer] = f"{type(error).__name__}: {str(error)[:500]}"
print(json.dumps({"mixers": results, "operators": sorted(op.name() for op in apple.operators)}))
"""
MIXED = """
import apple
import json, warnings
import torch
from headrace.utils import device
from tiny import config, perturbed, tokens
from transformers import DynamicCache
from headrace.convert.linearize import linearize
from headrace.files.state import load_state, save_state
from headrace.hf import HeadraceForCausalLM
from headrace.hf.cache import HeadraceCache
from headrace.layers.base import tensors
from headrace.verification.op import Recurrence, op_laws

device.WITHOUT_FLOAT64.append(apple.DEVICE)
warnings.simplefilter("ignore")
ids, left, whole = tokens(2), torch.ones(2, 9, dtype=torch.long), torch.ones(2, 9)
left[0, :4] = 0

def built(mixer):
    torch.manual_seed(0)
    return perturbed(HeadraceForCausalLM(config(mixer))).eval()

def masked(mixer, place):
    return built(mixer).to(place)(ids.to(place), attention_mask=left, labels=ids).loss

def of_items(place):  # as the Trainer of transformers counts them
    return built("experts").to(place)(ids.to(place), labels=ids, num_items_in_batch=torch.tensor([7])).loss

def in_a_pack(place):  # whose bounds are given twice
    bounds, model = torch.tensor([0, 4, 9]), built("gla").to(place)
    return model(ids[:1].to(place), cu_seq_lens_q=bounds.to(place), cu_seq_lens_k=bounds.int()).logits

def in_positions(place):
    positions = torch.arange(9)[None]
    return built("gla").to(place)(ids.to(place), attention_mask=whole, position_ids=positions).logits

@torch.no_grad()
def in_dynamic_cache(place):
    model, cache = built("transformer").to(place), DynamicCache()
    model(ids[:, :5].to(place), attention_mask=left[:, :5], past_key_values=cache)
    return model(ids[:, 5:].to(place), attention_mask=left, past_key_values=cache).logits

def generated(place):  # of tokens on the CPU
    return built("gla").to(place).generate(ids, attention_mask=left, max_new_tokens=4, do_sample=False, pad_token_id=0)

def made_linear(place):
    torch.manual_seed(1)
    model = linearize(built("transformer").to(place), "lolcats", [1])
    return torch.cat([p.detach().flatten() for p in model.parameters()])

@torch.no_grad()
def resumed(place):
    model, cache = built("hybrid").to(place), HeadraceCache()
    model(ids.to(place), attention_mask=left, past_key_values=cache)
    save_state(place + ".state", cache, model)
    cache, read = load_state(place + ".state", model)
    assert {x.device.type for x in (read, *tensors(cache.states))} == {place}
    return model(read[:, :1], past_key_values=cache).logits

differences = {}
with apple.Present():
    for name, way in {
        "mask": lambda place: masked("hybrid", place), "mask, experts": lambda place: masked("experts", place),
        "items": of_items, "pack": in_a_pack, "positions": in_positions, "DynamicCache": in_dynamic_cache,
        "generate": generated, "linear": made_linear, "state": resumed,
    }.items():
        try:
            own, there = (way(place).detach().to("cpu").double() for place in ("cpu", apple.DEVICE))
            differences[name] = (own - there).abs().max().item()
        except Exception as error:
            differences[name] = f"{type(error).__name__}: {str(error)[:500]}"
    laws = [*op_laws(apple.DEVICE, 0, ["torch"], [Recurrence("BTH", "delta", 1, 20, 1, 16, 16)])]
print(json.dumps({"differences": differences, "broken": [row for row in laws if not row.holds], "laws": len(laws)}))
"""
REFUSED = "InputError: x is on apple, which has no float64; expected the CPU or a GPU of another kind"
MODELS = [
    *covering(zoo.names()),  # few that have every part of the others
    "first gpt", "experts", "parallel", "qwen3-next", "ling", "gemma2", "gpt-oss", "late norms", "phimoe",
    "transformer(rope.kind=dynamic, rope.factor=4.0, rope.original=32)",
]  # fmt: skip


@pytest.mark.slow(seconds=40)
def test_models_compute_without_float64_by_operators_that_pytorch_has_for_apples_gpus():
    said = fresh.output(SCRIPT, *MODELS, before="", PYTHONPATH=str(Path(__file__).parents[1]))
    found = json.loads(said.splitlines()[-1])
    refused = {name for name, result in found["mixers"].items() if result == REFUSED}
    assert refused == {"s4", "s4d"}, "whose kernels are powers of matrices"
    for name in MODELS:
        if name not in refused:
            loss, on_cpu, gradients, same_tokens = found["mixers"][name]
            assert loss < 1e-5 and gradients < max(1e-4, MAX_ERROR_RATIO * on_cpu) and same_tokens, name

    folder = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
    listed = yaml.safe_load((folder / "native_functions.yaml").read_text("utf-8"))
    known = {entry["func"].partition("(")[0]: entry for entry in listed}
    used = {name.removeprefix("aten::") for name in found["operators"]}
    assert len(used) > 100 and not {name: known[name] for name in used if not has_kernel(known[name], known)}


@pytest.mark.slow(seconds=20)
def test_what_is_on_the_cpu_meets_a_model_on_the_device(tmp_path):
    """A mask, tokens, a state file, the reference of a verification, and the new layers of a linear model."""
    said = fresh.output(MIXED, folder=tmp_path, before="", PYTHONPATH=str(Path(__file__).parents[1]))
    found = json.loads(said.splitlines()[-1])
    for name, difference in found["differences"].items():
        assert not isinstance(difference, str) and difference < 1e-4, (name, difference)
    assert found["laws"] == 6 and not found["broken"]


def has_kernel(entry, known):
    entry = known[entry["structured_delegate"]] if "structured_delegate" in entry else entry
    kinds = ", ".join(entry.get("dispatch", {"Composite": ""}))
    return "MPS" in kinds or "Composite" in kinds
