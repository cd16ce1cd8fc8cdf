"""The files of docs/launch parse as what they are, and their commands as headrace's. test_pretraining.py runs one."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from headrace.cli import app as cli

FOLDER = Path(__file__).parents[2] / "docs" / "launch"
FILES = sorted(path.name for path in FOLDER.iterdir())
COMMANDS = typer.main.get_command(cli.app).commands
LAUNCHERS = ("torchrun ", "accelerate launch ")


def lines(name):
    """The lines of a file, joined where they continue, without the shell's variables."""
    text = (FOLDER / name).read_text("utf-8").replace("\\\n", " ")
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text.replace('"$@"', ""))
    return [re.sub(r"\$\{\w+:\?[^}]*\}|\$\w+", "1", line).strip("# ") for line in text.splitlines()]


def parsed(command, words):
    return COMMANDS[command].make_context(command, words)


def test_launch_page_includes_every_file():
    page = (FOLDER.parent / "training.md").read_text("utf-8")
    assert sorted(re.findall(r"literalinclude\} launch/(\S+)", page)) == FILES


@pytest.mark.parametrize("name", FILES)
def test_every_launch_file_runs_a_valid_command(name):
    started = [line for line in lines(name) if "-m headrace" in line]
    assert len(started) == 1 and any(launcher in started[0] for launcher in LAUNCHERS)
    command, *words = shlex.split(started[0].partition("-m headrace ")[2])
    assert parsed(command, words).params["recipe"] == "paper-340m"


@pytest.mark.parametrize("name", [name for name in FILES if "torchrun" in "".join(lines(name))])
def test_torchrun_accepts_the_options(name):
    from torch.distributed.run import get_args_parser

    line = next(line for line in lines(name) if "torchrun " in line and "-m headrace" in line)
    result = get_args_parser().parse_args(shlex.split(line.partition("torchrun ")[2]))
    assert result.module and result.training_script == "headrace"
    assert result.standalone or result.rdzv_endpoint or result.master_addr != "127.0.0.1"


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith((".sh", ".sbatch"))])
def test_shell_files_parse(name):
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)


def test_slurm_starts_one_task_per_node():
    text = (FOLDER / "slurm.sbatch").read_text("utf-8")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    assert options["ntasks-per-node"] == "1" and f"--nproc-per-node={options['gpus-per-node']} " in text


def test_kubernetes_manifest_is_consistent():
    service, job = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text("utf-8"))
    assert [(one["apiVersion"], one["kind"]) for one in (service, job)] == [("v1", "Service"), ("batch/v1", "Job")]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    (container,) = pod["containers"]
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}
    started = container["args"][0]
    assert f"--nnodes={spec['completions']} " in started and spec["completions"] == spec["parallelism"]
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']} " in started
    assert f"--master-addr={job['metadata']['name']}-0.{pod['subdomain']} " in started
    subprocess.run(["bash", "-n"], input=started, text=True, check=True)


def test_skypilot_task_is_valid():
    task = yaml.safe_load((FOLDER / "sky.yaml").read_text("utf-8"))
    known = {"name", "num_nodes", "resources", "workdir", "file_mounts", "setup", "run", "envs"}
    assert task.keys() <= known and re.fullmatch(r"[\w-]+:\d+", task["resources"]["accelerators"])
    subprocess.run(["bash", "-n"], input=task["setup"] + task["run"], text=True, check=True)


def test_accelerate_config_loads():
    from accelerate.commands.config.config_args import load_config_from_file

    result = load_config_from_file(str(FOLDER / "accelerate.yaml"))
    assert (result.distributed_type, result.num_processes, result.mixed_precision) == ("MULTI_GPU", 8, "bf16")
