"""No result is taken for one that other code, or another input, would give."""

import json
import shutil
from dataclasses import asdict
from functools import partial, reduce

import pytest

from headrace.benchmarking import plan
from headrace.benchmarking.models import Shape
from headrace.comparison.defaults import DEMO
from headrace.files import provenance
from headrace.files.provenance import MADE_BY, claim, defaults
from headrace.training import run
from headrace.utils.errors import InputError, VersionWarning
from trained import recipe, train

OTHER = "0" * 12


def as_of_other_code(folder):
    """Rewrites the record of what made a folder's results."""
    path = folder / MADE_BY
    path.write_text(path.read_text("utf-8").replace(provenance.source(), OTHER), "utf-8")


def test_edited_package_is_another_version(tmp_path, monkeypatch):
    (tmp_path / "headrace" / "recipes").mkdir(parents=True)
    recipe = tmp_path / "headrace" / "recipes" / "small.yaml"
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "headrace" / "provenance.py"))
    digests = []
    for text in ("lr: 1", "lr: 2", "lr: 1"):
        recipe.write_text(text)
        digests.append(provenance.source.__wrapped__())
    assert digests[0] == digests[2] != digests[1]


def test_results_of_other_code_and_without_version_are_marked(tmp_path):
    for _ in range(2):
        claim(tmp_path, {"a": 1})
    now = provenance.source()
    as_of_other_code(tmp_path)
    sentence = rf"{MADE_BY}'.* made by .*source {OTHER}.*now runs .*source {now}"
    assert not provenance.sentence(tmp_path)
    with pytest.warns(VersionWarning, match=sentence):
        claim(tmp_path, {"a": 1})
    claim(tmp_path, {"a": 1})  # both are recorded: no second warning, which would be an error here
    assert now in provenance.sentence(tmp_path) and OTHER in provenance.sentence(tmp_path)
    (tmp_path / MADE_BY).unlink()
    with pytest.warns(VersionWarning, match="made by headrace of an unknown version"):
        claim(tmp_path, {"a": 1})


def test_empty_claimed_folder_can_be_reused_by_other_code(tmp_path):
    provenance.record_versions(tmp_path, True)
    (tmp_path / ".plan.json.123").touch()
    as_of_other_code(tmp_path)
    claim(tmp_path, {"a": 1})
    assert OTHER not in (tmp_path / MADE_BY).read_text("utf-8") and not provenance.sentence(tmp_path)


def test_measurements_of_two_machines_are_not_mixed(tmp_path, monkeypatch):
    for processor in ("x", "y"):
        monkeypatch.setattr(plan, "environment", lambda processor=processor: {"processor": processor})
        claimed = plan.BenchPlan(("gla",), Shape()).claim()
        if processor == "x":
            claim(tmp_path, claimed.plan)
    with pytest.raises(InputError, match='machine is "x" there and "y" here'):
        claim(tmp_path, claimed.plan)


PLANS = {  # of a command: what claims a folder for it
    "train": lambda data: lambda folder: run.begin(folder, recipe(lr=0.5)[0], data),
    "compare": lambda data: partial(claim, plan=DEMO.to_json(), optional=DEMO.optional()),
    "bench": lambda data: partial(claim, plan=asdict(Shape()), optional=[*defaults(Shape())]),
}  # fmt: skip


def places(plan, at=()):
    """The places of all fields of a plan's JSON."""
    parts = plan.items() if isinstance(plan, dict) else enumerate(plan) if isinstance(plan, list) else ()
    for name, part in parts:
        yield from [(*at, name)] * isinstance(plan, dict)
        yield from places(part, (*at, name))


@pytest.mark.parametrize("command", PLANS)
def test_plan_without_a_newer_field_has_its_default(command, data, tmp_path):
    begin, accepted = PLANS[command](data), set()
    begin(tmp_path)
    (file,) = {path.name for path in tmp_path.glob("*.json")} - {MADE_BY}
    text = (tmp_path / file).read_text("utf-8")
    for place in places(json.loads(text)):
        older = json.loads(text)
        del reduce(lambda part, name: part[name], place[:-1], older)[place[-1]]
        (tmp_path / file).write_text(json.dumps(older))
        try:
            begin(tmp_path)
            accepted.add(place)
        except InputError as error:
            assert f"holds another run ({place[-1]} is missing there and" in str(error)
    expected, refused = {
        "train": ({("recipe", "gate_std"), ("recipe", "separate_documents")}, {("recipe", "lr"), ("data", "length")}),
        "compare": (
            {
                ("plans", 0, *field)
                for field in (("recipe", "eps"), ("tuning",), ("specs", "linear-attention", "heads", "count"))
            },
            {("plans", 0, "mixers"), ("plans", 0, "task"), ("name",)},
        ),
        "bench": ({("layers",)}, set()),
    }[command]
    assert expected <= accepted and not refused & accepted


def test_run_of_other_code_is_marked(data, tmp_path):
    train(data, tmp_path / "run", tokens=128 * 5)
    as_of_other_code(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    with pytest.warns(VersionWarning, match=f"made by .*source {OTHER}"):
        train(data, tmp_path / "run", tokens=128 * 5)
    assert OTHER in (tmp_path / "run" / "model" / "README.md").read_text("utf-8")


def test_hub_fingerprint_is_of_its_commit(tmp_path, monkeypatch):
    """Of a folder, of its contents: tests/evaluation/test_evaluate.py."""
    import huggingface_hub.constants as hub

    from headrace.evaluation import checkpoint

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    digests = []
    for commit in ("a" * 40, "b" * 40):
        repository = tmp_path / "models--some--model"
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        digests.append(checkpoint.fingerprint("some/model"))
    assert digests[0] != digests[1]
