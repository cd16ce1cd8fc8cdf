"""Every step of every experiment is a command that exists, and published numbers are as read."""

import json
import os
import subprocess
from pathlib import Path
from statistics import fmean

import pytest
import typer
from typer.testing import CliRunner

from headrace import InputError, zoo
from headrace.cli import app as cli
from research.reproduce import __main__ as show
from research.reproduce import experiment

COMMANDS = typer.main.get_command(cli.app).commands
EVERY = [(name, scale) for name in experiment.names() for scale in experiment.SCALES]


@pytest.mark.parametrize("name, scale", EVERY)
def test_every_step_is_a_command_that_exists(name, scale, tmp_path):
    steps = experiment.commands(experiment.load(name).at(scale), tmp_path)
    assert bool(steps) == (name != "table-5") and len({json.dumps(step) for step in steps}) == len(steps)
    for step in steps:
        assert step[0] == "headrace" or scale == "paper"
        command, *arguments = step[step.index("headrace") + 1 :]
        context = COMMANDS[command].make_context(command, arguments)
        assert not any("{" in str(value) for value in context.params.values())


@pytest.mark.parametrize("name", experiment.names())
def test_every_row_is_a_trained_model_with_all_columns(name):
    chosen = experiment.load(name)
    for row in chosen.rows:
        scales = [scale for scale in chosen.scales.values() if row.at.keys() <= scale.axes.keys()]
        assert any(all(value in scale.axes[key] for key, value in row.at.items()) for scale in scales), row
        assert row.published is None or len(row.published) == len(chosen.columns)
    assert chosen.title and chosen.source and (not chosen.columns or chosen.rows)


@pytest.mark.parametrize("name, columns", [("table-2", slice(0, 3)), ("table-4", slice(2, 8))])
def test_published_averages_are_of_published_numbers(name, columns):
    for row in (row for row in experiment.load(name).rows if row.published):
        assert fmean(row.published[columns]) == pytest.approx(row.published[-1], abs=0.0051)


def test_steps_are_repeated_over_the_axes_that_they_name(tmp_path):
    scale = experiment.tailored(experiment.load("figure-2").at("laptop"), ["a.txt", "b.txt"], [])
    steps = experiment.commands(scale, tmp_path)
    assert steps[0][:4] == ["headrace", "prepare", "a.txt", "b.txt"]
    assert len(steps) == 1 + 3 * 2 * 3 + 1 and sum(part.endswith("/model") for part in steps[-1]) == 18
    assert "laptop-1m-h16" in steps[-2] and str(tmp_path / "1m-h16-softmax-gla-2") in steps[-2]


@pytest.mark.parametrize("name, scale", EVERY)
def test_every_run_has_a_folder_of_its_own(name, scale, tmp_path):
    chosen = experiment.load(name).at(scale)
    if chosen.run:
        used = {key: values for key, values in chosen.axes.items() if f"{{{key}}}" in chosen.run}
        folders = [str(experiment.run_folder(chosen, tmp_path, at)).lower() for at in experiment.combinations(used)]
        assert len(set(folders)) == len(folders)


def trainings(name: str, scale: str, root: Path) -> set[str]:
    return {json.dumps(s) for s in experiment.commands(experiment.load(name).at(scale), root) if "train" in s}


def test_tables_share_their_training(tmp_path):
    train = [trainings(name, "paper", tmp_path) for name in ("table-2", "table-3", "table-4", "figure-1")]
    assert train[0] == train[1] == train[2] and len(train[0] & train[3]) == 3  # GLA and two Softmax GLA of 340M


def test_experiments_share_their_training_at_laptop_scale(tmp_path):
    """Figure 2's models with 4 heads are figure 1's small ones, and table 4's GLA of two seeds its large ones."""
    first, second, fourth = (trainings(name, "laptop", tmp_path) for name in ("figure-1", "figure-2", "table-4"))
    assert len(first) == len(second) == 18 and len(first & second) == 9 and len(first & fourth) == 6
    assert not any("h16" in step for step in first & second)


OF_THE_PAPER = [name for name in experiment.names() if "2602.01744" in experiment.load(name).source]
BASES = ("retnet", "gla", "gated-deltanet")


# --- the published form ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OF_THE_PAPER)
@pytest.mark.parametrize("scale", experiment.SCALES)
def test_both_forms_of_competition_run_beside_their_backbone(name, scale):
    mixers = set(experiment.load(name).at(scale).axes.get("mixer", []))
    competing = {base for base in BASES if {f"softmax-{base}", f"paper-softmax-{base}"} & mixers}
    assert all({base, f"softmax-{base}", f"paper-softmax-{base}"} <= mixers for base in competing)
    assert competing or name == "figure-3"
    if name == "figure-3":  # whose command adds the default
        (command,) = (
            part
            for step in experiment.commands(experiment.load(name).at(scale), Path("root"))
            for part in step
            if "retnet," in part
        )
        assert {*BASES, *(f"paper-softmax-{base}" for base in BASES)} < set(command.split(","))


@pytest.mark.parametrize("name", OF_THE_PAPER)
def test_published_numbers_belong_to_the_published_form(name):
    chosen = experiment.load(name)
    assert any("Published form: equations 4-16" in note and "Headrace's default" in note for note in chosen.notes)
    for row in chosen.rows:
        mixers = {row.at["mixer"], *([row.minus["mixer"]] if row.minus else [])}
        specs = [zoo.get(mixer) for mixer in mixers]
        published = all(getattr(spec, "competition", None) in (None, zoo.PUBLISHED["paper-softmax-gla"].competition)
                        for spec in specs)  # fmt: skip
        assert row.published is None or published, row
        if any(mixer.startswith("paper-") for mixer in mixers):
            assert "published form" in row.name or "as printed" in row.name
        if any(mixer.startswith("softmax-") and "(" not in mixer for mixer in mixers):
            assert "headrace's default" in row.name


@pytest.mark.parametrize(
    "mixer, chosen",
    [
        ("softmax-gla(competition=paper)", "paper-softmax-gla"), ("gla(competition=default)", "softmax-gla"),
        ("paper-softmax-gla(competition=none)", "gla"), ("paper-softmax-gla", "paper-softmax-gla"),
    ],
)  # fmt: skip
def test_only_compares_what_expressions_mean(mixer, chosen):
    plan = experiment.tailored(experiment.load("figure-1").at("laptop"), [], [f"mixer={mixer}"])
    assert plan.axes["mixer"] == [chosen]


def test_only_refuses_other_specs():
    scale = experiment.load("figure-1").at("laptop")
    with pytest.raises(InputError, match="expected some of gla, paper-softmax-gla, softmax-gla"):
        experiment.tailored(scale, [], ["mixer=gla(heads.count=2)"])
    with pytest.raises(InputError, match="mixer 'glaa' is unknown"):
        experiment.tailored(scale, [], ["mixer=glaa"])


# --- the program -----------------------------------------------------------------------------------------------------
def called(*words):
    return CliRunner().invoke(show.app, list(map(str, words)))


@pytest.mark.skipif(os.name != "posix", reason="a shell script")
def test_a_script_goes_on_where_it_ended(tmp_path):
    """Of a preparation, whose folder must not be there, and a training, which continues by itself."""
    fake = tmp_path / "headrace"
    fake.write_text('#!/bin/sh\necho "$1" >> calls\n[ "$1" != prepare ] || mkdir -p out/data\n[ ! -e stop ]\n')
    fake.chmod(0o755)
    text = called("script", "figure-1", "--root", "out", "--only", "mixer=gla", "--only", "seed=0", "--only", "size=1m")
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    for _ in range(2):
        done = subprocess.run(["sh"], input=text.stdout, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0
    assert (tmp_path / "calls").read_text().split() == ["prepare", "train", "eval", "train", "eval"]
    (tmp_path / "stop").touch()
    assert subprocess.run(["sh"], input=text.stdout, text=True, cwd=tmp_path, env=environment).returncode
    assert (tmp_path / "calls").read_text().split()[5:] == ["train"], "nothing follows a step that fails"


@pytest.mark.filterwarnings("ignore::headrace.utils.errors.GateWarning")  # of the published read gate
def test_a_table_of_parameters_is_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    done = called("show", "table-5", "--root", tmp_path, "--only", "mixer=gla", "--only", "size=80m,340m")
    assert "341.7" in done.output and "30.8" not in done.output and "no single way of counting" in done.output


MISTAKES = {
    "the nearest names are table-": ["script", "tabel-2"],
    "--scale='cluster'; expected paper or laptop": ["script", "figure-1", "--scale", "cluster"],
    "--only heads=4: there is no axis 'heads'; expected mixer, size, seed": ["show", "figure-1", "--only", "heads=4"],
    "--only seed=7: expected some of 0, 1": ["script", "figure-1", "--only", "seed=7"],
    "--only mixer=: expected some of gla": ["script", "figure-1", "--only", "mixer="],
    "'seed' is not of the form": ["script", "figure-1", "--only", "seed"],
    "--text 'a.txt' is not used: no step reads a text": ["script", "figure-3", "--text", "a.txt"],
    "NAME='rnn-figure-4' trains no model at --scale='laptop'": ["keep", "rnn-figure-4", "--commit", "abc1234"],
}


@pytest.mark.parametrize("said", MISTAKES)
def test_user_errors_are_named(said):
    error = called(*MISTAKES[said]).exception
    assert isinstance(error, InputError) and said in str(error)


def test_experiments_are_listed():
    assert all(name in called().output for name in experiment.names())


@pytest.mark.parametrize(
    ("text", "only", "comparable"), [([], [], True), ([__file__], [], False), ([], ["mixer=gla"], True)]
)
def test_models_of_another_text_are_not_compared_with_the_paper_s(text, only, comparable):
    assert experiment.tailored(experiment.load("table-2").at("paper"), text, only).comparable is comparable
