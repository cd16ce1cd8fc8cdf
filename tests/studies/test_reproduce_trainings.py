"""Training runs of the experiments: the forms of competition, their data, their sizes, and what fits a machine."""

import itertools
from pathlib import Path

import pytest
import typer

from headrace import InputError, zoo
from headrace.cli import app as cli
from headrace.cli import understand
from headrace.studies.reproduce import execute, experiment, show, training
from headrace.training import machine, recipes
from headrace.training.model import count, counted, meta_model

OF_THE_PAPER = [name for name in experiment.names() if "2602.01744" in experiment.load(name).source]
BASES = ("retnet", "gla", "gated-deltanet")
EVERY = [(name, scale) for name in experiment.names() for scale in experiment.SCALES]


def steps(name, scale, *only, add=()):
    chosen = experiment.tailored(experiment.load(name).at(scale), [], list(only), list(add))
    return experiment.commands(chosen, Path("root"))


# --- the published form ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OF_THE_PAPER)
@pytest.mark.parametrize("scale", experiment.SCALES)
def test_both_forms_of_competition_run_beside_their_backbone(name, scale):
    mixers = set(experiment.load(name).at(scale).axes.get("mixer", []))
    competing = {base for base in BASES if {f"softmax-{base}", f"paper-softmax-{base}"} & mixers}
    assert all({base, f"softmax-{base}", f"paper-softmax-{base}"} <= mixers for base in competing)
    assert competing or name == "figure-3"
    if name == "figure-3":  # whose command adds the default
        (command,) = (part for step in steps(name, scale) for part in step if "retnet," in part)
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
    plan = experiment.tailored(experiment.load("figure-1").at("laptop"), [], [f"mixer={mixer}"], [])
    assert plan.axes["mixer"] == [chosen]


def test_only_refuses_other_specs():
    scale = experiment.load("figure-1").at("laptop")
    with pytest.raises(InputError, match="expected some of gla, paper-softmax-gla, softmax-gla"):
        experiment.tailored(scale, [], ["mixer=gla(heads.count=2)"], [])
    with pytest.raises(InputError, match="mixer 'glaa' is unknown"):
        experiment.tailored(scale, [], ["mixer=glaa"], [])


# --- data and sizes --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, scale", EVERY)
def test_every_preparation_stops_behind_the_tokens_of_its_trainings(name, scale):
    commands = steps(name, scale)
    prepared = {}
    for _, *arguments in (experiment.called(step) for step in commands if "prepare" in step):
        options = dict(itertools.pairwise(arguments))
        if "--task" not in options:
            prepared[options["--output"]] = float(options["--tokens"])
            sampled = "SlimPajama" in arguments[0] and "rnn" not in name and name != "niah-003"
            assert not sampled or options["--sample"] == "0.1"
    read = 0
    for step in commands:
        if (run := training.trained(step)) and (folder := step[step.index("--data") + 1]) in prepared:
            assert prepared[folder] >= run.recipe.tokens
            read += 1
    assert read or not prepared or any("--task" in step for step in commands)  # a text for its tokenizer alone


@pytest.mark.parametrize("name", ["table-2", "table-3", "table-4", "figure-4"])
@pytest.mark.filterwarnings("ignore::headrace.utils.errors.GateWarning")
def test_models_of_a_table_have_the_parameters_of_gla(name):
    """341.7M; within half of a percent."""
    runs = [run for step in steps(name, "paper") if (run := training.trained(step))]
    sizes = {run.recipe.mixer: count(meta_model(run.recipe))["tied"] for run in runs}
    assert len(sizes) == (3 if name == "figure-4" else 11)
    assert all(abs(size / 341.7e6 - 1) < 0.005 for size in sizes.values()), sizes


def test_settings_of_a_mixer_give_way_to_those_of_the_step():
    (own,) = (s for s in steps("figure-4", "paper", "mixer=retnet") if "train" in s)
    assert own.count("intermediate_size=1456") == 1
    (changed,) = (s for s in steps("figure-4", "paper", "mixer=retnet", add=["train intermediate_size=2048"])
                  if "train" in s)  # fmt: skip
    assert [word for word in changed if "intermediate_size" in word] == ["intermediate_size=2048"]
    (gla,) = (s for s in steps("table-2", "paper", "mixer=gla") if "train" in s)
    assert not any("intermediate_size" in word for word in gla)


# --- what fits -------------------------------------------------------------------------------------------------------
SMALL = ["headrace", "train", "laptop-1m", "batch_tokens=16384", "--mixer", "gla", "--data", "x=y", "--output", "z"]


@pytest.fixture
def device(monkeypatch):
    """Sets the memory of an H100 to that of a run with these rows per pass and recomputation, on so many devices."""

    def of(micro_batch, recompute=False, devices=1):
        needs = recipes.load("laptop-1m", {"micro_batch": micro_batch, "recompute": recompute, "mixer": "gla"})[0]
        memory = sum(machine.memory(needs, devices).values())
        monkeypatch.setitem(machine.DEVICES, "H100", machine.Device(memory, 1e15))

    return of


def fitted(text, *more):
    (step,), (fit,) = training.fitted([[*SMALL[:3], *more, *SMALL[3:]]], machine.parse(text))
    return step, fit


@pytest.mark.parametrize("rows", [4, 2, 1])
def test_training_has_the_most_rows_that_fit(device, rows):
    device(rows)
    step, fit = fitted("1xH100")
    assert step[:4] == ["headrace", "train", "laptop-1m", f"micro_batch={rows}"] and "recompute=true" not in step
    assert fit.plan["fits"] and fit.training.recipe.micro_batch == rows


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")  # of transformers
def test_training_recomputes_where_no_row_fits_and_is_refused_where_nothing_helps(device):
    device(2, recompute=True)
    step, fit = fitted("1xH100")
    assert {"micro_batch=2", "recompute=true"} < set(step) and fit.plan["fits"]
    training.refuse_unfitting([fit])
    (_, stated) = fitted("1xH100", "recompute=false")
    assert not stated.plan["fits"] and not stated.training.recipe.recompute
    with pytest.raises(InputError, match=r"laptop-1m with gla needs .* GiB of a H100, .*; expected another --machine"):
        training.refuse_unfitting([fit, stated])


def test_stated_rows_stay_and_devices_share_a_step_evenly(device):
    device(4, devices=8)
    step, fit = fitted("8xH100", "micro_batch=1")
    assert [word for word in step if "micro_batch" in word] == ["micro_batch=1"]
    assert step[:5] == ["torchrun", "--nproc-per-node", "8", "--no-python", "headrace"]
    assert fit.plan["devices"] == 8 and training.trained(step).recipe == fit.training.recipe
    five, fit = fitted("5xH100")  # of 32 rows
    assert five[2] == "4" and fit.plan["passes_per_step"] * fit.plan["rows_per_pass"] * 4 == 32


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")  # of transformers
def test_recomputation_costs_a_third_of_the_operations(device):
    device(4)
    plain, again = fitted("1xH100", "recompute=false"), fitted("1xH100", "recompute=true")
    assert again[1].plan["days"] == pytest.approx(4 / 3 * plain[1].plan["days"])


def test_counts_are_of_the_mixer_that_a_name_has_now(monkeypatch):
    recipe = recipes.load("laptop-1m", {"mixer": "gla"})[0]
    before = counted(recipe).parameters
    monkeypatch.setitem(zoo.LINEAR, "gla", zoo.get("gla(heads.expand_k=1)"))
    assert counted(recipe).parameters["body"] > before["body"]


def test_dry_runs_and_other_commands_are_no_trainings():
    assert not any(training.trained(step) for step in steps("table-5", "paper"))
    assert training.trained(SMALL).recipe.mixer == "gla" and training.trained(SMALL).stated == {"batch_tokens", "mixer"}


def test_machine_is_refused_where_no_run_is_for_a_gpu(tmp_path):
    with pytest.raises(InputError, match=r"--machine=1xH20 has no effect: no run is for a GPU; expected --scale paper"):
        understand.reproduce("figure-1", machine="1xH20", output=tmp_path)


@pytest.mark.slow
def test_long_rows_of_softmax_as_a_recurrent_network_fit_and_the_list_says_so(tmp_path, capsys):
    """36 rows of 4,096 tokens on six of eight H100; with eight rows in a pass one would need several hundred GiB."""
    only = ["mixer=softmax-rnn-norm", "recipe=rnn-300m-4k"]
    understand.reproduce("rnn-figure-3", scale="paper", only=only, output=tmp_path)
    said = capsys.readouterr().out
    (command,) = (line for line in said.splitlines() if "headrace train" in line)
    assert "--nproc-per-node 6 " in command and "micro_batch=1 " in command
    assert "1 training run: about" in said and "does not fit" not in said


@pytest.mark.slow(seconds=15)
def test_the_first_test_fits_one_gpu_and_half_a_day_of_an_h100():
    """And costs what is documented. Its recipes are counted once for all machines."""
    for text in ("1xH100", "1xH20"):
        _, fits = training.on_machine(steps("first-test", "paper"), "1xH100", text)
        assert len(fits) == 8 and all(fit.plan["fits"] for fit in fits)
        arms = {(fit.training.name, fit.training.recipe.mixer) for fit in fits}
        assert {size for size, _ in arms} == {"paper-110m", "paper-110m-h16"} and len(arms) == 8
        assert (sum(fit.plan["days"] for fit in fits) < 0.5) == (text == "1xH100")
    assert_documented("first-test")


# --- notes -----------------------------------------------------------------------------------------------------------
def said(name, scale="laptop", text=(), only=(), add=()):
    chosen = experiment.load(name)
    plan = experiment.tailored(chosen.at(scale), list(text), list(only), list(add))
    return " ".join(show.notes(chosen, scale, plan, experiment.commands(plan, Path("root")))), plan


def test_notes_state_the_settings_of_the_run():
    assert "models of 1.3M and 5.3M parameters after 0.4M tokens" in said("figure-1")[0]
    changed, _ = said("figure-1", only=["size=1m"], add=["train tokens=3e6"])
    assert "models of 1.3M parameters after 3M tokens" in changed and "5.3M" not in changed
    assert "Settings of figure-1 were changed: --only size=1m; --add 'train tokens=3e6'." in changed
    assert "stories" in changed and "stories" not in said("figure-1", text=[__file__])[0]


def test_notes_on_a_changed_command_are_left_out():
    assert "50 prompts" in said("table-3")[0] and "8,000 prompts" in said("table-3")[0]
    changed, _ = said("table-3", add=["eval --limit 20", "train length=384"])
    assert "50 prompts" not in changed and "8,000 prompts" not in changed
    assert "MLP of 1456" in said("table-3", "paper")[0]
    assert "1456" not in said("table-3", "paper", add=["train intermediate_size=2048"])[0]


@pytest.mark.parametrize(
    "options, comparable",
    [({}, True), ({"add": ["eval --limit 20"]}, True), ({"add": ["train tokens=1e9"]}, False),
     ({"text": [__file__]}, False), ({"only": ["mixer=gla"]}, True)],
)  # fmt: skip
def test_other_models_are_not_compared_with_the_paper_s(options, comparable):
    assert said("table-2", "paper", **options)[1].comparable is comparable


def test_numbers_of_notes_are_in_two_digits():
    assert training.listed({1_290_000, 5_300_000}) == "1.3M and 5.3M" and training.listed({14_745_600_000}) == "15B"
    assert training.listed({341_700_000, 170_400_000, 81_500_000}) == "82M to 342M"
    assert training.listed({341_700_000, 341_500_000}) == "342M"


def test_every_device_is_named_by_its_driver():
    assert machine.peak("NVIDIA H20") == 148e12 and machine.DEVICES["H20"].memory == 96e9
    assert machine.parse("8xh20") == (8, "H20")


def test_other_needles_are_asked_for_on_local_essays(tmp_path):
    """As the note of table 3 says: the options take the place of the step's, and nothing is downloaded."""
    add = ["eval --suite needle --lengths 2048", f"eval --data {tmp_path}"]
    plan = experiment.tailored(experiment.load("table-3").at("laptop"), [__file__], ["seed=0"], add)
    commands = experiment.commands(plan, tmp_path)
    arguments = experiment.called(commands[-1])[1:]
    found = typer.main.get_command(cli.app).commands["eval"].make_context("eval", arguments).params
    assert (found["suite"], found["lengths"], found["data"]) == ("needle", "2048", tmp_path)
    assert execute.downloads(commands) == "Nothing is downloaded."


# --- costs -----------------------------------------------------------------------------------------------------------
def fake_plan(recipe, used):
    """Rows take a byte each, of a device of five; a day for each 10^9 tokens."""
    fits = {"fits": recipe.micro_batch <= 5, "bytes": {"all": recipe.micro_batch * 2**30}, "devices": used.devices}
    return fits | {"rows_per_pass": recipe.micro_batch, "days": recipe.tokens / 1e9, "device": "H100"}


def test_costs_of_an_experiment_are_sums_and_peaks_over_its_trainings(monkeypatch):
    monkeypatch.setattr(machine, "plan", fake_plan)
    assert show.costs("figure-4", "8xH100") == ("3", "45B", "4", "0", "4", "yes", "45")
    assert show.costs("figure-3", "8xH100") == ()
    monkeypatch.setattr(machine, "plan", lambda *args: fake_plan(*args) | {"fits": False})
    assert show.costs("figure-4", "8xH100") == ("3", "45B", "1", "3", "1", "0 of 3", "45")


def test_a_machine_without_an_experiment_prints_the_costs_of_all(monkeypatch, capsys):
    monkeypatch.setattr(show, "costs", lambda name, text: () if name == "figure-3" else tuple("1234567"))
    understand.reproduce(machine="8xH20")
    said = capsys.readouterr().out
    assert (
        "Training at paper scale on 8xH20" in " ".join(said.split()) and "table-5" in said and " figure-3" not in said
    )


@pytest.mark.slow
def test_documented_costs_are_current():
    assert_documented("figure-4")


def assert_documented(name):
    cells = [show.costs(name, text) for text in ("8xH100", "1xH100", "8xH20")]
    runs, tokens, rows, again, peak, fits, days = cells[0]
    line = f"| {name} | {runs} | {tokens} | {rows} | {again} | {peak} | {days} | {cells[1][-1]} | {cells[2][-1]} |"
    assert fits == "yes" and line in (Path(__file__).parents[2] / "docs" / "appendix.md").read_text("utf-8")
