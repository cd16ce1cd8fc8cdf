"""Every point of a plan is measured once, whatever ends a run; the folder refuses another plan; nothing is dropped."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from http.client import BadStatusLine
from pathlib import Path
from ssl import SSLCertVerificationError
from types import SimpleNamespace
from urllib.error import HTTPError, URLError

import psutil
import pytest
import torch

import fresh
from damage import change_digit
from groups import begin, begun_by, forked, wait_for
from headrace.files import engine, environment
from headrace.files.engine import Claim, Point, run
from headrace.files.hub import ask_hub, check_config, hub_answers, is_on_the_hub
from headrace.files.processes import interrupts_later, locked
from headrace.files.results import NOT_FINITE
from headrace.utils.errors import InputError, VersionWarning

PLAN = Claim({"squares of": [1, 2, 3]})
PATIENCE = 600  # seconds, for a machine that does much else


def points(*values, **more):
    return [Point(f"square of {value}", Path("points", f"{value}.json"), value, **more) for value in values]


def square(value, worker):
    worker.report("at work")
    return {"value": value, "square": value**2, "process": os.getpid(), "device": worker.device}


def squares(rows):
    return [row["square"] for row in rows]


def never(value, worker):
    raise AssertionError(f"{value} is measured again")


# --- once ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("devices", [(), ("cpu", "cpu")])
def test_every_point_is_measured_once_and_rows_come_in_the_order_of_points(tmp_path, devices):
    assert squares(run(tmp_path, PLAN, points(3, 1, 2), square, workers=devices)) == [9, 1, 4]
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("points/*")}
    assert squares(run(tmp_path, PLAN, points(1, 2, 3), never, workers=devices)) == [1, 4, 9]
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.glob("points/*")}
    assert squares(run(tmp_path, PLAN, points(3, 4), square, workers=devices)) == [9, 16], "more points are added"


def test_a_row_has_its_environment(tmp_path):
    (row,) = run(tmp_path, PLAN, points(2), square)
    assert row["environment"].keys() >= {"headrace", "commit", "source", "torch", "python", "processor", "device"}
    stored = json.loads((tmp_path / "points" / "2.json").read_text("utf-8"))
    assert stored.pop("sha256") and stored == row and "headrace" in (tmp_path / "made-by.json").read_text()


def with_another_number_of_threads(value, worker):
    torch.set_num_threads(torch.get_num_threads() + 1)
    return square(value, worker)


def test_a_row_has_the_threads_with_which_its_measurement_began(tmp_path):
    before = torch.get_num_threads()
    try:
        (row,) = run(tmp_path, PLAN, points(2), with_another_number_of_threads)
    finally:
        torch.set_num_threads(before)
    assert row["environment"]["threads_per_arm"] == before


def test_git_may_print_what_the_locale_cannot_decode(tmp_path, monkeypatch):
    """As the name of a file with core.quotePath=false."""
    (tmp_path / "git").write_text("#!/bin/sh\nprintf '\\377'\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert environment.git("status") == "\ufffd"


def test_progress_is_told_point_by_point(tmp_path):
    said, some = [], points(1, 2)
    run(tmp_path, PLAN, some[:1], square)
    run(tmp_path, PLAN, some, square, engine.lines(said.append, some))
    assert said == [
        "1 of 2: square of 1: already finished", "2 of 2: square of 2", "2 of 2: square of 2: at work",
    ]  # fmt: skip


def test_stale_result_is_measured_again(tmp_path):
    run(tmp_path, PLAN, points(1, 2), square)
    again = [points(1, fingerprint="changed")[0], *points(2)]
    seen = []
    run(tmp_path, PLAN, again, square, lambda point, news: seen.append((point.value, type(news))))
    assert seen == [(1, type(None)), (1, str), (2, dict)] and squares(run(tmp_path, PLAN, again, never)) == [1, 4]


# --- workers ------------------------------------------------------------------------------------------------------
def beside_another(value, worker):
    """Once there are two processes, for which it waits a minute."""
    at_work, deadline = Path(os.environ["AT_WORK"]), time.monotonic() + 60
    (at_work / str(os.getpid())).touch()
    while len(os.listdir(at_work)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    return square(value, worker) | {"threads": torch.get_num_threads()}


def test_points_are_distributed_over_the_workers(tmp_path, tmp_path_factory, monkeypatch):
    seen = []
    monkeypatch.setenv("AT_WORK", str(tmp_path_factory.mktemp("at-work")))
    rows = run(tmp_path, PLAN, points(*range(4)), beside_another, lambda point, news: seen.append((point.value, news)),
               ["cpu", "cpu"])  # fmt: skip
    processes = {row["process"] for row in rows}
    assert len(processes) == 2 and os.getpid() not in processes and {row["device"] for row in rows} == {"cpu"}
    assert {row["threads"] for row in rows} == {1} and sorted(seen) == [(value, "at work") for value in range(4)]


def die(value, worker):
    if value == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return square(value, worker)


def test_a_worker_that_dies_is_one_sentence_and_what_is_finished_is_kept(tmp_path):
    with pytest.raises(InputError, match=r"a worker process died.*fewer --workers"):
        run(tmp_path, PLAN, points(1, 2), die, workers=["cpu"])
    assert (tmp_path / "points" / "1.json").exists()
    assert squares(run(tmp_path, PLAN, points(1, 2), square, workers=["cpu"])) == [1, 4]


def fail(value, worker):
    raise InputError(f"{value} cannot be measured")


@pytest.mark.parametrize("devices", [(), ("cpu",)])
def test_an_error_of_a_measurement_ends_the_run(tmp_path, devices):
    with pytest.raises(InputError, match="2 cannot be measured"), locked(tmp_path / "run"):
        run(tmp_path / "run", PLAN, points(2), fail, workers=devices)
    assert not any(tmp_path.iterdir())


# --- killed -------------------------------------------------------------------------------------------------------
def slowly(value, worker):
    time.sleep(0.5)
    return square(value, worker)


def run_slowly(folder, devices):
    begin()
    with locked(folder):
        run(folder, PLAN, points(*range(8)), slowly, workers=devices)


@pytest.mark.parametrize("devices", [(), ("cpu", "cpu")])
def test_a_run_that_is_killed_at_any_moment_goes_on(tmp_path, devices):
    """Killed before the first result, and after each of the first two: no temporary file is taken for a result, no
    worker outlives it, and nothing that is finished is measured again."""
    kept = {}
    for count in range(3):
        process = forked().Process(target=run_slowly, args=(tmp_path / "run", devices))
        process.start()
        wait_for(lambda: len(written(tmp_path)) >= count and (tmp_path / "run").exists(), process)  # noqa: B023
        family = begun_by(process)
        process.kill()
        process.join(PATIENCE)
        assert not psutil.wait_procs(family, timeout=PATIENCE)[1] and kept.items() <= written(tmp_path).items()
        kept = written(tmp_path)
    assert squares(run(tmp_path / "run", PLAN, points(*range(8)), square)) == [value**2 for value in range(8)]
    assert kept.items() <= written(tmp_path).items()


def written(folder):
    return {path: path.stat().st_mtime_ns for path in folder.glob("run/points/*.json") if path.name[0] != "."}


def test_folder_without_results_is_released_after_a_failure(tmp_path):
    with pytest.raises(InputError, match="cannot be measured"):
        run(tmp_path, PLAN, points(1), fail)
    assert squares(run(tmp_path, Claim({"another": "plan"}), points(1), square)) == [1]
    with pytest.raises(InputError, match="cannot be measured"):
        run(tmp_path, Claim({"another": "plan"}), points(1, 2), fail)
    with pytest.raises(InputError, match="holds another run"):
        run(tmp_path, PLAN, points(1), square)


# --- plans --------------------------------------------------------------------------------------------------------
def test_a_changed_plan_is_refused(tmp_path):
    run(tmp_path, PLAN, points(1), square)
    with pytest.raises(InputError, match=r"holds another run \(squares of is 3 there and 4 here\)"):
        run(tmp_path, Claim({"squares of": [1, 2, 4]}), points(4), square)
    assert not (tmp_path / "points" / "4.json").exists()


def test_results_on_another_machine_are_kept_with_a_warning(tmp_path):
    run(tmp_path, Claim(PLAN.plan, made={"machine": "x"}), points(1), square)
    with pytest.warns(VersionWarning, match="made by machine x; now runs machine y"):
        assert squares(run(tmp_path, Claim(PLAN.plan, made={"machine": "y"}), points(1), never)) == [1]


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(InputError, match="is no folder of reports or runs"):
        run(tmp_path, PLAN, points(1), never)


# --- rows ---------------------------------------------------------------------------------------------------------
def test_nonfinite_result_is_a_marked_row(tmp_path):
    def measure(value, worker):
        return {"loss": [math.nan, 1.0] if value == 1 else [2.0, 1.0], "best": -math.inf if value == 1 else 1.0}

    for _ in range(2):  # measured, and read back
        broken, whole = run(tmp_path, PLAN, points(1, 2), measure)
        assert math.isnan(broken["loss"][0]) and broken["best"] == -math.inf
        assert broken[NOT_FINITE] == {"/loss/0": "nan", "/best": "-inf"} and NOT_FINITE not in whole
    json.loads((tmp_path / "points" / "1.json").read_text(), parse_constant=pytest.fail)


def test_a_damaged_or_foreign_result_is_named(tmp_path):
    run(tmp_path, PLAN, points(12345), square)
    change_digit(tmp_path / "points" / "12345.json")
    with pytest.raises(InputError, match=r"12345.json' is damaged: it has another SHA-256.*delete it and run"):
        run(tmp_path, PLAN, points(12345), never)
    (tmp_path / "points" / "7.json").write_text("{}")
    with pytest.raises(InputError, match=r"7.json' is damaged: it has no 'square'; delete it and run"):
        run(tmp_path, PLAN, points(7, form={"square": int}), never)


def test_a_job_with_a_class_of_a_script_is_refused(tmp_path, monkeypatch):
    kind, main = type("Kind", (), {"__module__": "__main__"}), sys.modules["__main__"]
    for name, value in {"Kind": kind, "__spec__": None}.items():
        monkeypatch.setattr(main, name, value, raising=False)
    with pytest.raises(InputError, match=r"need a plug-in for what a script or notebook defines: .*Can't pickle.*Kind"):
        run(tmp_path, PLAN, points(kind()), square, workers=["cpu"])


def test_workers_know_the_functions_of_a_module_that_was_run_by_its_name(tmp_path):
    """`python -m NAME`, whose functions are those of `__main__`; by a worker that is not forked, as with a GPU."""
    (tmp_path / "named.py").write_text(
        "from headrace.files.workers import distribute\n"
        "def twice(n, worker): worker.report(2 * n)\n"
        "if __name__ == '__main__': distribute(twice, [(21,)], ['cuda:0'], lambda i, news: print(news))\n"
    )
    module = "import runpy; runpy.run_module('named', run_name='__main__', alter_sys=True)"
    assert fresh.output(module, folder=tmp_path, PYTHONPATH=str(tmp_path)) == "42\n"


@pytest.mark.skipif(sys.platform == "win32", reason="there are no masks of signals")
def test_ctrl_c_while_workers_begin_counts_once_they_have_begun():
    """And does not reach them."""
    code, said = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('goes on')", []
    with pytest.raises(KeyboardInterrupt), interrupts_later():
        os.kill(os.getpid(), signal.SIGINT)
        said.append(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
    assert said == ["goes on\n"]


def test_a_checkpoint_that_a_run_does_not_have_is_not_asked_of_the_hub(tmp_path, monkeypatch):
    run = tmp_path / "run"
    (run / "checkpoint-8").mkdir(parents=True)
    for file in (run / "run.json", run / "checkpoint-8" / "config.json"):
        file.write_text("{}")
    assert not is_on_the_hub(run / "checkpoint-2") and is_on_the_hub("owner/name")
    assert is_on_the_hub("owner/name:20231101.en")  # a configuration of a data set
    monkeypatch.setattr("headrace.files.hub.os", SimpleNamespace(sep="\\"))
    assert is_on_the_hub("owner\\name")  # as Windows writes the path that a command is given
    with pytest.raises(InputError, match="checkpoint-2' does not exist; the run has checkpoint-8"):
        check_config(run / "checkpoint-2")


@pytest.mark.parametrize(("value", "answers"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_hub_is_asked_unless_its_client_is_offline(monkeypatch, value, answers):
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nothing answers
    assert hub_answers() == answers
    monkeypatch.setenv("HF_ENDPOINT", "http://a b")
    assert hub_answers() == answers


@pytest.mark.parametrize(
    ("endpoint", "asked", "left"),
    [("", "https://huggingface.co", None), ("https://mirror.org", "https://mirror.org", "https://mirror.org")],
)
def test_an_empty_endpoint_is_none(endpoint, asked, left, monkeypatch, capsys):
    """Its client would ask the address /owner/name."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    found = []
    monkeypatch.setattr("headrace.files.hub.urlopen", lambda request, timeout: nullcontext(found.append(request)))
    ask_hub()
    assert [request.full_url for request in found] == [asked] and os.environ.get("HF_ENDPOINT") == left
    assert "HF_HUB_OFFLINE" not in os.environ and not capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "answers"),
    [
        (URLError(SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")), True),
        (HTTPError("https://huggingface.co", 503, "busy", None, None), True),
        (URLError(OSError(101, "Network is unreachable")), False),
        (BadStatusLine("SSH-2.0"), False),
    ],
)
def test_what_the_hub_answers_is_left_to_its_client(monkeypatch, error, answers):
    """Python of python.org for macOS knows no certificates until the user installs them; the client has its own."""

    def fail(request, timeout):
        raise error

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("headrace.files.hub.urlopen", fail)
    assert hub_answers() == answers
