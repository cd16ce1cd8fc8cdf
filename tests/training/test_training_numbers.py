"""What a run does to the weights and says of itself, held against a plain loop, closed formulas and data sheets."""

import math
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

import tiny
from headrace import Mixer, zoo
from headrace.data.rows import Collator, TextRows
from headrace.ops.backends.native import library as native
from headrace.spec.stack import Layer
from headrace.training import history, loop, recipes, run
from headrace.training.gate_statistics import GateStatistics, GateWatch
from headrace.training.loop import Batches, Loop, Updates
from headrace.training.model import build, estimate, flops_per_token
from headrace.training.parameters import gate_parameters, parameter_groups
from headrace.training.processes import Processes
from headrace.training.watch import gate_warnings, logged_statistics
from trained import recipe, train


class OnApple(torch.Tensor):
    """A stand-in for a tensor on Apple's GPU, which has no float64."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.cpu:
            return args[0].as_subclass(torch.Tensor)
        found = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(found, torch.Tensor) and found.dtype == torch.float64:
            raise TypeError("MPS has no float64")
        return found


STEPS, WARMUP, LR, BETAS, EPS, DECAY, GATE_LR = 8, 2, 0.02, [0.6, 0.7], 0.01, 0.3, 2.0
SCHEDULES = {  # the learning rate at a step after the warm-up, over the highest
    "cosine": lambda share: 0.25 + 0.75 * (1 + math.cos(math.pi * share)) / 2,
    "linear": lambda share: 1 - share,
}


def replayed(model, batches, rate, clip):
    """AdamW (arXiv 1711.05101, algorithm 2; ε beside the root) on the mean loss over a step's answers."""
    gates, moments = {id(p) for p in gate_parameters(model)}, {}
    for step, rows in enumerate(batches):
        labels = rows[:, 1:].flatten()
        loss = F.cross_entropy(model.eval()(rows).logits[:, :-1].flatten(0, 1), labels)
        gradients = dict(zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True))
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
        for p, g in gradients.items():
            g *= 1 if clip is None else min(1, clip / norm)
            m, v = moments.get(p, (0, 0))
            m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g.square()
            moments[p] = m, v
            m, v = m / (1 - BETAS[0] ** (step + 1)), v / (1 - BETAS[1] ** (step + 1))
            decay = DECAY if p.dim() > 1 and id(p) not in gates else 0
            p.data -= rate(step) * (GATE_LR if id(p) in gates else 1) * (m / (v.sqrt() + EPS) + decay * p.data)


@pytest.mark.parametrize(("schedule", "clip"), [("cosine", 0.5), ("linear", None)])
def test_training_equals_a_plain_loop_of_adamw(schedule, clip, data, tmp_path, monkeypatch):
    begun, batches, backward = [], [], Updates.backward

    def recorded(self, parts):
        batches.extend(part["input_ids"] for part in parts)
        return backward(self, parts)

    def kept(chosen):
        model = build(chosen)
        begun.append({name: x.clone() for name, x in model.state_dict().items()})
        return model

    monkeypatch.setattr(Updates, "backward", recorded)
    monkeypatch.setattr(run, "build", kept)
    settings = {
        "tokens": 128 * STEPS, "warmup": WARMUP / STEPS, "lr": LR, "schedule": schedule, "betas": BETAS,
        "min_lr": 0.25 if schedule == "cosine" else 0.0, "eps": EPS, "weight_decay": DECAY, "clip": clip,
        "gate_lr": GATE_LR, "precision": "float32", "save_every": STEPS, "evaluate_every": STEPS,
    }  # fmt: skip
    train(data, tmp_path, **settings)
    assert [len(rows) for rows in batches] == [2] * 2 * STEPS  # 128 tokens are 4 rows of 32, 2 at a time
    model = build(recipe(**settings)[0])
    model.load_state_dict(begun[0])
    rate = lambda n: LR * (n / WARMUP if n < WARMUP else SCHEDULES[schedule]((n - WARMUP) / (STEPS - WARMUP)))  # noqa: E731
    replayed(model, [torch.cat(pair) for pair in zip(batches[::2], batches[1::2], strict=True)], rate, clip)
    found = load_file(tmp_path / "model" / "model.safetensors")
    for name, x in model.state_dict().items():
        # One rounding of the weights a step; sums in another order than the loop's: 2e-5 of the change was seen.
        reach = 1e-3 * (x - begun[0][name]).norm() + STEPS * 2**-23 * x.norm()
        assert name == "lm_head.weight" or (found[name] - x).norm() <= reach, name


DYNAMICS = {
    "mamba": {"A_log"}, "s4d": {"log_damping", "frequency"}, "s4": {"log_damping", "frequency", "P", "B"},
    "rwkv4": {"mix"}, "rg-lru": {"gate_bias"}, "short-conv": set(),
    "rwkv6": {"bonus", "offset"}, "rwkv7": {"mix"}, "softmax-kda": set(), "transformer": set(),
}  # fmt: skip


@pytest.mark.parametrize("name", DYNAMICS)
def test_the_dynamics_of_a_mixer_are_not_decayed(name):
    """Of the parameters with two or more dimensions, those that authors' own training leaves out, and the gates."""
    layer = Mixer(name, hidden_size=32, num_heads=2, layer_idx=1, num_layers=3)
    names = {id(p): path for path, p in layer.named_parameters()}
    free = [p for group in parameter_groups(layer, DECAY, 1.0) if not group["weight_decay"] for p in group["params"]]
    gates = {id(p) for p in gate_parameters(layer)}
    found = {names[id(p)].rpartition(".")[2] for p in free if p.dim() > 1 and id(p) not in gates}
    assert found == DYNAMICS[name]


def test_the_card_says_bits_per_byte_of_the_held_out_text(data, tmp_path):
    history = train(data, tmp_path, tokens=128 * 10.4, evaluate_every=5).history.points
    fast, lossy = ([p["step"] for p in history if name in p] for name in ("tokens_per_second", "loss"))
    assert fast == [10] == lossy[1:]
    final = next(point for point in history if "final_loss" in point)
    ids = [token for row in data.held_out for token in row["input_ids"]]
    length = sum(token != data.tokenizer.eos_token_id for token in ids)  # every other token is a byte
    texts = data.manifest["held_out"]
    assert (texts["bytes"], texts["tokens"]) == (length, len(ids))
    readme = (tmp_path / "model" / "README.md").read_text("utf-8")
    bits = final["final_loss"] / math.log(2) * len(ids) / length
    told = f"{final['final_loss']:.4f} nats per held-out token, perplexity {math.exp(final['final_loss']):.2f}"
    assert f"After 1,280 tokens: {told}, {bits:.4f} bits per byte." in readme
    for point in (point for point in history if "eval_loss" in point):
        loss = point["eval_loss"]
        bits = loss / math.log(2) * len(ids) / length
        assert f"| {point['step']} | {loss:.4f} | {math.exp(loss):.2f} | {bits:.4f} |" in readme
    assert f"torch {torch.__version__}" in readme
    assert f"142 documents and {data.manifest['train']['tokens']:,} tokens for training, 8 held out" in readme


def test_a_held_out_loss_is_over_labelled_tokens(data, tmp_path):
    """Of rows in twos: two of 32 tokens, two of a single one, which ask for nothing, and then one answer."""
    chosen = recipe(precision="float32")[0]
    made = run.make_loop(chosen, data, tmp_path, Processes(torch.device("cpu")))
    rows = [data.held_out[0]["input_ids"], data.held_out[1]["input_ids"], [5], [5], [5, 6], [7]]
    total, _ = made.held_out_loss([{"input_ids": row, "starts": [0]} for row in rows])
    with torch.no_grad():
        several = [(made.model(torch.tensor([row])).logits[0, :-1], torch.tensor(row[1:])) for row in rows if row[1:]]
        expected = sum(F.cross_entropy(*each, reduction="sum") for each in several)
    assert total.tolist() == [pytest.approx(expected.item(), rel=1e-5), 31 + 31 + 1]


def test_training_speed_leaves_out_pauses(monkeypatch):
    clock = iter([10.0, 16.0, 18.0])
    monkeypatch.setattr(history.time, "perf_counter", lambda: next(clock))
    measures = history.Measures(128, 1.0, 7 / 1000)
    assert measures.speed(5) == {}
    measures.paused = 2.0
    assert measures.speed(9) == {"tokens_per_second": 128.0, "mfu": 0.896}  # 4 steps in 16 − 10 − 2 s
    assert measures.speed(9) == {} and measures.paused == 0.0  # no step since


def test_training_speed_leaves_out_evaluations(data, tmp_path, monkeypatch):
    rests, speed = [], history.Measures.speed
    monkeypatch.setattr(history.Measures, "speed", lambda self, step: rests.append(self.paused) or speed(self, step))
    started = time.perf_counter()
    points = train(data, tmp_path, tokens=128 * 20, evaluate_every=4).history.points
    assert any(rests) and all(0 <= rest < time.perf_counter() - started for rest in rests)
    assert min(point["tokens_per_second"] for point in points if "tokens_per_second" in point) > 0


def test_collapsed_gates_are_named_once_and_uniform_ones_at_the_end():
    loads = {0: (0.9985, [0.5, 0.5]), 1: (0.9995, [0.5, 0.5]), 2: (0.0, [0.5, 0.5]), 3: (0.2, [0.04, 0.96])}
    gates = [{"layer": i, "gate": "read", "entropy": e, "load": load} for i, (e, load) in loads.items()]
    named = set()
    (said,) = gate_warnings(gates, named, 4, ended=False)
    assert said.startswith("step 4: the read gate of layer 3 has collapsed: the mean share of head 1 is 96.0%")
    assert not [*gate_warnings(gates, named, 8, ended=False)]
    (said,) = gate_warnings(gates, named, 8, ended=True)
    assert said.startswith("the read gates of these layers are uniform after training: 1. They weigh all heads alike")


def test_gates_of_two_mixers_of_a_layer_have_names_of_their_own():
    """Those of the parallel one took the place of the mixer's."""
    model = tiny.build([Layer(zoo.get("softmax-gla"), parallel=zoo.get("softmax-mamba2"))], vocab_size=257)
    with torch.no_grad(), GateWatch().on(model) as watch:
        watch.labelled = torch.ones(1, 9, dtype=torch.bool)
        model(torch.arange(9)[None])
    gates = watch.summary()
    assert {gate["layer"] for gate in gates} == {0, "0-parallel", 1, "1-parallel"}
    assert len({name for gate in gates for name in logged_statistics(gate)}) == len(gates) * (2 + 4)


@pytest.mark.parametrize("separate", [False, True])
def test_gates_of_padding_are_not_counted(separate, tmp_path):
    """The last row of held-out text is short. The first token of a document has no label, and is counted."""
    model, chosen, collate = tiny.build("softmax-gla", vocab_size=257), recipe()[0], Collator(0, separate)
    rows = TextRows(torch.arange(1, 38).numpy(), np.array([9, 20, 37]), chosen.length)
    batches = Batches(rows, None, collate, chosen, Processes(torch.device("cpu")))
    _, found = Loop(model, model, batches, rows, None, tmp_path).held_out_loss(rows)
    with torch.no_grad(), GateWatch().on(model) as watch:
        for row in rows:
            watch.labelled = torch.ones(1, len(row["input_ids"]), dtype=torch.bool)
            model(**collate([row]), use_cache=False)
    assert found
    for gate, expected in zip(found, watch.summary(), strict=True):
        for name in ("entropy", "specialization", "load"):
            assert gate[name] == pytest.approx(expected[name], rel=1e-9)


def test_gates_are_judged_after_the_warm_up(data, tmp_path, capsys):
    """All are uniform when training begins."""
    for warmup, judged in ((0.5, False), (0, True)):
        run_ = train(data, tmp_path / str(warmup), tokens=128 * 2, warmup=warmup)
        said = capsys.readouterr().out
        assert "eval_loss" in said and "eval_write" not in said, "the numbers of gates are in the history alone"
        run_.step = 1
        run_.evaluate(data.held_out, "final")
        assert ("are uniform after training" in capsys.readouterr().err) == judged


@pytest.mark.parametrize(("rows", "size", "processes"), [(10, 3, 1), (10, 3, 4), (1, 2, 3), (12, 2, 2)])
def test_processes_share_all_rows_evenly(rows, size, processes):
    found = [loop.shares(rows, size, process, processes) for process in range(processes)]
    assert sorted(i for batches in found for batch in batches for i in batch) == list(range(rows))
    assert len({len(batches) for batches in found}) == 1 and max(len(x) for b in found for x in b) <= size
    assert len(found[0]) == math.ceil(math.ceil(rows / processes) / size)


def test_rows_to_evaluate_are_evenly_spread(data):
    length = len(data.train)
    assert [*run.evenly_spaced(data.train, 3)] == [data.train[i] for i in (0, (length - 1) // 2, length - 1)]
    assert len(run.evenly_spaced(data.train, length)) == length
    many = TextRows(np.broadcast_to(np.uint16(0), 2**24 + 4), np.empty(0, np.int64), 1)  # float32 has no 2^24 + 3
    assert list(run.evenly_spaced(many, 2).indices) == [0, 2**24 + 3]


PATTERNS = {"jamba(style.experts.count=4)": 8, "zamba": 6}  # {model: its least number of layers}


@pytest.mark.parametrize("mixer", [*tiny.covering(zoo.names()), "gpt", *PATTERNS])
def test_flops_on_the_meta_device_are_those_on_a_cpu(mixer, monkeypatch):
    """Also of mixers whose shapes depend on lengths and positions, which the meta device does not have. Native kernels
    count none."""
    monkeypatch.setattr(native, "missing", "it is not here")
    changes = {"mixer": mixer, "hidden_size": 32, "heads": 4, "layers": PATTERNS.get(mixer, 1), "length": 64}
    given, _ = recipes.load("laptop-1m", changes)
    made = build(given).train()
    with sdpa_kernel(SDPBackend.MATH):  # the CPU's fused attention counts none
        found = estimate(given)
        assert found["flops_per_token"] == flops_per_token(made, given)
    assert found["bytes"]["kept for the backward"] > 0


@pytest.mark.parametrize(
    ("mixer", "per_layer"),
    [
        ("transformer", 2 * 4 * 128**2 + 4 * 512 * 128),  # q, k, v, output; each token weighs and adds 512 others
        # q, k of 64, v, gate and output of 128, a decay of 64 by way of 16; 4 memories of 16 × 32, decayed
        ("gla", 2 * (128 * (2 * 64 + 3 * 128 + 16) + 16 * 64) + 5 * 4 * 16 * 32),
    ],
)
def test_an_estimate_equals_the_count_by_hand(mixer, per_layer, capsys):
    """laptop-1m: 4 layers of 128, an MLP of 352, a vocabulary of 4,096, rows of 512, 4e6 tokens in steps of 8,192."""
    found = estimate(recipes.load("laptop-1m", {"mixer": mixer})[0])
    forward = 4 * (per_layer + 2 * 3 * 128 * 352) + 2 * 128 * 4096
    assert (found["flops_per_token"], found["flops"]) == (3 * forward, 3 * forward * 488 * 8192)
    assert [found[name] for name in ("steps", "warmup_steps", "rows_per_step", "tokens")] == [488, 24, 16, 488 * 8192]
    weights = found["bytes"]["weights, gradients, moments"]
    assert weights == 4 * 4 * found["parameters"]["tied"]
    untied, wide, shared = (
        estimate(recipes.load("laptop-1m", {"mixer": mixer} | change)[0])["bytes"]
        for change in ({"tie": False}, {"micro_batch": 8}, {"shard": 4})
    )
    made = build(recipe(mixer=mixer, heads=1, tie=False)[0])
    assert (made.config.num_heads, made.lm_head.weight is made.model.embed_tokens.weight) == (1, False)
    assert untied["weights, gradients, moments"] == weights + 16 * 128 * 4096
    assert shared["weights, gradients, moments"] == (4 + 3 * 4 // 4) * found["parameters"]["tied"]
    assert wide["kept for the backward"] == 2 * found["bytes"]["kept for the backward"]
    # Of an MLP: its input, gate_proj(x), up_proj(x), the activation, and the input of down_proj.
    assert found["kept_per_token"]["mlp"] == 4 * 4 * (128 + 4 * 352)
    assert found["kept_per_token"].keys() >= {"mixer_norm", "mixer", "mlp_norm"} and capsys.readouterr().out == ""


@pytest.mark.parametrize("mixer", ["transformer", "gqa", "gla"])
def test_estimated_memory_for_the_backward_is_what_a_pass_keeps(mixer):
    chosen = recipe(mixer=mixer, length=256, batch_tokens=512, heads=4, hidden_size=32)[0]
    model, kept = build(chosen).train(), {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(input_ids=torch.zeros(2, 256, dtype=torch.long), use_cache=False)
    real = sum(storage.nbytes() for place, storage in kept.items() if place not in weights)
    # A device may keep a little of its own: 1.4 % less was seen of the native backend.
    assert estimate(chosen)["bytes"]["kept for the backward"] == pytest.approx(real, rel=0.05)


def test_float64_is_of_the_cpu_alone(data, tmp_path):
    """Evaluations of `train`, which was refused on Apple's GPUs, and the statistics of gates there."""
    made = run.make_loop(recipe()[0], data, tmp_path, Processes(torch.device("cpu")))
    expected = made.held_out_loss(made.held_out)[0]
    made.model.register_forward_hook(lambda model, given, out: setattr(out, "loss", out.loss.as_subclass(OnApple)))
    assert torch.equal(made.held_out_loss(made.held_out)[0], expected) and expected.dtype == torch.float64
    log_gates, labelled, found = torch.randn(1, 5, 4), torch.tensor([[True, False, True, True, False]]), []
    for kind in (torch.Tensor, OnApple):
        statistics = GateStatistics(0, "read")
        statistics.add(log_gates.as_subclass(kind), labelled.as_subclass(kind))
        found.append(statistics.summary())
    assert found[0] == found[1]
