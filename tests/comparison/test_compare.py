"""Comparisons: matched conditions, what is measured, the folder, interruptions."""

import copy
import itertools
import json
import math
import os
import pickle
import signal
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch

from groups import begun_by, command, wait_for
from headrace import InputError, zoo
from headrace.comparison import arm as arm_module
from headrace.comparison import page
from headrace.comparison import rows as runs
from headrace.comparison.arm import evaluate, train
from headrace.comparison.choose import choose, state_numbers
from headrace.comparison.defaults import DEFAULTS, DEMO, PAIR
from headrace.comparison.findings import conditions, findings
from headrace.comparison.model import ArmRecipe, Shape, build, flops, model_inputs
from headrace.comparison.page import write_report
from headrace.comparison.plan import MATCHED, Plan, Study
from headrace.comparison.run import complete
from headrace.comparison.summary import summarize
from headrace.data import tokenizer
from headrace.files.provenance import claim
from headrace.files.results import file_names, finite, read_result, restored, write_result
from headrace.tasks import IGNORED, Digits, Induction, Masked, Pair, Reverse, Text
from headrace.training.gate_statistics import GateStatistics
from headrace.training.parameters import gate_parameters
from headrace.training.processes import Processes
from headrace.utils.integrity import write_json
from stored import results

CONTROL = "softmax-retnet(competition.activation=sigmoid)"
SMALL = Plan(
    "small", ("retnet", "softmax-retnet", CONTROL), Pair(keys=6, pairs=4, queries=4), Shape(hidden_size=16, heads=4),
    ArmRecipe(steps=3, batch_size=4, evaluations=2, held_out=8), seeds=2,
)  # fmt: skip


def ignore(*news):
    """Progress."""


# --- matched conditions -------------------------------------------------------------------------------------
def sizes(plan):
    """Parameters of every model, and without its gates, counted on the models themselves."""
    built = {arm.mixer: build(arm) for arm in replace(plan, seeds=1).arms()}
    whole = {mixer: sum(p.numel() for p in model.parameters()) for mixer, model in built.items()}
    return whole, {mixer: whole[mixer] - sum(p.numel() for p in gate_parameters(m)) for mixer, m in built.items()}


@pytest.mark.parametrize("task", [task for task in DEFAULTS if task not in ("needle", "reverse", "dates")])
def test_every_task_compares_matched_models_unless_told_otherwise(task):
    whole, without_gates = sizes(DEFAULTS[task])
    assert max(whole.values()) <= MATCHED * min(whole.values()), whole
    assert max(without_gates.values()) <= 1.02 * min(without_gates.values()), without_gates


def test_fixed_and_absent_mlp_widths():
    reverse, bert = DEFAULTS["reverse"], DEFAULTS["masked"].widths()
    assert [mixer for mixer, width in reverse.widths().items() if width is None] == ["rnn", "luong", "bahdanau"]
    whole, _ = sizes(reverse)
    assert all(whole[mixer] == pytest.approx(whole["bahdanau"], rel=0.01) for mixer in reverse.mixers[3:])
    assert bert["bert(mixer=gla)"] == bert["bert(mixer=softmax-gla)"] == 256 < bert["bert"]
    assert set(DEFAULTS["pair"].widths().values()) == {None}, "matched without an MLP"
    bare = replace(DEFAULTS["induction"], shape=Shape(layers=2, heads=4, mlp=0))
    assert set(bare.widths().values()) == {None}


def test_widths_of_models_that_no_memory_holds():
    """Attention of 2^20 channels has 16 TiB of weights, and is chosen a width for in no memory."""
    shape = Shape(hidden_size=2**20, heads=4, layers=1, mlp=16)
    widths = replace(DEFAULTS["pair"], mixers=("transformer", "gla(heads.key_dim=4)"), shape=shape).widths()
    assert widths["transformer"] == 16 < widths["gla(heads.key_dim=4)"]


def test_states_are_matched_by_a_size_of_each_mixer():
    """The largest state is that of mamba2, of 8,960 numbers; attention and rwkv7 have no such size."""
    shape = Shape(hidden_size=64, heads=4, layers=1)
    own = "mamba2", "gla", "softmax-gla", "retnet(heads.expand_v=1)", "gsa", "mamba", "s4d"
    fixed = "rwkv7", "transformer", "gla(heads.key_dim=8)"
    study = choose("mqar", mixers=",".join((*own, *fixed)), hidden_size=64, heads=4, match="state")
    mixers = study.plans[0].mixers
    assert mixers[0] == "mamba2" and mixers[len(own) :] == fixed
    assert mixers[2] == "softmax-gla(heads.key_dim=140)" and mixers[4] == "gsa(slots=70)"
    assert mixers[3].startswith("retnet(heads.expand_v=1, heads.key_dim=")
    counted = [state_numbers(zoo.get(mixer), shape) for mixer in mixers[: len(own)]]
    assert counted[0] == 8960 and max(counted) <= MATCHED * min(counted), counted
    assert [state_numbers(zoo.get(mixer), shape) for mixer in own][1] == 512
    with pytest.raises(InputError, match="--match='memory'; expected parameters or state"):
        choose("mqar", match="memory")
    with pytest.raises(InputError, match=r"--match state with 'gla.retnet', which has several mixers; expected single"):
        choose("mqar", mixers="gla+retnet,gla", match="state")


def test_report_says_which_mixers_have_heads_of_their_own():
    plan = replace(SMALL, mixers=("gla", "mamba2", "rwkv7"), shape=Shape(hidden_size=256, heads=8), seeds=1)
    (comparison,) = summarize(results([[0.5], [0.6], [0.7]], plan))
    said = conditions(comparison)[-1]
    assert said == "Heads: 8, or by the head sizes of a mixer's paper: rwkv7 4."
    assert [page.sizes(c, comparison.plan["shape"])[1] for c in comparison.contenders] == ["8", "8", "4"]
    first = comparison.contenders[0]
    assert page.cells(first)[3] == f"{first.state:,}" == "25"
    assert page.sizes(first, comparison.plan["shape"] | {"layers": 2})[2] == "12"


def test_flops_of_attention_are_those_counted_by_hand():
    """Two for a multiply-add: projections, MLP and logits of every token, and scores and sums over T tokens."""
    D, T, V, width = 16, SMALL.task.length, SMALL.task.vocab_size, 24
    plan = replace(SMALL, mixers=("transformer",), shape=Shape(hidden_size=D, heads=4, layers=2, mlp=width), seeds=1)
    counted = flops(build(plan.arms()[0]), plan.task.held_out(1), plan.shape)
    assert counted == T * 2 * (2 * (4 * D * D + 3 * D * width) + D * V) + 2 * 2 * (2 * T * T * D)
    (rnn,) = replace(SMALL, mixers=("rnn",), task=Reverse(length=4), seeds=1).arms()
    assert flops(build(rnn), model_inputs(rnn, rnn.plan.task.held_out(1)), rnn.plan.shape) is None


HAND = {  # operations of a head with K key and V value numbers, term by term; versions with competition have as many
    "linear-attention": lambda K, V: 2 * K * (V + 1) + 2 * K * (V + 1),  # S + kᵀ (v, 1), q S
    "hedgehog": lambda K, V: 4 * 2 * K * (V + 1),  # the same with 2 K features
    # the same, and q k and its mean of (v, 1) for 64 tokens
    "lolcats": lambda K, V: 4 * 2 * K * (V + 1) + 2 * 64 * (K + V + 1),
    "taylor-softmax": lambda K, V: 4 * (K + 1) * (K + 2) // 2 * (V + 1),  # the same with C(K + 2, 2) features
    **dict.fromkeys(  # α S, + kᵀ v, q S
        ("retnet", "xpos-retnet", "mamba2", "mamba3", "gla", "rwkv5", "rwkv6", "hgrn2", "simple-gla",
         "lightning-attention"),
        lambda K, V: K * V + 2 * K * V + 2 * K * V,
    ),
    "based": lambda K, V: 4 * (K + 1) * (K + 2) // 2 * (V + 1),
    "mlstm": lambda K, V: K * (V + 1) + 2 * K * (V + 1) + 2 * K * (V + 1),  # and one column for the sum of weights
    "delta-fast-weights": lambda K, V: 3 * 2 * 2 * K * V,  # k S, + kᵀ β (v − k S), q S, with 2 K features (DPFP)
    "deltanet": lambda K, V: 2 * K * V + 2 * K * V + 2 * K * V,
    "gated-deltanet": lambda K, V: K * V + 2 * K * V + 2 * K * V + 2 * K * V,
    "kda": lambda K, V: K * V + 2 * K * V + 2 * K * V + 2 * K * V,
    "log-linear-mamba2": lambda K, V: 14 * (K * V + 2 * K * V) + 2 * K * V,  # every level but the token's own, and one
    "log-linear-gated-deltanet": lambda K, V: 14 * (K * V + 2 * K * V + 2 * K * V + 2 * K * V),
    "deltaproduct": lambda K, V: 2 * (2 * K * V + 2 * K * V) + 2 * K * V,  # twice k S and + kᵀ β (v − k S), q S
    "gated-deltaproduct": lambda K, V: K * V + 2 * (2 * K * V + 2 * K * V) + 2 * K * V,
    "comba": lambda K, V: K * V + 2 * K * V + 2 * K * V + 2 * K * V,  # k S, α S, + kᵀ β (v − b k S), q S
    "gated-deltanet-2": lambda K, V: K * V + 2 * K * V + 2 * K * V + 2 * K * V,
    "mesa": lambda K, V: 5 * K * (V + K) + min(30, K) * 2 * K * K,  # S and M as in mamba2, and products with M
    "residual-delta": lambda K, V: 7 * K * V + K * V + 2 * K * V,  # Gated DeltaNet, and k S of an older S, which decays
    "gla-outer": lambda K, V: 2 * K * V + 2 * K * V + 2 * K * V,  # diag(α) S diag(β), + kᵀ v, q S
    "rwkv7": lambda K, V: K * V + 2 * K * V + 2 * K * V + 2 * K * V + 2 * K * V,  # diag(α) S − (a κ)ᵀ (κ S) + kᵀ v, q S
    "gsa": lambda K, V: 64 * (K + V) * (1 + 2 + 2),  # diag(α) (K, V), + (1 − α)ᵀ (k, v), q Kᵀ and p V, with 64 slots
    "abc": lambda K, V: 64 * (K + V) * (1 + 2 + 2) + 64 * (1 + 1 + 1 + 2),  # Σ e^w, p, 1 − p, the sum of p
    # one head of N numbers for each of E channels
    "mamba": lambda N, E: N * E + N * E + 2 * N * E + 2 * N * E,  # dt A, Ā h, + (dt u) B, C h
    "rwkv4": lambda N, E: 3 * E + 2 * E + (2 + 1 + 1) * E,  # e^−w a + e^k v, e^−w b + e^k, (a + e^u v) / (b + e^u)
    "rg-lru": lambda N, E: (1 + 1 + 2 + 2) * E,  # a h, i u, 1 − a², a h + √(1 − a²) (i u)
    "mingru": lambda N, E: (1 + 1 + 2) * E,  # 1 − z, z h̃, a h + b
    "minlstm": lambda N, E: (1 + 2 + 1 + 2) * E,  # f + i, f and i over it, i h̃, a h + b
    "hgrn": lambda N, E: (2 + 1 + 1 + 2) * E,  # γ + (1 − γ) σ(f), 1 − α, (1 − α) c, α h + b
    "short-conv": lambda N, E: 2 * N * E,  # a product and a sum for each input that is remembered
    # pairs of numbers are complex: a product has 6 operations, one with a real number 2, a sum 2
    "s4d": lambda N, E: N // 2 * E * (6 + 2 + 2 + 4),  # Ā x, B̄ u, +, Re(C x) and its sum
    # P* x, (1 + dt/2 diag) x, − P (P* x), the resolvent of that, P* of it, − its multiple; then as S4D
    "s4": lambda N, E: N // 2 * E * (4 + 6 + (2 + 2) + 6 + 4 + (2 + 2) + 2 + 2 + 4),
}  # fmt: skip
ELEMENTWISE = {
    "bonus", "offset", "gate_bias", "conv", "mix", "A_log", "log_damping", "frequency", "C", "P", "B", "embed_tokens",
    "qk_norm", "levels", "ridge",
}  # fmt: skip


RECURRENT = [name for name in zoo.names() if not zoo.get(name).facts.cached]
VARIANTS = ("softmax-", "paper-", "negative-")  # of a recurrence that another name has too


@pytest.mark.parametrize(
    "name", [*(name for name in RECURRENT if not name.startswith(VARIANTS)), "softmax-gla", "paper-softmax-retnet"]
)
def test_flops_of_every_recurrent_mixer_are_those_counted_by_hand(name):
    """Of a model of one layer without an MLP: its matrices, each used once for a token, and its recurrence. A token of
    a longer row costs as much, so that nothing is counted which is computed once for all rows."""
    for pairs in (8, 32):
        plan = replace(SMALL, mixers=(name,), task=Pair(keys=32, pairs=pairs, queries=pairs), seeds=1,
                       shape=Shape(hidden_size=32, heads=4, mlp=0))  # fmt: skip
        (arm,) = plan.arms()
        model, spec = build(arm), zoo.get(name)
        gates = {id(weight) for weight in gate_parameters(model)}  # a product of every head with itself, elementwise
        matrices = 2 * sum(
            weight.numel() for key, weight in model.named_parameters()
            if weight.dim() > 1 and not ELEMENTWISE & set(key.split(".")) and id(weight) not in gates
        )  # fmt: skip
        base = name.removeprefix("paper-").removeprefix("softmax-").removeprefix("negative-")
        recurrence = HAND[base](*spec.head_dims(32, 4)) * spec.num_heads(32, 4)
        assert flops(model, plan.task.held_out(1), plan.shape) == plan.task.length * (matrices + recurrence)


@pytest.mark.parametrize(("asked", "std"), [(None, 0.64 / 64**0.5), (0.3, 0.3)])
@pytest.mark.parametrize("mixer", ["retnet", "bert(mixer=gla)", "jamba"])
def test_first_weights_suit_the_width_unless_told_otherwise(mixer, asked, std):
    task = Masked(length=24) if mixer.startswith("bert") else SMALL.task
    plan = replace(SMALL, mixers=(mixer,), task=task, shape=Shape(layers=2, mlp=64))
    model = build(replace(plan, recipe=replace(plan.recipe, initializer_range=asked)).arms()[0])
    drawn = [p for name, p in model.named_parameters() if p.dim() > 1 and "mlp" in name and "router" not in name]
    assert drawn
    for weight in drawn:  # the standard error of a standard deviation is std / √(2 n)
        assert weight.std().item() == pytest.approx(std, abs=5 * std / (2 * weight.numel()) ** 0.5)


def test_an_encoder_decoder_keeps_its_own_first_weights():
    plan = replace(SMALL, mixers=("t5",), task=Reverse(), recipe=replace(SMALL.recipe, initializer_range=0.1))
    with pytest.raises(InputError, match=r"initializer_range=0.1; expected None"):
        plan.arms()
    assert build(replace(plan, recipe=SMALL.recipe).arms()[0])


def test_gates_start_as_the_recipe_says():
    """Orthogonal, each as long as the 4 numbers of its head are expected to be that have the recipe's deviation."""
    plan = replace(SMALL, recipe=replace(SMALL.recipe, gate_std=0.3, gate_init="orthogonal"))
    weight = build(plan.arms()[1]).lm.model.backbone.layers[0].mixer.write_competition.weight
    torch.testing.assert_close(weight @ weight.T, (0.3 * 2) ** 2 * torch.eye(4))


def test_every_mixer_has_the_same_rows_in_the_same_order():
    """The training rows of a seed, and the held-out rows of all seeds."""
    updates = SimpleNamespace(processes=Processes(torch.device("cpu")))
    curves = {(arm.mixer, arm.seed): arm_module.Curve(arm, updates, ignore) for arm in SMALL.arms()}
    rows = {arm: torch.cat([batch["input_ids"] for batch in curve.batches()]) for arm, curve in curves.items()}
    for (mixer, seed), own in rows.items():
        assert len(own) == 3 * 4 and torch.equal(own, rows["retnet", seed])
        held_out = (curves[arm].held_out["input_ids"] for arm in ((mixer, seed), ("retnet", 0)))
        assert torch.equal(*held_out)
    assert len(rows) == 6 and not torch.equal(rows["retnet", 0], rows["retnet", 1])


def test_gates_of_a_whole_model_start_as_the_recipe_says():
    plan = replace(SMALL, mixers=("bert(mixer=softmax-gla)",), task=Masked(length=24))
    for std in (0.0, 0.3):
        (arm,) = replace(plan, recipe=replace(SMALL.recipe, gate_std=std), seeds=1).arms()
        weights = [p for p in gate_parameters(build(arm)) if p.dim() > 1]
        assert weights and all(bool(weight.any()) == (std > 0) for weight in weights)


def test_speeds_are_tokens_over_seconds(monkeypatch):
    updates = SimpleNamespace(processes=Processes(torch.device("cpu")))
    curve = arm_module.Curve(SMALL.arms()[0], updates, ignore)
    monkeypatch.setattr(arm_module.time, "perf_counter", lambda: 14.0)
    curve.points, curve.resumed = [{"step": 1}], 10.0
    assert curve.speed(3) == 2 * 4 * SMALL.task.length / 4.0, "two steps of four rows in four seconds"


# --- what heads do ------------------------------------------------------------------------------------------
def test_gate_statistics_of_even_and_of_decided_heads():
    model = build(SMALL.arms()[1])
    rows = SMALL.task.held_out(8)
    _, even = evaluate(model, rows, 4)
    assert [(g["layer"], g["gate"]) for g in even] == [(0, "read"), (0, "write")]
    assert all(g["entropy"] == pytest.approx(1, abs=1e-5) and g["load"] == pytest.approx([0.25] * 4) for g in even)
    with torch.no_grad():
        model.lm.model.backbone.layers[0].mixer.write_competition.weight.normal_(std=1e6)
    _, (read, write) = evaluate(model, rows, 4)
    assert read == even[0] and write["entropy"] == pytest.approx(0, abs=0.05)
    assert sum(write["load_asked"]) == pytest.approx(1) == sum(write["load_other"])
    both = (torch.tensor(write["load_asked"]) + torch.tensor(write["load_other"])) / 2
    assert both.tolist() == pytest.approx(write["load"], abs=1e-5)


def test_gate_statistics_by_hand():
    """Two tokens of two heads with shares of 1/4 and 3/4, 3/4 and 1/4, or the same twice; the first is asked."""
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / math.log(2)
    for second, load, spread in (([0.75, 0.25], [0.5, 0.5], 1.0), ([0.25, 0.75], [0.25, 0.75], entropy)):
        statistics = GateStatistics(0, "read")
        statistics.add(torch.tensor([[[0.25, 0.75], second]]).log(), torch.tensor([[True, False]]))
        found = statistics.summary()
        assert found["entropy"] == pytest.approx(entropy, abs=1e-6)
        assert found["specialization"] == pytest.approx(spread - entropy, abs=1e-6)
        assert [found["load"], found["load_asked"], found["load_other"]] == [
            pytest.approx(x) for x in (load, [0.25, 0.75], second)
        ]


def test_gate_statistics_take_no_more_memory_for_more_tokens():
    """The last evaluation of a run is over all held-out tokens, which are millions."""
    statistics, sizes = GateStatistics(0, "read"), []
    for tokens in (1, 1000, 1000):
        statistics.add(torch.randn(1, tokens, 4), torch.rand(1, tokens) < 0.5)
        sizes.append(len(pickle.dumps(statistics)))
    assert len({*sizes}) == 1


def test_gates_of_padded_targets_are_not_counted():
    """Every token of a target has a label, and none of a source has one."""
    arm = replace(SMALL, mixers=("transformer-2017(mixer=softmax-gla)",), task=Reverse()).arms()[0]
    _, gates = evaluate(build(arm), model_inputs(arm, arm.plan.task.held_out(4)), 4)
    assert gates and all((gate["load_asked"] is None) != (gate["load_other"] is None) for gate in gates)


def test_gates_of_padding_and_of_empty_positions_are_not_counted(monkeypatch):
    counted, add = [], GateStatistics.add
    monkeypatch.setattr(GateStatistics, "add", lambda self, *args: counted.append(len(args[1])) or add(self, *args))
    for task in (Reverse(), Pair(keys=8, pairs=6, least=1)):
        arm = replace(SMALL, mixers=("softmax-gla",), task=task).arms()[0]
        rows = task.held_out(7)
        evaluate(build(arm), model_inputs(arm, rows), 7)
        if isinstance(task, Reverse):  # each symbol of a source, the start, and each symbol of the target
            real = int(rows["attention_mask"].sum()) + int((rows["shift_labels"] != IGNORED).sum())
        else:
            real = int((rows["input_ids"] >= 0).any(2).sum())
        assert counted.pop() == counted.pop() == real and not counted


def test_evaluation_is_the_mean_over_answers():
    model, rows = build(SMALL.arms()[0]).eval(), SMALL.task.held_out(7)
    answers, gates = evaluate(model, rows, 3)
    output, asked = model(**rows), rows["shift_labels"] >= 0
    right = (output.logits.argmax(-1) == rows["shift_labels"]) & asked
    assert answers.loss == pytest.approx(output.loss.item(), rel=1e-5) and gates == []
    assert torch.equal(answers.right & asked, right) and torch.equal(answers.labelled, asked)
    assert answers.accuracy == pytest.approx(right[asked].float().mean().item())


# --- plans and folders --------------------------------------------------------------------------------------
def test_options_become_plans():
    assert choose() == DEMO and [plan.seeds for plan in choose(seeds=1, lr=None).plans] == [1, 1]
    (plan,) = choose(mixers="gla,softmax-gla", length=20, heads=4).plans
    assert (plan.mixers, plan.task.length, plan.shape.heads) == (("gla", "softmax-gla"), 20, 4)
    (plan,) = choose(text="a.txt", steps=7).plans
    assert isinstance(plan.task, Text) and plan.task.files == ("a.txt",) and plan.recipe.steps == 7


def test_the_fields_of_a_text_are_those_of_its_expression_and_of_the_options():
    for one, other in (("tokenizer=t.json", {"text": "a.txt"}), ("files=a.txt", {"tokenizer": "t.json"})):
        (plan,) = choose(f"text({one}, length=20)", **other).plans
        assert plan.task == Text(("a.txt",), "t.json", length=20)
    for expression in ("files=b.txt", "tokenizer=bytes"):
        with pytest.raises(InputError, match=f"'{expression.partition('=')[0]}' is set twice"):
            choose(f"text({expression})", text="a.txt", tokenizer="t.json")


def test_seeds_are_a_number_or_named():
    of = lambda text: choose("pair", seeds=text).plans[0]  # noqa: E731
    assert [choose(task).plans[0].seeds for task in ("pair", "text", "needle")] == [3, 2, 1]
    assert of("2").seed_numbers == (0, 1) and of("10-14").seed_numbers == (10, 11, 12, 13, 14)
    assert of("7-7").seed_numbers == (7,) and of("7, 10-12,3").seed_numbers == (7, 10, 11, 12, 3)
    assert [arm.seed for arm in of("10,12").arms()[:: len(PAIR.mixers)]] == [10, 12]
    for wrong in ("x", "-3", "1-2-3", "3,", "5-3", "3,3", "1.5"):
        with pytest.raises(InputError, match=f"--seeds '{wrong}'"):
            of(wrong)


def test_tasks_are_expressions_and_sweeps_are_plans_with_names_of_their_own():
    (plan,) = choose("pair(keys=50, length=48)").plans
    assert plan.task == Pair(keys=50) and choose("pair(least=4)", length=40).plans[0].task == Pair(pairs=20, least=4)
    for task, more in (("pair(pairs=8, length=40)", {}), ("pair", {"length": 40, "sweep": "pairs=4,20"})):
        with pytest.raises(InputError, match=r"length[= ]40 .* expected"):
            choose(task, **more)
    (plan,) = choose("text(files=a.txt, length=20)").plans
    assert plan.task == Text(("a.txt",), length=20)
    assert [p.task.length for p in choose("pair", sweep="pairs=8,32").plans] == [16, 64]
    study = choose("mqar(vocabulary=288, length=128)", seeds=2, sweep="pairs=4, 32")
    assert [(p.name, p.task.pairs, p.task.length, p.seeds) for p in study.plans] == [
        ("mqar-pairs-4", 4, 128, 2), ("mqar-pairs-32", 32, 128, 2),
    ]  # fmt: skip
    assert study.name == "mqar-by-pairs" and study.to_json()["sweep"] == {"field": "pairs", "values": [4, 32]}
    assert len({arm.slug for arm in study.arms()}) == len(study.arms())
    shapes = choose("mqar", sweep="hidden_size=32,64").plans
    assert [plan.shape.hidden_size for plan in shapes] == [32, 64]
    assert [plan.recipe.lr for plan in choose("mqar", sweep="lr=1e-3,1").plans] == [1e-3, 1.0]
    assert [plan.task.length for plan in choose("pair", sweep="length=8,16").plans] == [8, 16]
    assert "sweep" not in choose("mqar").to_json(), "folders made before there were sweeps go on"


@pytest.mark.parametrize("source", ["books/a.txt", "books"])
def test_a_text_that_changed_is_another_run(source, tmp_path):
    (book := tmp_path / "books" / "a.txt").parent.mkdir()
    plan = replace(SMALL, task=Text((str(tmp_path / source),), length=8), mixers=("gla",))
    for text, raises in (("one " * 99, False), ("two " * 98, True)):
        book.write_text(text)
        with pytest.raises(InputError, match="sha256") if raises else nullcontext():
            claim(tmp_path / "run", Study("s", "S", (plan,)).to_json())


def test_widths_are_those_of_a_changed_tokenizer(tmp_path):
    (tmp_path / "book.txt").write_text("one two " * 99)
    task, found = Text((str(tmp_path / "book.txt"),), str(tmp_path / "tokenizer.json"), length=8), []
    for words in (0, 5000):  # with the latter, models match without an MLP
        tokens = tokenizer.train_bpe(["one two"], 300)
        tokens.add_tokens([f"<{i}>" for i in range(words)])
        tokens.save_pretrained(tmp_path)
        widths = replace(SMALL, task=task, mixers=("retnet", "transformer"), shape=Shape(heads=4)).widths()
        found.append({*widths.values()} == {None})
    assert found == [False, True]


def test_a_file_is_whole_or_absent(tmp_path):
    path = tmp_path / "a" / "b.json"
    write_json(path, {"x": 1})
    with pytest.raises(ValueError):
        write_json(path, {"x": float("nan")})
    assert json.loads(path.read_text("utf-8")) == {"x": 1}


def test_nonfinite_numbers_survive_json(tmp_path):
    record = {"a": [1.0, -math.inf, {"b/c~": math.nan}], "by": {8: math.inf, 16: 0.5}, "none": None}
    write_result(tmp_path / "x.json", record)
    stored = json.loads((tmp_path / "x.json").read_text("utf-8"), parse_constant=pytest.fail)
    assert stored["a"] == [1.0, None, {"b/c~": None}] and stored["by"] == {"8": None, "16": 0.5}
    assert stored["not_finite"] == {"/a/1": "-inf", "/a/2/b~1c~0": "nan", "/by/8": "inf"}
    read = read_result(tmp_path / "x.json")
    assert repr(read) == repr({**record, "by": {"8": math.inf, "16": 0.5}})
    once = finite([record, {"fine": 1}])
    assert finite(once) == once and once[1] == {"fine": 1} and repr(restored(once)[0]) == repr(record)


def test_one_channel_of_ids_equals_ids():
    plan = replace(SMALL, mixers=("retnet",), task=Induction())
    model, rows = build(plan.arms()[0]).eval(), plan.task.held_out(4)
    rows["input_ids"][:, :3] = torch.arange(3)
    channels = torch.stack([rows["input_ids"], torch.full_like(rows["input_ids"], -1)], 2)
    with torch.no_grad():
        plain, summed = (model(ids, rows["shift_labels"]).loss for ids in (rows["input_ids"], channels))
    assert torch.equal(plain, summed)


def test_names_that_are_spelt_alike_are_told_apart_in_files(monkeypatch):
    names = ("a_b", "a-b", "A-b", "c")
    for name in names:
        monkeypatch.setitem(zoo.LINEAR, name, zoo.LINEAR["gla"])
    arms = replace(SMALL, mixers=names, seeds=2).arms()
    spelt = file_names(names, lambda name: name.replace("_", "-"))
    assert len({str(arm.result).lower() for arm in arms}) == 8
    assert len({name.lower() for name in spelt.values()}) == 4 and spelt["c"] == "c"
    assert len({plan.name for plan in choose("text", sweep="tokenizer=a_b,a-b").plans}) == 2


# --- the whole ----------------------------------------------------------------------------------------------
def test_a_mixer_added_at_run_time_is_compared_and_a_finished_run_is_kept(tmp_path, monkeypatch):
    gla = zoo.LINEAR["gla"]
    monkeypatch.setitem(zoo.LINEAR, "mine", replace(gla, heads=replace(gla.heads, expand_k=1.0)))
    plan = replace(SMALL, mixers=("mine", "softmax-mine"), seeds=1)
    study, heard = Study("s", "S", (plan,)), []
    claim(tmp_path, study.to_json())
    found = complete(study, tmp_path, lambda *news: heard.append(news), ["cpu"])
    first, second = found["arms"]
    assert [point["step"] for point in first["curve"]] == [0, 2, 3]
    assert first["curve"][0]["scores"] == second["curve"][0]["scores"], "they start as one"
    untrained, *trained = (point["train_loss"] for point in first["curve"])
    assert untrained is None and all(loss > 0 for loss in trained)
    assert second["gate_parameters"] == 2 * 16 and second["parameters"] == first["parameters"] + 32
    assert second["curve"][0]["gates"] and first["state_bytes"] == 4 * 16 * 4
    assert read_result(tmp_path / "results.json") == found
    told = {(arm.mixer, step) for arm, step, scores in heard if scores}
    assert told == set(itertools.product(plan.mixers, (0, 2, 3)))
    assert len(first["speeds"]) == 2 and all(speed > 0 for speed in first["speeds"]), "after steps 2 and 3"
    assert first["flops"] == second["flops"] > 0
    lost = tmp_path / plan.arms()[1].result
    kept = copy.deepcopy(found["arms"])
    lost.unlink()
    again = complete(study, tmp_path, ignore, ["cpu"])["arms"]
    for arm in (*kept, *again):
        del arm["seconds"], arm["speeds"]
    assert again == kept, "the same numbers, to the bit"


WHOLE = ("bahdanau", "rnn", "transformer", "t5", "softmax-gla", "transformer-2017(mixer=softmax-gla)")


def test_whole_models_and_mixers_learn_one_task():
    plan = replace(SMALL, mixers=WHOLE, task=Reverse(symbols=3, length=4), seeds=1)
    found, arms = {}, plan.arms()
    for arm in arms:
        _, found[arm.mixer] = train(arm, ignore)
    assert [arm.width is None for arm in arms] == [True, True, False, False, False, False]
    assert arms[4].width == plan.widths()["softmax-gla"]
    for arm in found.values():
        assert set(arm["scores"]) == {"exact match", "accuracy", "loss"}
        assert list(map(int, arm["by_length"])) == [4, 5, 6, 7, 8], "of length 3 there are 27 sources"
    state, annotations = 16 * 4, 4 * 32 * 4
    assert found["bahdanau"]["state_bytes"] == state + annotations and found["rnn"]["state_bytes"] == 2 * state
    assert found["transformer"]["state_bytes"] == (4 + 5) * 2 * 16 * 4, "source and target stand in one row"
    aligned = found["bahdanau"]["alignment"]
    assert len(aligned["weights"]) == len(aligned["target"]) and len(aligned["weights"][0]) == len(aligned["source"])
    assert all(sum(row) == pytest.approx(1) for row in aligned["weights"])
    assert [found[name]["alignment"] for name in WHOLE[1:]] == [None] * 5
    assert found["t5"]["state_bytes"] == 2 * (4 + 4) * 16 * 4, "keys and values, of source and target"
    assert len(found["softmax-gla"]["curve"][0]["gates"]) == 2 and len(found[WHOLE[-1]]["curve"][0]["gates"]) == 6


@pytest.mark.parametrize(
    ("mixers", "task", "lengths"),
    [
        (("bert", "bert(mixer=softmax-gla)"), Masked(length=24), []),
        (("softmax-gla", "bert(mixer=softmax-gla)"), Digits(), []),
        (("gla", "gpt"), Induction(length=6), ["6", "12", "24", "48"]),
    ],
)
def test_models_of_every_kind_have_scores_at_every_length(mixers, task, lengths):
    plan = replace(SMALL, mixers=mixers, task=task, seeds=1)
    plan.check()
    for arm in plan.arms():
        _, found = train(arm, ignore)
        assert set(found["scores"]) == {"accuracy", "loss"} and list(found["by_length"]) == lengths


def test_nonfinite_score_is_marked_and_the_comparison_ends(tmp_path, monkeypatch):
    """At four times the training length, of one mixer; and the loss of a training step."""
    evaluate, backward = arm_module.evaluate, arm_module.Updates.backward

    def broken(model, rows, size):
        answers, gates = evaluate(model, rows, size)
        far = rows["input_ids"].shape[1] == 24 and not any("competition" in name for name, _ in model.named_modules())
        return answers._replace(losses=answers.losses * (torch.nan if far else 1)), gates

    def spoilt(self, batches):
        (loss,) = backward(self, batches)
        return [loss + torch.inf] if self.schedule.last_epoch == 1 else [loss]

    monkeypatch.setattr(arm_module, "evaluate", broken)
    monkeypatch.setattr(arm_module.Updates, "backward", spoilt)
    plan = replace(SMALL, mixers=("gla", "softmax-gla"), task=Induction(length=6), seeds=1)
    study = Study("s", "S", (plan,))
    claim(tmp_path, study.to_json())
    for _ in range(2):  # in this process, and from the arms' records
        found = complete(study, tmp_path, ignore, ())
        write_report(found, tmp_path)
    stored = json.loads((tmp_path / "results.json").read_text("utf-8"), parse_constant=pytest.fail)
    assert stored["arms"][0]["by_length"]["24"] is None and stored["arms"][1]["by_length"]["24"] is not None
    assert stored["not_finite"]["/arms/0/by_length/24"] == "nan"
    assert stored["not_finite"]["/arms/0/curve/1/train_loss"] == "inf"
    untrained, *trained = (point["train_loss"] for point in found["arms"][0]["curve"])
    assert untrained is None and math.inf in trained
    for made, read in zip(runs.rows(found), runs.read(tmp_path / "runs.csv"), strict=True):
        assert repr(made["by_length"]) == repr(read["by_length"])  # as nan == nan is false


@pytest.mark.parametrize(
    ("mixer", "task"),
    [("gla", Masked()), ("t5", Digits()), ("bert", Pair()), ("bert", Reverse()), ("t5", Masked()), ("t5", Pair())],
)
def test_mixer_unfit_for_a_task_is_refused(mixer, task):
    with pytest.raises(InputError, match=f"'{mixer}' cannot train on --task {task.name}"):
        replace(SMALL, mixers=(mixer,), task=task).check()


@pytest.mark.parametrize(("mixer", "task"), [("retnet", SMALL.task), ("bahdanau", Reverse(length=4))])
def test_a_run_that_diverges_says_so(mixer, task):
    recipe = replace(SMALL.recipe, lr=1e30, steps=9, evaluations=9, warmup=0.0)
    plan = replace(SMALL, mixers=(mixer,), task=task, recipe=recipe)
    _, result = train(plan.arms()[0], ignore)
    assert result["diverged"] and result["scores"] == {} and result["curve"][-1]["step"] < 9


@pytest.mark.parametrize("mixer", ["gla", "bahdanau"])
def test_batches_without_labels_are_counted_and_harmless(mixer, monkeypatch):
    """The first two of a run's six batches, of a causal model and of an encoder-decoder."""
    plan = replace(SMALL, mixers=(mixer,), task=Reverse(length=4), seeds=1, recipe=replace(SMALL.recipe, steps=6))
    inputs, trained = arm_module.model_inputs, itertools.count()

    def unlabelled(arm, rows):
        made = inputs(arm, rows)
        if len(made["shift_labels"]) == plan.recipe.batch_size and next(trained) < 2:
            made["shift_labels"].fill_(IGNORED)
        return made

    monkeypatch.setattr(arm_module, "model_inputs", unlabelled)
    _, result = train(plan.arms()[0], ignore)
    assert result["batches_without_labels"] == 2 and not result["diverged"]
    assert all(math.isfinite(point["train_loss"] or 0) for point in result["curve"])
    (found,) = summarize({"study": Study("s", "S", (plan,)).to_json(), "arms": [result]})
    said = f"Batches without any label in training {found.contenders[0].label}: 2; their loss and gradients were 0."
    assert said in findings(found)


PATIENCE = 600  # seconds, for a machine that does much else: whatever hangs, hangs longer
RUN = "compare --task pair --mixers retnet --seeds 3 --steps 100 --workers 1"
RUN += " --hidden-size 16 --heads 4 --batch-size 8 --length 8"


@pytest.mark.slow(seconds=30)
def test_interrupted_comparison_continues_with_its_finished_arms(tmp_path, run_command):
    """After one arm, as by a terminal, which tells every process. Of killed runs: tests/files/test_engine.py."""
    words = [*RUN.split(), "--output", str(tmp_path / "run")]

    def finished():
        return {path: path.stat().st_mtime_ns for path in tmp_path.glob("run/arms/*/result.json")}

    process = command(tmp_path, *words)
    wait_for(finished, process)
    family, kept = begun_by(process), finished()
    os.killpg(process.pid, signal.SIGINT)
    process.join(PATIENCE)
    errors = (tmp_path / "err").read_text()
    assert process.exitcode == 130 and "the same command continues" in errors and "Traceback" not in errors
    assert not psutil.wait_procs(family, timeout=PATIENCE)[1], "no orphans"
    ended = run_command(*words)
    assert not ended.code and len(finished()) == 3 and kept.items() <= finished().items()
    assert "The report is" in ended.out and ended.out.count("retnet, seed") == 3


def test_demo_is_as_described():
    assert [plan.task.name for plan in DEMO.plans] == ["pair", "text"]
    for plan in DEMO.plans:
        plan.check()


def test_a_model_that_does_not_fit_in_memory_is_named(monkeypatch):
    def build(arm):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 8.00 GiB.")

    monkeypatch.setattr(arm_module, "build", build)
    sentence = "^mixer 'retnet' with hidden_size=16, layers=1 and 4 rows of 8 tokens does not fit in memory: 20.00 GiB"
    with pytest.raises(InputError, match=sentence):
        arm_module.measure(SMALL.arms()[0], SimpleNamespace(device="cpu", report=ignore))
