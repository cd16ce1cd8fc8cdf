"""Reproduced numbers are read where the steps left them, and laid beside the published."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from scipy import stats as by_scipy

from damage import change_digit
from headrace import InputError
from headrace.data.tokenizer import byte_level
from headrace.files.results import write_result
from research.reproduce import __main__ as show
from research.reproduce import experiment, numbers
from tiny import build

WORD = "word_perplexity,none"


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
    """`python research/tests/test_reproduced_numbers.py` writes it anew."""
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
