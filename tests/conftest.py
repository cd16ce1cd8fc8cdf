import gc
import hashlib
import json
import logging
import os
import re
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

os.environ.pop("HEADRACE_BACKEND", None)  # tests name the backends that they need
# PyTorch's cache of compiled code takes what was compiled for one instruction set, or for other shapes of what our
# operators keep for the backward, for what it needs.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(
    tempfile.gettempdir(), f"headrace-inductor-{os.getuid()}-{os.environ.get('ATEN_CPU_CAPABILITY', 'best')}",
    hashlib.sha256(b"".join(map(Path.read_bytes, sorted(Path(__file__).parents[1].glob("src/**/*.py"))))).hexdigest(),
)  # fmt: skip
# Its processes that compile import PyTorch, which takes longer than what there is to compile.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.utils import collect_env

from equation import prepare, skip_if_missing
from groups import SHARED
from headrace.utils.extras import EXTRAS, MissingPackage, packages

gc.disable()  # until all tests are there: what is imported stays, and looking through it again and again takes seconds
COLLECTED = pytest.StashKey[set[str]]()  # the ids of all tests, whichever of them run
collect_env.get_pretty_env_info = cache(collect_env.get_pretty_env_info)  # lm-eval asks pip at each evaluation
GPU_TESTS = Path(__file__).parent / "gpu"
# Two processes of two threads on two cores wait for each other more than they compute.
THREADS = int(os.environ.get("HEADRACE_TEST_THREADS", "1"))
# Packages without which tests are skipped: of the extras, and those that [dev] alone installs.
OPTIONAL = {name for names in EXTRAS.values() for name in names}
OPTIONAL |= {"httpx", "openai", "peft", "rwkv", "sphinx", "triton", "trl", "zstandard"}
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # on a busy machine it tells of its first cache
settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")


def pytest_configure(config):
    """Hides GPUs, so that tests run on the CPU on every machine, unless those of tests/gpu run alone."""
    folders = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    if not all(folder.is_relative_to(GPU_TESTS) for folder in folders):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """A worker of pytest-xdist is silent if a test that was asked for does not exist: its controller says it."""
    try:
        return (yield)
    except pytest.UsageError as error:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["usage"] = [str(arg) for arg in error.args]
        raise


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    if usage := getattr(node, "workeroutput", {}).get("usage"):
        raise pytest.UsageError(*usage)


def pytest_collection_modifyitems(config, items):
    """The slowest tests come first. One that begins last keeps all other workers waiting; and where tests share a long
    fixture, some of them would pass to another worker at the end, which makes the fixture again."""
    config.stash[COLLECTED] = {item.nodeid for item in items}
    items.sort(key=_seconds, reverse=True)


def pytest_collection_finish():
    gc.freeze()  # a collection no longer looks through libraries and tests
    gc.enable()
    if utils := sys.modules.get("transformers.utils.import_utils"):
        utils.is_torch_cuda_available()  # it is kept: a test that shows a GPU which is not there would decide for all


def pytest_unconfigure():
    gc.unfreeze()  # libraries complain of what is still there at the end


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    return _skipped_if_absent(report, getattr(report, "call", None), collector.path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _skipped_if_absent((yield), call, item.path)


def _skipped_if_absent(report, call, path):
    """Turns the failed import of an optional package that is not installed into a skip that names it."""
    error = call.excinfo.value if report.failed and call and call.excinfo else None
    while error is not None:
        name = (getattr(error, "name", None) or "").partition(".")[0]
        absent = isinstance(error, ModuleNotFoundError) and name in OPTIONAL and find_spec(name) is None
        if absent or (isinstance(error, MissingPackage) and _asks_for_an_absent_extra(str(error))):
            report.outcome, report.longrepr = "skipped", (str(path), 0, f"Skipped: {error}")
            break
        error = error.__cause__
    return report


def _asks_for_an_absent_extra(message):
    """Whether it names extras of which a package is not installed: who asks for installed ones has a fault."""
    found = re.search(r" needs the extras? .*headrace\[([\w,]+)\]", message)
    return found is not None and any(find_spec(name) is None for name in packages(found[1]))


def _seconds(item):
    slow = item.get_closest_marker("slow")
    return slow.kwargs.get("seconds", 10) if slow else 0


@pytest.fixture(scope="module", autouse=True)
def _a_seed_for_what_a_module_shares():
    """Whichever of its tests asks for it first, and whatever ran before in this process."""
    torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _a_number_of_threads_and_a_fixed_seed():
    torch.set_num_threads(THREADS)
    torch.default_generator.manual_seed(0)  # torch.manual_seed also writes down the stack for three kinds of devices


@pytest.fixture(autouse=True)
def _workers_are_forked_from_the_process_of_all_tests(monkeypatch):
    if workers := sys.modules.get("headrace.files.workers"):
        monkeypatch.setattr(workers, "SHARED", SHARED)


@pytest.fixture(autouse=True)
def _models_of_transformers_compute_in_pytorch(request, monkeypatch):
    """The file of a model, imported with the first of its kind, takes FLA's kernels if they can be imported, as after a
    test that shows a GPU. They need one."""
    if request.path.parent.name in ("convert", "export"):
        monkeypatch.delattr(sys.modules.get("fla"), "ops", raising=False)
        for name in {"fla.ops", *(name for name in sys.modules if name.startswith("fla.ops."))}:
            monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def collected(request):
    """The ids of all tests of the suite. Skips where only some files were asked for."""
    if {Path(argument).resolve() for argument in request.config.args} - {
        Path(__file__).parent,
        Path(__file__).parents[1],
    }:
        pytest.skip("not the whole suite was collected")
    return request.config.stash[COLLECTED]


class Result(NamedTuple):
    """The exit code of a command, and what it wrote to standard output and standard error."""

    code: int
    out: str
    err: str


@pytest.fixture
def run_command(capsys, monkeypatch):
    """Runs `headrace WORDS` in this process and returns its Result."""
    from headrace.cli import main

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["headrace", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        result = Result(end.value.code or 0, *capsys.readouterr())
        if _asks_for_an_absent_extra(result.err):
            pytest.skip(result.err)
        return result

    return run


@pytest.fixture
def succeeds(run_command):
    """Runs `headrace WORDS`, which must end with code 0, and returns its Result."""

    def run(*words):
        result = run_command(*words)
        assert result.code == 0, result.err
        return result

    return run


@pytest.fixture
def refusal(run_command):
    """Runs `headrace WORDS`, which must be refused, and returns what it says on standard error."""

    def run(*words):
        result = run_command(*words)
        assert result.code == 2, result
        return result.err

    return run


@pytest.fixture(params=["torch", "batched", "native"])
def backend(request, monkeypatch):
    """The name of a backend: "torch" twice, as on a CPU and as on a GPU."""
    prepare(request.param, monkeypatch)
    return "torch" if request.param == "batched" else request.param


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory):
    """The folder of a small model, with a tokenizer of bytes."""
    import tiny

    return tiny.saved(tiny.build("gla", vocab_size=257).float(), tmp_path_factory.mktemp("models") / "gla")


@pytest.fixture
def default_dtype():
    """torch.set_default_dtype, until the end of the test."""
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def native():
    """Skips what needs the native library where it is absent."""
    skip_if_missing("native")


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """The folder of a text, prepared."""
    texts = (f"{i} times {i} is {i * i}. " * 3 for i in range(150))
    return prepare_texts(texts, 0.05, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def few(tmp_path_factory):
    """The folder of a prepared text of 44 full rows, so that a run of a few steps has several epochs."""
    return prepare_texts((f"{i} and {i} are {2 * i}." for i in range(88)), 0.1, tmp_path_factory.mktemp("few"))


def prepare_texts(texts, held_out, folder):
    from headrace.data import Preparation, prepare

    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(Preparation((str(folder / "texts.jsonl"),), length=32, held_out=held_out), folder / "data")
    return folder / "data"


@pytest.fixture(scope="session")
def data(prepared):
    from headrace.data import open_data

    return open_data(prepared)
