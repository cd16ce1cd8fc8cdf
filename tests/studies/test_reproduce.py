"""Every step of every experiment is a command that exists; published numbers are as read; ours are laid beside them."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import typer

from damage import change_digit
from headrace import InputError
from headrace.cli import app as cli
from headrace.cli import understand
from headrace.data.tokenizer import byte_level
from headrace.studies.reproduce import execute, experiment, numbers, show
from headrace.training.results import write_result
from tiny import build

COMMANDS = typer.main.get_command(cli.app).commands
WORD = "word_perplexity,none"
EVERY = [(name, scale) for name in experiment.names() for scale in experiment.SCALES]


@pytest.mark.parametrize("name, scale", EVERY)
def test_every_step_is_a_command_that_exists(name, scale, tmp_path):
    steps = experiment.commands(experiment.load(name).at(scale), tmp_path)
    assert steps and len({json.dumps(step) for step in steps}) == len(steps)
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
    scale = experiment.tailored(experiment.load("figure-2").at("laptop"), ["a.txt", "b.txt"], [], [])
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
        scale = experiment.tailored(experiment.load("table-2").at("laptop"), [], ["seed=0"], [])
        cells = numbers.cells(experiment.load("table-2"), scale, tmp_path)
        (swde,) = (cell.ours for cell in cells if (cell.row, cell.column) == ("GLA", "SWDE"))
        assert swde.reach == (reach and pytest.approx(reach))


def test_finished_steps_are_skipped_and_failures_named(tmp_path):
    count = tmp_path / "count"
    step = [sys.executable, "-c", f"open({str(count)!r}, 'a').write('x')"]
    said = []
    for _ in range(2):
        execute.execute([step], tmp_path, said.append)
    assert count.read_text("utf-8") == "x" and said[1].endswith("already finished")
    with pytest.raises(InputError, match="step 2 ended with exit status 3"):
        execute.execute([step, [sys.executable, "-c", "raise SystemExit(3)"]], tmp_path, said.append)
    with pytest.raises(InputError, match="no-such-program is not installed"):
        execute.execute([["no-such-program"]], tmp_path, said.append)


def make(command, listen):
    """In place of `headrace prepare`: makes a folder atomically, unless it exists."""
    output = Path(command[-1])
    if output.exists():
        return 2, None
    output.mkdir(parents=True)
    return 0, None


def make_and_be_killed(command, listen):
    """Killed between the end of a step and its record."""
    make(command, listen)
    raise KeyboardInterrupt


@pytest.fixture
def step_cut_off(tmp_path, monkeypatch):
    """A step that made its folder and was killed before it was recorded as finished."""
    (tmp_path / "a.txt").write_text("some words")
    step = ["headrace", "prepare", str(tmp_path / "a.txt"), "--output", str(tmp_path / "root" / "data")]
    monkeypatch.setattr(execute, "run", make_and_be_killed)
    with pytest.raises(KeyboardInterrupt):
        execute.execute([step], tmp_path / "root", print)
    monkeypatch.setattr(execute, "run", make)
    return step


def test_kill_between_a_step_and_its_record_loses_nothing(step_cut_off, tmp_path):
    said = []
    for _ in range(2):
        execute.execute([step_cut_off], tmp_path / "root", said.append)
        assert said[-1].endswith("already finished")
    assert [path.suffix for path in (tmp_path / "root" / "done").iterdir()] == [".json"]


def test_folder_from_another_text_is_not_reused(step_cut_off, tmp_path):
    (tmp_path / "a.txt").write_text("other words")
    for _ in range(2):
        with pytest.raises(InputError, match="step 1 ended with exit status 2"):
            execute.execute([step_cut_off], tmp_path / "root", print)


def test_folder_that_existed_before_is_not_reused(step_cut_off, tmp_path):
    step = [*step_cut_off[:-1], str(tmp_path / "root" / "other")]
    (tmp_path / "root" / "other").mkdir()
    for _ in range(2):
        with pytest.raises(InputError, match="step 1 ended with exit status 2"):
            execute.execute([step], tmp_path / "root", print)


def test_a_changed_digit_of_a_number_is_named(tmp_path):
    """Of the scores that eval and compare wrote, and of the record of a finished step."""
    write_result(tmp_path / "wikitext" / "1m-gla-0" / "results.json", {"results": {"wikitext": {WORD: 40.5}}})
    write_result(tmp_path / "rnn-figure-4" / "results.json", {"arms": [{"mixer": "x", "scores": {"loss": 2.5}}]})
    execute.execute([[sys.executable, "-c", ""]], tmp_path, print)
    for path in (*tmp_path.glob("*/*/results.json"), *tmp_path.glob("*/results.json"), *tmp_path.glob("done/*.json")):
        change_digit(path)
    for name in ("figure-1", "rnn-figure-4"):
        with pytest.raises(InputError, match=r"results.json' is damaged: it has another SHA-256"):
            ours(name, "laptop", tmp_path)
    with pytest.raises(InputError, match="json' is damaged: it has another SHA-256"):
        execute.execute([[sys.executable, "-c", ""]], tmp_path, print)


@pytest.mark.slow(seconds=30)
def test_a_table_is_made_from_end_to_end(tmp_path, capsys):
    understand.reproduce("table-5", run=True, only=["mixer=gla", "size=80m,340m"], output=tmp_path)
    assert "341.7" in capsys.readouterr().out
    assert (
        "30.8" not in (page := (tmp_path / "table-5.html").read_text("utf-8")) and "no single way of counting" in page
    )


MISTAKES = {
    "the nearest names are table-": {"name": "tabel-2"},
    "--scale='cluster'; expected paper or laptop": {"scale": "cluster"},
    "--only heads=4: there is no axis 'heads'; expected mixer, size, seed": {"only": ["heads=4"]},
    "--only seed=7: expected some of 0, 1": {"only": ["seed=7"]},
    "--only mixer=: expected some of gla": {"only": ["mixer="]},
    "'seed' is not of the form": {"only": ["seed"]},
    "--add 'bench --rounds 1' fits no step; expected the first word to be eval or prepare or train": {
        "add": ["bench --rounds 1"]
    },
    "cannot be split into words": {"add": ["train 'x"]},
    "--text 'a.txt' is not used: no step reads a text": {"name": "figure-3", "text": ["a.txt"]},
    "'no-such.txt' is not a file": {"run": True, "text": ["no-such.txt"]},
    "--data='no-such'; expected a folder": {"run": True, "text": [__file__], "data": Path("no-such")},
}


@pytest.mark.parametrize("said", MISTAKES)
def test_user_errors_are_named(said, tmp_path):
    with pytest.raises(InputError, match=re.escape(said)):
        understand.reproduce(**{"name": "figure-1", "output": tmp_path} | MISTAKES[said])
    assert not list(tmp_path.iterdir())


def test_one_step_runs_with_other_arguments(tmp_path):
    scale = experiment.load("figure-1").at("laptop")
    tailored = experiment.tailored(scale, [], ["mixer=gla", "seed=0"], ["eval --data 'a {b}'", "train tokens=1e6"])
    prepare, *train, evaluate = experiment.commands(tailored, tmp_path)
    assert "tokens=1e6" not in prepare and [step[-1] for step in train] == ["tokens=1e6"] * 2
    assert not any("tokens=4e5" in step for step in train) and all("batch_tokens=2048" in step for step in train)
    assert evaluate[-2:] == ["--data", "a {b}"] and sum("model" in part for part in evaluate) == 2


def test_downloads_are_announced(tmp_path):
    steps = experiment.commands(experiment.load("figure-1").at("laptop"), tmp_path)
    assert "roneneldan/TinyStories, the rows of wikitext" in execute.downloads(steps)
    scale = experiment.tailored(experiment.load("figure-1").at("laptop"), [__file__], [], [f"eval --data {tmp_path}"])
    assert execute.downloads(experiment.commands(scale, tmp_path)) == "Nothing is downloaded."
    needle = experiment.tailored(experiment.load("table-3").at("laptop"), [__file__], [], [])
    assert execute.downloads(experiment.commands(needle, tmp_path)) == "Nothing is downloaded."


@pytest.mark.slow(seconds=20)
@pytest.mark.filterwarnings("ignore::headrace.utils.errors.GateWarning")  # of the published read gate
def test_an_evaluation_is_a_step_and_its_number_is_found(tmp_path, capsys):
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
    wanted = experiment.tailored(scale, [], ["size=1m", "seed=0"], [f"eval --data {tmp_path}"])
    evaluation = experiment.commands(wanted, root)[-1]
    execute.execute([evaluation], root, print)
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
    execute.execute([evaluation], root, print)
    assert "already finished" in capsys.readouterr().out
