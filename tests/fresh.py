"""Python code in a new process that has imported PyTorch alone, forked from one, as importing it takes longest."""

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

# Each line of its input is a process; each line of its output is how one ended.
ORIGIN = """
import json, os, sys
import torch

def become(code, arguments, folder, environment, paths):
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, path in enumerate(paths, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv, sys.path[1:1] = ["-c", *arguments], environment.get("PYTHONPATH", "").split(os.pathsep)
    exec(compile(code, "<fresh>", "exec"), {"__name__": "__main__"})

for line in sys.stdin:
    if not (child := os.fork()):
        become(*json.loads(line))
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def origin():
    process = subprocess.Popen([sys.executable, "-c", ORIGIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.communicate)
    return process


def run(code, *arguments, folder=".", **environment):
    """`python -c code arguments` in a folder, with more variables of the environment: a CompletedProcess."""
    with TemporaryDirectory() as captured:
        paths = [os.path.join(captured, name) for name in ("out", "err")]
        job = code, arguments, str(folder), os.environ | environment, paths
        print(json.dumps(job), file=origin().stdin, flush=True)
        ended = int(origin().stdout.readline())
        texts = [Path(path).read_text("utf-8") for path in paths]
    return subprocess.CompletedProcess(code, ended, *texts)


def pytest(*words, **how):
    """`python -m pytest words`"""
    return run("import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))", *map(str, words), **how)
