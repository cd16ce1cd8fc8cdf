"""Without what Windows lacks: modules, functions and signals of POSIX alone."""

import pickle
import sys
from importlib.util import find_spec, module_from_spec
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest

import fresh
from headrace.convert import checkpoint
from headrace.data import Preparation, preparation, prepare
from headrace.files import processes
from headrace.files.processes import LOCK, locked
from headrace.utils.errors import InputError

# Hides them from headrace, imports all of it, and runs commands. Libraries, which have code of their own for Windows,
# see them.
PROGRAM = """
import builtins, os, pkgutil, signal, types

HIDDEN = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
ABSENT = {
    "os": "fork forkpty getpgid getuid geteuid killpg register_at_fork sched_getaffinity setsid".split(),
    "signal": "SIGALRM SIGHUP SIGKILL SIGUSR1 alarm pthread_sigmask setitimer".split(),
}
windows = {name: types.ModuleType(name) for name in ABSENT}
for name, module in (("os", os), ("signal", signal)):
    vars(windows[name]).update({key: value for key, value in vars(module).items() if key not in ABSENT[name]})
find = builtins.__import__

def on_windows(name, scope=None, *rest, **options):
    if (scope or {}).get("__name__", "").startswith("headrace"):
        if name in HIDDEN:
            raise ModuleNotFoundError(name)
        if name in windows:
            return windows[name]
    return find(name, scope, *rest, **options)

builtins.__import__ = on_windows
import headrace
from headrace.cli import app

left_out = [f"headrace.{name}" for name in "__main__ libheadrace ops.triton ops.fla export.vllm".split()]  # GPUs
for found in pkgutil.walk_packages(headrace.__path__, "headrace."):
    if not found.name.startswith(tuple(left_out)):
        __import__(found.name)
        print(found.name)
for name in ("zoo", "backends", "recipes"):
    app.app([name], standalone_mode=False)
"""


@pytest.mark.slow(seconds=20)
def test_every_module_imports_without_posix(tmp_path):
    for package in ("lm_eval", "onnx", "onnxscript", "gguf", "starlette"):
        pytest.importorskip(package)
    said = fresh.output(PROGRAM, folder=tmp_path, before=fresh.TRANSFORMERS)
    assert len(said.splitlines()) > 200


def test_preparation_works_with_spawned_workers(tmp_path, monkeypatch):
    """Their start is recorded and what they are sent is pickled; a fork does the work."""
    (tmp_path / "a.txt").write_text("It was the best of times. " * 50)
    prepare(Preparation((str(tmp_path / "a.txt"),), length=16, held_out=0.1), tmp_path / "forked")
    requested, executor = [], preparation.ProcessPoolExecutor

    def start(count, context, begin, sent):
        return executor(count, context, *pickle.loads(pickle.dumps((begin, sent))))

    monkeypatch.setattr(preparation, "sys", SimpleNamespace(platform="win32", stderr=sys.stderr))
    monkeypatch.setattr(preparation, "get_context", lambda kind: requested.append(kind) or get_context("fork"))
    monkeypatch.setattr(preparation, "ProcessPoolExecutor", start)
    prepare(Preparation((str(tmp_path / "a.txt"),), length=16, held_out=0.1), tmp_path / "spawned")
    assert requested == ["spawn"]
    one, two = ((tmp_path / name / "train.npy").read_bytes() for name in ("forked", "spawned"))
    assert one == two


def test_lock_is_deleted_after_it_is_closed(tmp_path, monkeypatch):
    """Windows deletes no open file, so that a lock that another process has opened stays."""
    monkeypatch.setattr(processes, "POSIX", False)
    with locked(tmp_path / "d"):
        with pytest.raises(InputError, match="in use by process"), locked(tmp_path / "d"):
            pass
        assert (tmp_path / "d" / LOCK).exists()
    assert not (tmp_path / "d" / LOCK).exists()

    def refuse(path, missing_ok):
        raise PermissionError(13, "in use")

    with monkeypatch.context() as patch, locked(tmp_path / "d"):
        patch.setattr("pathlib.Path.unlink", refuse)
    with locked(tmp_path / "d"):
        pass
    assert not (tmp_path / "d" / LOCK).exists()


def test_the_process_of_a_tokenizer_is_forked_on_linux_alone(monkeypatch):
    spec = find_spec("headrace.serving.tokenizing")
    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", lambda: pytest.fail("a fork"))
    for system in ("darwin", "win32"):
        monkeypatch.setattr(sys, "platform", system)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        module.import_ahead()
        assert module.CONTEXT.get_start_method() == "spawn"


def test_names_of_the_hub_are_paths_of_windows(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("headrace.files.hub.os", SimpleNamespace(sep="\\"))
    monkeypatch.setattr(checkpoint, "sep", "\\")
    monkeypatch.setattr(checkpoint, "snapshot_download", lambda name, **patterns: asked.append(name) or tmp_path)
    monkeypatch.setattr(checkpoint.AutoTokenizer, "from_pretrained", lambda name, **options: asked.append(name))
    assert checkpoint.fetched(Path("owner\\name")) == tmp_path
    with pytest.raises(InputError, match="no readable tokenizer"):
        checkpoint.read_tokenizer(Path("owner\\name"))
    assert asked == ["owner/name", "owner/name"]
