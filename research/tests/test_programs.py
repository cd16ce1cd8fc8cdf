"""The programs that make the rows of studies, with few steps; every stored plan can be run."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace import HeadraceConfig, HeadraceForCausalLM
from headrace.comparison.choose import planned
from headrace.tasks import Text
from research import corpus, days, rates, retrofit, specialization, study, taylor

PLANS = sorted(Path(study.__file__).parent.glob("studies/*.yaml"))


def test_information_by_hand():
    assert specialization.information(torch.eye(4)) == pytest.approx(1)
    assert specialization.information(torch.ones(4, 3)) == pytest.approx(0)
    assert specialization.information(torch.zeros(4, 3)) == 0
    half = specialization.information(torch.tensor([[3.0, 1.0], [1.0, 3.0]]))
    assert half == pytest.approx(1 + (0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(2))


def test_the_corpus_is_prose_and_code_in_turn(tmp_path, monkeypatch):
    (book := tmp_path / "book.txt").write_text("prose\n" * 100, encoding="utf-8")
    (code := tmp_path / "code.py").write_text("code =\n" * 60, encoding="utf-8")
    monkeypatch.setattr(corpus, "standard_library", lambda: [str(code)])
    monkeypatch.setattr(corpus, "FOLDER", tmp_path / "text")
    monkeypatch.setattr(corpus, "PIECE", 42)
    corpus.main([book])
    text = (tmp_path / "text" / "corpus.txt").read_text("utf-8")
    assert text == ("prose\n" * 7 + "code =\n" * 6) * 10
    task = Text((str(tmp_path / "text" / "corpus.txt"),), str(tmp_path / "text" / "tokenizer.json"), length=4)
    assert 256 < task.vocab_size < corpus.VOCABULARY and task.corpus.bytes_per_token > 2


def test_means_by_cluster():
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 8.0, 2.0]])
    found = specialization.by_cluster(values, torch.tensor([0, 1, 0, 1]))
    assert found.tolist() == [[2.0, 3.0], [4.0, 1.0]]


def test_a_head_is_silenced_and_gates_are_noted():
    torch.manual_seed(0)
    config = HeadraceConfig(
        mixer="softmax-retnet",
        vocab_size=9,
        hidden_size=16,
        num_hidden_layers=1,
        num_heads=4,
        mlp="none",
        use_cache=False,
    )
    model = HeadraceForCausalLM(config).eval()
    ids, gates = torch.randint(9, (2, 5)), dict[str, torch.Tensor]()
    whole, keep = model(ids).logits, 1 - torch.eye(4)[2]
    with specialization.hooked(model, gates, torch.ones(4)):
        assert torch.equal(model(ids).logits, whole)
    assert {name: tuple(found.shape) for name, found in gates.items()} == {"write": (2, 5, 4), "read": (2, 5, 4)}
    with specialization.hooked(model, gates, keep):
        silenced = model(ids).logits
    (weight,) = (value for name, value in model.named_parameters() if "o_proj" in name)
    with torch.no_grad():
        weight.unflatten(1, (4, -1))[:, 2] = 0
    assert torch.equal(model(ids).logits, silenced) and not torch.equal(whole, silenced)


def test_gates_added_halfway_start_from_the_first_half(tmp_path, monkeypatch):
    (whole,) = study.plan(retrofit.BASE).plans
    short = replace(
        whole, recipe=replace(whole.recipe, steps=2, evaluations=1, held_out=16), seeds=(0,),
        tuning=replace(whole.tuning, seeds=(100,)),
    )  # fmt: skip
    monkeypatch.setattr(study, "plan", lambda name, made=study.plan: replace(made(name), plans=(short,)))
    monkeypatch.setattr(retrofit, "RESULTS", tmp_path / "retrofit.csv")
    retrofit.run(tmp_path)
    runs = [json.loads(path.read_text("utf-8")) for path in tmp_path.glob("arms/*/result.json")]
    assert {run["seed"] for run in runs} == {0, 100, 1000, 1100}
    for seed in (0, 100):
        (end,) = (run["curve"][-1]["scores"] for run in runs if run["seed"] == seed)
        begun = [run["curve"][0]["scores"] for run in runs if run["seed"] == seed + retrofit.LATER]
        assert len(begun) in (3, 9) and begun == [end] * len(begun)
    kept = study.rows.read(tmp_path / "retrofit.csv")
    assert {row["mixer"] for row in kept} == {mixer for mixer, _ in retrofit.question().names}
    assert [row["trial"] for row in kept] == [True] * 9 + [False] * 3


def test_a_diverged_run_is_named():
    question, runs = study.read("mqar-retnet")
    assert "diverged" not in "\n".join(study.lines(["mqar-retnet"]))
    lost = next(i for i, row in enumerate(runs) if not row["trial"])
    changed = [row | {"score": None, "loss": None} if i == lost else row for i, row in enumerate(runs)]
    assert "1 run diverged, and the tables are without it." in study.shown({"mqar-retnet": (question, changed)})


def test_specialization_is_measured_once(tmp_path, monkeypatch):
    arm = specialization.arms("clusters")[-1]
    recipe = replace(arm.plan.recipe, steps=2, evaluations=1, held_out=16)
    monkeypatch.setattr(specialization, "arms", lambda name: [replace(arm, plan=replace(arm.plan, recipe=recipe))])
    monkeypatch.setattr(specialization, "RESULTS", tmp_path)
    specialization.run("clusters", tmp_path / "run", workers=1)
    (result,) = (tmp_path / "run").glob("arms/*.json")
    written = result.stat().st_mtime_ns
    specialization.run("clusters", tmp_path / "run", workers=1)
    (row,) = specialization.read(tmp_path / "specialization" / "clusters.csv")
    assert (row["mixer"], row["seed"]) == (arm.mixer, str(arm.seed)) and result.stat().st_mtime_ns == written
    assert all(0 <= float(row[measure]) <= 1 for measure in specialization.MEASURES if row[measure])


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_every_stored_plan_can_be_run(path):
    study = planned(path)
    for plan in study.plans:
        if isinstance(plan.task, Text):  # of files that research/corpus.py writes; here, of the standard library
            plan = replace(plan, task=replace(plan.task, files=(), tokenizer=None))
        plan.check()
    text = isinstance(study.plans[0].task, Text)  # whose losses differ less between seeds than a recall does
    assert study.question.cost and len(study.plans[0].seed_numbers) >= (3 if text else 5)
    assert study.question.measure != "capacity" or all(plan.task.by_length(1) for plan in study.plans)


def test_taylor_finds_errors_that_fall_with_the_order(tmp_path, monkeypatch):
    for place in ("RESULTS", "DOCS"):
        monkeypatch.setattr(taylor, place, tmp_path)
    taylor.error(tokens=12, heads=2, dim=4)
    rows = list(csv.DictReader((tmp_path / "taylor_error.csv").read_text("utf-8").splitlines()))
    small = [float(row["by_norm"]) for row in rows if row["logits"] == "0.25"]
    assert len(small) == 11 and small == sorted(small, reverse=True) and (tmp_path / "taylor-error.png").stat().st_size


def test_taylor_study_names_existing_mixers(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"mixer {i} must exist " for i in range(200)))
    (plan,) = taylor.plan((str(text),), steps=3, seeds=1).plans
    plan.check()
    assert len(plan.arms()) == len(plan.mixers) > len(taylor.PANELS)


def test_a_table_of_rates_is_that_of_its_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(rates, "TRIED", tmp_path / "rates.csv")
    runs = []
    for lr, loss in ((0.01, 4.25), (0.001, 4.5)):
        runs.append(tmp_path / f"{lr:g}")
        settings = {"mixer": "gla", "lr": lr, "tokens": 4e6, "batch_tokens": 8192, "seed": 100}
        write(runs[-1] / "run.json", {"recipe": settings})
        points = [{"loss": 8.0}, {"train_runtime": 12.5}, {"final_loss": loss}]
        write(runs[-1] / "model" / "history.json", [{"step": 488} | point for point in points])
    rates.keep("laptop-1m", runs, "abc1234")
    assert rates.lines()[0].endswith("| lr 0.001 | lr 0.01 |")
    assert rates.lines()[2:] == ["| `laptop-1m` | `gla` | 4,000,000 | 8,192 | 4.500 | 4.250 |"]


def test_the_days_are_of_today_s_runs():
    kept = [(row["recipe"], row["settings"], row["mixer"]) for row in days.record.read(days.KEPT)]
    assert len(kept) == len(set(kept)) and set(kept) == {run for name in days.MACHINES for run in days.trained(name)}
    assert days.backbone("paper-softmax-gla") == "gla" and days.backbone("gla(competition=sigmoid)") == "gla"
    assert days.backbone("gla(decay.kind=none)") == "gla(decay.kind=none)"


def test_gates_over_heads_add_no_operations_to_a_plan():
    plain, gated = (days.planned("laptop-1m", "", mixer, "1xH100")["days"] for mixer in ("gla", "paper-softmax-gla"))
    assert plain == gated > 0


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data), "utf-8")
