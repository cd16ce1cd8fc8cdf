"""Every step of every experiment is a command that exists; published numbers are as read; ours are laid beside them."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
import typer
from scipy import stats as by_scipy
from typer.testing import CliRunner

from damage import change_digit
from headrace import InputError, zoo
from headrace.cli import app as cli
from headrace.data.tokenizer import byte_level
from headrace.files.results import write_result
from research.reproduce import __main__ as show
from research.reproduce import experiment, numbers
from tiny import build

COMMANDS = typer.main.get_command(cli.app).commands
WORD = "word_perplexity,none"
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


def wrote(folder: Path, results: dict) -> None:
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps({"results": results}))


def ours(name: str, scale: str, root: Path) -> list[numbers.Cell]:
    return numbers.cells(experiment.load(name), experiment.load(name).at(scale), root)


def test_reproduced_numbers_stand_beside_the_published(tmp_path):
    for seed, swde in enumerate((0.30, 0.34)):
        item = {"contains,none": swde, "contains_stderr,none": 0.01}
        wrote(tmp_path / "recall" / f"5m-gla-{seed}", {"swde": item, "squad_completion": item})
    found = {(c.row, c.column): c for c in ours("table-2", "laptop", tmp_path)}
    swde = found["GLA", "SWDE"]
    assert (
        swde.published == 22.41
        and swde.ours.value == pytest.approx(32)
        and swde.ours.reach == pytest.approx(2 * 12.7062, rel=1e-5)
    )
    assert found["GLA", "FDA"].ours is None and found["GLA", "Avg."].ours is None
    assert swde.difference is None and show.line(swde) == ("GLA", "SWDE", "22.41", "32 ± 25", "–", "–")
    assert "2, of other models, so no two are compared" in show.verdict(list(found.values()))
    same = replace(swde, comparable=True)  # were the model the paper's
    assert same.difference == pytest.approx(32 - 22.41) and same.within is True
    assert show.line(same) == ("GLA", "SWDE", "22.41", "32 ± 25", "+9.59", "yes")
    assert "1 of 1" in show.verdict([same])


def test_gains_pair_models_by_seed(tmp_path):
    """The seeds differ by far more than the two mixers: the differences are 1, 2 and 3 in each."""
    for seed, perplexity in enumerate((100.0, 200.0, 300.0)):
        for mixer, less in (("gla", 0), ("softmax-gla", seed + 1)):
            score = {"word_perplexity,none": perplexity - less}
            wrote(tmp_path / "wikitext" / f"1m-{mixer}-{seed}", {"wikitext": score})
    found = {c.row: c for c in ours("figure-2", "laptop", tmp_path) if c.ours}
    gain = found["gain, headrace's default, 1M with 4 heads"].ours
    assert gain.value == pytest.approx(2) and gain.reach == pytest.approx(4.302653 / 3**0.5)
    assert show.line(found["GLA, 1M with 4 heads"])[3] == "200 ± 248"


def test_a_gain_is_a_difference_of_two_models(tmp_path):
    for mixer, perplexity in (("gla", 40.0), ("softmax-gla", 39.0), ("paper-softmax-gla", 37.5)):
        wrote(tmp_path / "wikitext" / f"110m-{mixer}-0", {"wikitext": {"word_perplexity,none": perplexity}})
    found = {cell.row: cell for cell in ours("figure-2", "paper", tmp_path) if cell.ours}
    gains = (found[f"gain, {form}, 110M with 4 heads"] for form in ("published form", "headrace's default"))
    published, default = gains
    assert published.published == 2.37 and published.ours.value == 2.5 and published.within is None
    assert default.published is None and default.ours.value == 1.0 and default.difference is None


def test_scores_of_a_comparison_are_read(tmp_path):
    (tmp_path / "rnn-figure-4").mkdir()
    arms = [{"mixer": "softmax-rnn-norm", "scores": {"loss": loss}} for loss in (2.0, 3.0)]
    (tmp_path / "rnn-figure-4" / "results.json").write_text(json.dumps({"arms": arms}))
    found = ours("rnn-figure-4", "laptop", tmp_path)
    assert [cell.ours.value for cell in found if cell.ours] == [2.5]


def test_seeds_that_diverged_are_marked(tmp_path):
    """One of three in a comparison, and one of two runs whose last loss is not finite."""
    (tmp_path / "rnn-figure-4").mkdir()
    arms = [("softmax-rnn-norm", 2.0), ("softmax-rnn-norm", 3.0), ("softmax-rnn-norm", None), ("transformer", None)]
    scores = [{"mixer": mixer, "scores": {} if loss is None else {"loss": loss}} for mixer, loss in arms]
    (tmp_path / "rnn-figure-4" / "results.json").write_text(json.dumps({"arms": scores}))
    found = {cell.row: cell for cell in ours("rnn-figure-4", "laptop", tmp_path) if cell.ours}
    norm = replace(found["norm"], published=2.4, comparable=True)
    assert show.line(norm)[2:] == ("2.4", "2.5 ± 6.4 (2 of 3 seeds)", "+0.1", "–"), "no verdict on what is left"
    assert show.line(found["softmax"])[3] == "diverged"
    assert "reproduced numbers: 1." in show.verdict(list(found.values()))
    scale = experiment.load("figure-2").at("laptop")
    for seed, loss in enumerate((3.0, None)):
        at = {"mixer": "gla", "size": "1m", "seed": seed}
        folder = experiment.run_folder(scale, tmp_path, at) / "model"
        folder.mkdir(parents=True)
        (folder / "history.json").write_text(json.dumps([{"final_loss": 4.0}, {"final_loss": loss}]))
    runs = [
        numbers.logged(scale, {"history": "final_loss"}, {"mixer": "gla", "size": "1m", "seed": s}, tmp_path)
        for s in (0, 1)
    ]
    assert show.number(numbers.mean(runs)) == "3 (1 of 2 seeds)"
    assert show.number(numbers.mean(list(map(numbers.less, runs, runs[::-1])))) == "diverged"


def test_the_interval_of_an_evaluation_is_student_s_over_its_rows(tmp_path):
    folder = tmp_path / "recall" / "5m-gla-0"
    folder.mkdir(parents=True)
    results = {"results": {"swde": {"contains,none": 0.3, "contains_stderr,none": 0.1}}}
    for rows, reach in ((3, 100 * 0.1 * 4.302653), (0, None)):
        kept = results | ({"n-samples": {"swde": {"original": 9, "effective": rows}}} if rows else {})
        (folder / "results.json").write_text(json.dumps(kept))
        scale = experiment.tailored(experiment.load("table-2").at("laptop"), [], ["seed=0"])
        cells = numbers.cells(experiment.load("table-2"), scale, tmp_path)
        (swde,) = (cell.ours for cell in cells if (cell.row, cell.column) == ("GLA", "SWDE"))
        assert swde.reach == (reach and pytest.approx(reach))


def test_a_changed_digit_of_a_number_is_named(tmp_path):
    write_result(tmp_path / "wikitext" / "1m-gla-0" / "results.json", {"results": {"wikitext": {WORD: 40.5}}})
    write_result(tmp_path / "rnn-figure-4" / "results.json", {"arms": [{"mixer": "x", "scores": {"loss": 2.5}}]})
    for path in (*tmp_path.glob("*/*/results.json"), *tmp_path.glob("*/results.json")):
        change_digit(path)
    for name in ("figure-1", "rnn-figure-4"):
        with pytest.raises(InputError, match=r"results.json' is damaged: it has another SHA-256"):
            ours(name, "laptop", tmp_path)


@pytest.mark.slow(seconds=20)
@pytest.mark.filterwarnings("ignore::headrace.utils.errors.GateWarning")  # of the published read gate
def test_an_evaluation_is_a_step_and_its_number_is_found(tmp_path, run_command):
    """Prepared and evaluated as the laptop does; in place of training, two models at random."""
    pytest.importorskip("lm_eval")
    pages = "".join(f" = {title} = \n \n It is a {title} , and it is so . \n" for title in ("Sea", "Stone", "Jar"))
    (tmp_path / "wiki.test.raw").write_text(pages)
    root = tmp_path / "out"
    for mixer in ("gla", "paper-softmax-gla", "softmax-gla"):
        model = build(mixer, vocab_size=len(byte_level()), max_position_embeddings=32).float()
        for part in (model, byte_level()):
            part.save_pretrained(root / f"1m-{mixer}-0" / "model")
    scale = experiment.load("figure-1").at("laptop")
    wanted = experiment.tailored(scale, [], ["size=1m", "seed=0"])
    assert run_command(*experiment.commands(wanted, root)[-1][1:], "--data", tmp_path).code == 0
    found = [cell for cell in numbers.cells(experiment.load("figure-1"), wanted, root) if cell.ours]
    assert [(cell.row, cell.column) for cell in found] == [
        (f"{row}, 1M", column)
        for row in (
            "GLA", "Softmax GLA (published form)", "Softmax GLA (headrace's default)", "gain, published form",
            "gain, headrace's default",
        )
        for column in ("WikiText ppl", "bits per byte")
    ]  # fmt: skip
    gla, published, default, gain, _ = (cell.ours.value for cell in found if cell.column == "WikiText ppl")
    assert len({gla, published, default}) == 3 and min(gla, published, default) > 100
    assert gain == pytest.approx(gla - published)


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


def test_the_kept_rows_are_of_each_seed(tmp_path):
    """Two seeds of one mixer; what has no number yet has no row."""
    for seed, loss in ((0, 5.5), (2, 5.25)):
        folder = tmp_path / f"1m-gla-{seed}" / "model"
        folder.mkdir(parents=True)
        (folder / "history.json").write_text(f'[{{"train_runtime": 12.5}}, {{"final_loss": {loss}}}]')
    found = show.by_run("figure-2", "laptop", tmp_path)
    assert [(row["run"], row["metric"], row["value"], row["seconds"]) for row in found] == [
        ("1m-gla-0", "held-out loss", 5.5, 12.5), ("1m-gla-2", "held-out loss", 5.25, 12.5),
    ]  # fmt: skip
    assert "seed=2 --mixer gla" in found[1]["command"]


@pytest.mark.parametrize(
    ("text", "only", "comparable"), [([], [], True), ([__file__], [], False), ([], ["mixer=gla"], True)]
)
def test_models_of_another_text_are_not_compared_with_the_paper_s(text, only, comparable):
    assert experiment.tailored(experiment.load("table-2").at("paper"), text, only).comparable is comparable


# --- numbers beside numbers ------------------------------------------------------------------------------------------
def over(*values):
    return numbers.mean([numbers.DIVERGED if value is None else numbers.Number(value) for value in values])


GOLDEN = Path(__file__).parent / "reproductions.txt"
CELLS = [
    numbers.Cell("GLA", column, published, ours)
    for column, published, ours in (
        ("within", 10.0, over(10.1, 9.6, 10.9)), ("beyond", 20.0, over(10.1, 9.6, 10.9)),
        ("one run", 10.0, numbers.Number(1234.5)), ("missing", 10.0, None), ("neither", None, None),
        ("unpublished", None, numbers.Number(1.0, 0.25)), ("diverged once", 10.0, over(10.1, None, 9.6)),
        ("diverged", 10.0, over(None)), ("equal runs", 10.0, over(3.5, 3.5, 3.5)),
    )
]  # fmt: skip


def said():
    chosen = experiment.load("figure-1")
    for cells in (CELLS, CELLS[4:6], CELLS[3:6], [replace(cell, comparable=False) for cell in CELLS], CELLS[2:3]):
        yield from (*(f"| {' | '.join(line)} |" for line in (show.HEADER, *show.shown(cells))), show.verdict(cells), "")
    yield from show.notes(chosen, "laptop", chosen.at("laptop"))


def test_verdicts_say_what_the_golden_file_says():
    """`python research/tests/test_reproduce.py` writes it anew."""
    assert "\n".join(said()).rstrip() + "\n" == GOLDEN.read_text("utf-8")


def test_reproduced_numbers_are_read_where_the_steps_left_them(tmp_path, monkeypatch):
    for path, data in {
        "e/run/results.json": {
            "results": {x: {"acc,none": v, "acc_stderr,none": e} for x, v, e in (("a", 0.5, 0.03), ("b", 0.7, 0.04))},
            "n-samples": {x: {"effective": 30} for x in "ab"},
        },
        "run/model/history.json": [{"final_loss": 2.0}, {"final_loss": 1.5}, {"loss": 9.0}],
    }.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(json.dumps(data))
    monkeypatch.setattr(numbers, "run_folder", lambda scale, root, at: root / "run")
    scale = SimpleNamespace(axes={"size": ["340m", "80m"], "seed": [0]})
    read = lambda place, **at: numbers.mean(numbers.each(scale, place, {"size": "340m"} | at, tmp_path))  # noqa: E731
    mean = read({"eval": "e", "mean": ["a", "b"], "metric": "acc", "times": 100})
    assert (mean.value, mean.reach) == (pytest.approx(60), pytest.approx(100 * by_scipy.t.ppf(0.975, 29) * 0.05 / 2))
    assert read({"eval": "e", "mean": ["a", "c"], "metric": "acc"}) is None
    assert read({"eval": "e", "item": "b", "metric": "acc"}).value == 0.7
    assert read({"history": "final_loss"}).value == 1.5 and read({"history": "final_loss"}, seed=7) is None


def test_a_reproduced_number_has_an_interval_over_seeds_or_rows():
    of_eval = {"results": {"a": {"acc,none": 0.5, "acc_stderr,none": 0.1}}, "n-samples": {"a": {"effective": 8}}}
    assert numbers.score(of_eval, "a", "acc").reach == pytest.approx(0.1 * by_scipy.t.ppf(0.975, 7))
    mean = numbers.mean([numbers.Number(float(i)) for i in range(5)])
    assert (mean.value, mean.reach) == (2.0, pytest.approx(by_scipy.t.ppf(0.975, 4) * by_scipy.sem(range(5))))
    less = numbers.less(numbers.Number(3.0, 0.3), numbers.Number(1.0, 0.4))
    assert (less.value, less.reach) == (2.0, pytest.approx(0.5))
    assert numbers.less(numbers.Number(3.0, 0.3), numbers.Number(1.0)).reach is None


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(said()).rstrip() + "\n", "utf-8")
