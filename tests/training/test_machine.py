"""What the dry run says of a machine: memory per device, layout and days."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from headrace import InputError
from headrace.cli import app as cli
from headrace.training import machine, recipes
from headrace.training.distillation import divergence, teacher_of
from headrace.training.loop import answers
from headrace.training.model import build, counted, estimate, recompute_blocks
from headrace.training.run import seconds_per_token
from trained import peak_of


def recipe(**changes):
    return recipes.load("laptop-1m", {"precision": "float32", **changes})[0]


@pytest.mark.parametrize(
    "changes",
    [{"mixer": "gla"}, {"mixer": "transformer", "recompute": True}, {"mixer": "gla", "teacher": True}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_estimated_memory_is_the_peak_of_a_step(changes, tmp_path):
    """Of all that PyTorch allocates. The estimate is higher, as gradients do not exist before the backward."""
    if "teacher" in changes:
        build(recipe(layers=1, mixer="transformer")).save_pretrained(tmp_path)
        changes |= {"teacher": str(tmp_path)}
    chosen = recipe(layers=3, length=256, micro_batch=2, batch_tokens=512, **changes)
    model, teacher = build(chosen).train(), teacher_of(chosen)
    assert estimate(chosen)["bytes"].get("teacher", 0) == (0 if teacher is None else 4 * teacher.num_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    if chosen.recompute:
        recompute_blocks(model)
    ids = torch.randint(0, chosen.vocab_size, (chosen.micro_batch, chosen.length))

    def step():
        batch = {"input_ids": ids, "labels": ids}
        out = model(**batch, skip_logits=teacher is None, use_cache=False)
        loss = out.loss
        if teacher is not None:
            loss = loss + divergence(teacher, out.logits, batch, answers(batch))
        loss.backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    peak = peak_of(step, [model] if teacher is None else [model, teacher], optimizer)
    assert 0.85 < peak / sum(machine.memory(chosen, 1).values()) < 1.05


def test_bytes_of_weights_equal_hand_counts():
    """laptop-1m with GLA: P parameters, of which 4,096 × 128 are embeddings and 128 are the last norm's."""
    one = recipe(mixer="gla")
    P = sum(p.numel() for p in build(one).parameters())
    rest = 4096 * 128 + 128
    block = (P - rest) // 4
    assert rest + 4 * block == P
    half = recipe(mixer="gla", precision="bfloat16")
    alone, eight = machine.memory(half, 1), machine.memory(half, 8)
    sharded = machine.memory(recipe(mixer="gla", precision="bfloat16", shard=8), 8)
    names = ["weights, gradients, moments", "weights in bfloat16"]
    assert [alone[name] for name in names] == [16 * P, 2 * P] and "buckets of gradients" not in alone
    assert alone.pop("gradient of the head") == 4 * 4096 * 128, "in two passes"
    assert eight == alone | {"buckets of gradients": 4 * P}
    assert [sharded[name] for name in names] == [4 * P + 12 * P // 8, 2 * P]
    assert sharded["whole weights of two blocks"] == 4 * (rest + 2 * block)
    assert alone["at work"] == 12 * half.micro_batch * 512 * 4096  # fewer numbers than a piece of 2^24
    wide = replace(half, vocab_size=2**17, hidden_size=1024)
    assert machine.memory(wide, 1)["at work"] == 2**27 * 6 and machine.memory(wide, 1, True)["at work"] == 2**27 * 6
    narrow = replace(wide, hidden_size=128)
    assert machine.memory(narrow, 1)["at work"] == 2**24 * 12 and machine.memory(narrow, 1, True)["at work"] == 2**28


def test_plan_counts_steps_rows_and_days():
    """16 rows in a step on 2 nodes of 2 devices, 2 of which share a row: 8 rows for each pair, 4 at a time."""
    chosen = recipe(mixer="gla", context_parallel=2)
    result = machine.plan(chosen, machine.parse("2x2xH100"), 0.25)
    assert [result[name] for name in ("devices", "data_parallel", "context_parallel")] == [4, 2, 2]
    assert [result[name] for name in ("rows_per_pass", "passes_per_step")] == [4, 2]
    flops = machine.estimate(chosen)["flops"]
    assert result["days"] == pytest.approx(flops / (4 * 989e12 * 0.25) / 86400)
    assert result["tokens_per_second"] == pytest.approx(488 * 8192 / (result["days"] * 86400))
    assert result["fits"] and result["bytes_of_device"] == 80e9


def test_a_block_is_computed_again_without_its_teacher(tmp_path):
    """A forward pass is a third of a step, and a teacher's one more."""
    build(recipe(mixer="gla")).save_pretrained(tmp_path)
    plain = recipe(mixer="gla")
    again, taught = replace(plain, recompute=True), replace(plain, teacher=str(tmp_path))
    both = replace(taught, recompute=True)
    flops = [machine.operations(each) for each in (plain, again, taught, both)]
    assert flops == [pytest.approx(flops[0] * thirds / 3) for thirds in (3, 4, 4, 5)]
    days = [machine.plan(each, machine.parse("2xH100"), 0.25)["days"] for each in (plain, both)]
    assert days[1] / days[0] == pytest.approx(5 / 3)
    here = machine.time_here(both)
    assert here["seconds"] == pytest.approx(flops[3] / (here["flops_per_second"] * machine.REACHED))


def test_a_teacher_keeps_the_data_type_of_its_checkpoint(tmp_path):
    build(recipe(mixer="gla")).bfloat16().save_pretrained(tmp_path)
    costs = estimate(recipe(mixer="gla", gate_std=0.5, gate_init="orthogonal", teacher=str(tmp_path)))
    assert costs["bytes"]["teacher"] == 2 * costs["parameters"]["tied"]


def test_the_time_on_a_gpu_is_by_its_data_sheet_and_the_mixers_efficiency(monkeypatch):
    monkeypatch.setattr(machine, "present_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(machine, "matrix_rate", lambda device, dtype: 1e12)
    for precision, rate in (("bfloat16", 989e12), ("float32", 1e12)):
        chosen = recipe(mixer="gla", precision=precision)
        here = machine.time_here(chosen)
        assert (here["flops_per_second"], here["measured"]) == (rate, precision == "float32")
        assert here["seconds"] == pytest.approx(estimate(chosen)["flops"] / rate / machine.efficiency("gla").fraction)


def test_the_first_product_may_load_a_library(monkeypatch):
    """It takes a second here, and each of the others a tenth of one."""
    clock = iter(itertools.accumulate([0.0, 1.0] + 9 * [0.0, 0.1]))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    assert machine.matrix_rate(torch.device("cpu"), torch.float32) == pytest.approx(2 * 512**3 / 0.1)


def test_machine_names_are_parsed_and_checked():
    assert machine.parse("8xH100") == machine.parse(" 8 × h100 ") == machine.parse("2x4xH100") == (8, "H100")
    assert machine.parse("1xrtx-4090") == (1, "RTX-4090") and machine.parse("2xMI300X") == (2, "MI300X")
    for text, sentence in {"8xH900": "mean 'H200'", "H100": "8xH100", "0xA100": "8xH100", "8": "8xH100"}.items():
        with pytest.raises(InputError, match=sentence):
            machine.parse(text)
    with pytest.raises(InputError, match=r"processes=3 .*expected a multiple of 12 rows"):
        machine.plan(recipe(), machine.parse("3xH100"), 0.3)
    with pytest.raises(InputError, match="shard=3; expected a divisor of the machine's 8"):
        machine.plan(recipe(shard=3), machine.parse("8xH100"), 0.3)
    with pytest.raises(InputError, match="--efficiency=0;"):
        machine.plan(recipe(), machine.parse("1xH100"), 0.0)


def test_devices_are_recognized_by_driver_names():
    """Dense bfloat16, of NVIDIA's data sheets: a laptop's device and a part of one (MIG) are slower."""
    names = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 NVL": 835e12, "NVIDIA A100-SXM4-40GB": 312e12}
    names |= {"NVIDIA L40S": 362e12, "NVIDIA L4": 121e12, "NVIDIA GeForce RTX 4090": 165e12, "NVIDIA L40": None}
    names |= {"NVIDIA H200": 989e12, "NVIDIA B200": 2250e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA RTX 3090": None}
    names |= dict.fromkeys(["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D"])
    names |= {"NVIDIA H200 NVL": 835e12}
    names |= dict.fromkeys(["NVIDIA H100 80GB HBM3 MIG 1g.10gb"])
    assert {name: machine.peak(name) for name in names} == names


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA H200", 989e12), ("NVIDIA L40", None)])
def test_utilization_is_of_the_peak_of_all_devices(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    flops = machine.estimate(recipe())["flops_per_token"]
    assert seconds_per_token(recipe(), 4) == (peak and pytest.approx(flops / (4 * peak)))


def test_dry_run_says_whether_it_fits_and_names_layers_without_a_kernel():
    def run(*options):
        return CliRunner().invoke(cli.app, ["train", "laptop-1m", "--dry-run", *options], env={"COLUMNS": "200"})

    wide = "hidden_size=6144"  # 2 billion parameters in few layers
    assert "GiB: fits" in run(wide, "--machine", "8xH100").output
    assert "does not fit; expected a smaller micro_batch" in run(wide, "--machine", "8xL4").output
    said = run("mixer=mamba").output
    assert "4 of 4 layers: the recurrence of Mamba has none; PyTorch computes them" in said
    result = json.loads(run("shard=8", "--machine", "8xH100", "--json").output)["machine"]
    assert result["fits"] and result["shard"] == 8
    assert result["efficiency"] == machine.efficiency(recipes.load("laptop-1m")[0].mixer).fraction
    alone = CliRunner().invoke(cli.app, ["train", "paper-340m", "--machine", "8xH100"])
    assert "expected it with --dry-run" in str(alone.exception)


def test_efficiencies_are_measured_or_said_to_be_assumed():
    for name, row in machine.read_rows(machine.MEASURED, "mixer").items():
        flops, rate = float(row["flops_per_token"]), float(row["tokens_per_second"])
        assert float(row["efficiency"]) == pytest.approx(flops * rate / machine.peak(row["machine"]), rel=1e-2)
        assert machine.efficiency(f"{name}(heads.count=2)") == (
            float(row["efficiency"]),
            f"measured with {name} on one NVIDIA H200",
        )
    other = machine.efficiency("s4")
    assert other.source.startswith("an assumption, the median of ") and 0 < other.fraction < 1


@pytest.mark.parametrize(
    ("mixer", "layers", "reason"),
    [("gla", [], ""), ("transformer", [], ""), ("gsa", [], ""), ("rwkv7", [0, 1], "the recurrence of RWKV7 has none"),
     ("gla+mamba", [1], "the recurrence of Mamba has none"),
     ("comba", [0, 1], "the recurrence of LinearMixer has none"),
     ("delta-fast-weights(heads.count=1)", [0, 1], "it takes K from 1 to 256")],
)  # fmt: skip
def test_layers_without_a_kernel_are_named(mixer, layers, reason):
    """By what the layer asks of the backends."""
    found = counted(recipe(mixer=mixer, layers=2, hidden_size=256, length=128)).without_kernel
    assert [*found.values()] == ([layers] if layers else []) and all(each.startswith(reason) for each in found)
