"""Python code in a new process that has imported PyTorch, or more, forked from one, as importing takes longest."""

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from inspect import getsource
from pathlib import Path
from tempfile import TemporaryDirectory

TRANSFORMERS = "import transformers.generation, transformers.modeling_layers"  # most of what headrace.hf takes


def become(code, arguments, folder, environment, paths):
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, path in enumerate(paths, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    os.environ.clear()
    os.environ.update(environment)
    for name in ("transformers.utils", "transformers.dynamic_module_utils"):  # which read it when they are imported
        if module := sys.modules.get(name):
            module.HF_MODULES_CACHE = environment.get("HF_MODULES_CACHE", module.HF_MODULES_CACHE)
    os.chdir(folder)
    sys.argv, sys.path[1:1] = ["-c", *arguments], environment.get("PYTHONPATH", "").split(os.pathsep)
    exec(compile(code, "<fresh>", "exec"), {"__name__": "__main__"})


# Each line of its input is a process; each line of its output is how one ended.
ORIGIN = """
import json, os, sys
import torch
{before}

{become}
for line in sys.stdin:
    if not (child := os.fork()):
        become(*json.loads(line))
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def origin(before):
    command = [sys.executable, "-c", ORIGIN.format(before=before, become=getsource(become))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.communicate)
    return process


def run(code, *arguments, folder=".", before="", **environment):
    """`python -c code arguments` in a folder, with more variables of the environment: a CompletedProcess. before: code
    that has run in the process from which this one is forked; None: that process has imported groups.SHARED."""
    with TemporaryDirectory() as captured:
        paths = [os.path.join(captured, name) for name in ("out", "err")]
        job = code, arguments, str(folder), os.environ | environment, paths
        ended = _forked(job) if before is None else _asked(origin(before), job)
        texts = [Path(path).read_text("utf-8") for path in paths]
    return subprocess.CompletedProcess(code, ended, *texts)


def output(code, *arguments, **how):
    """What such a process prints, which must end with code 0."""
    done = run(code, *arguments, **how)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _asked(process, job):
    print(json.dumps(job), file=process.stdin, flush=True)
    return int(process.stdout.readline())


def _forked(job):
    from groups import forked

    process = forked().Process(target=become, args=job)
    process.start()
    process.join()
    return process.exitcode


def pytest(*words, **how):
    """`python -m pytest words`"""
    return run("import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))", *map(str, words), **how)
