"""The command line: what a user gets wrong is one sentence and exit code 2, never a traceback."""

import errno
import io
import json
import os
import re
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import headrace
from headrace import zoo
from headrace.cli import app
from headrace.comparison.choose import choose
from headrace.convert import checkpoint
from headrace.convert.checkpoint import load_on
from headrace.layers.quantized import KINDS
from headrace.ops import dispatch
from headrace.ops.backends.base import Kernel
from headrace.report import catalog
from headrace.spec import AttentionSpec, Decay, MixerSpec, Read, to_json
from headrace.utils.errors import InputError
from headrace.verification.errors import Row


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The working folder, with files and folders that commands refuse."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes("café ".encode("latin-1") * 500)
    (tmp_path / "short.txt").write_text("A few words.")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").touch()
    (tmp_path / "notes" / "config.json").write_text("{}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "plan.json").write_text("{}")
    (tmp_path / "broken").mkdir()
    (tmp_path / "empty").mkdir()
    for name in ("plan.json", "config.json"):
        (tmp_path / "broken" / name).write_text("{")
    return tmp_path


MISTAKES = {
    "compare --mixers softmx-retnet --output new": "mixer 'softmx-retnet' is unknown; the nearest names are softmax-r",
    "compare --mixers gla(decay.rank=high)": "decay.rank='high' is not allowed",
    "compare --mixers softmax-gla(competition.raed=none)": "no field 'raed'",
    "bench --mixers transformers-mamba2 --hidden-size 30 --heads 3": "transformers-mamba2 cannot have --hidden-size=30",
    "compare --mixers gla,gla": "each mixer once",
    "compare --tune lr=1e-3,1e-3": "--tune 'lr=1e-3,1e-3' has a value twice; expected distinct values",
    "bench --mixers gla,gla": "each mixer once",
    "bench --lengths 16,16": "--lengths=16,16 has a number twice; expected each once",
    "compare --mixers ,": "expected at least one",
    "compare --mixers gla,,retnet": "'gla,,retnet' has nothing on one side of a comma",
    "compare --mixers gla++retnet": "'gla++retnet' has nothing on one side of a plus",
    "verify --mixers ,": "--mixers=',' names none; expected at least one",
    "recipes --mixers ,": "--mixers=',' names none; expected at least one",
    "generate empty --prompt a": "checkpoint 'empty' has no config.json",
    "retrofit empty --output new": "checkpoint 'empty' has no config.json",
    "convert empty --output new": "checkpoint 'empty' has no config.json",
    "generate broken --prompt a": "line 1 column 2 (char 1))\n",  # no command writes it anew
    "eval empty --suite language": "checkpoint 'empty' has no config.json",
    "generate notes --prompt a --max-new-tokens 0": "--max-new-tokens=0; expected at least 1",
    "generate notes --prompt a --temperature -1": "--temperature=-1.0; expected 0, or at least 0.01",
    "generate notes --prompt a --temperature nan": "--temperature=nan; expected 0, or at least 0.01",
    "generate notes --prompt a --top-p 0": "--top-p=0.0; expected more than 0 and at most 1",
    "generate notes --prompt a --top-k -1": "--top-k=-1; expected at least 0",
    "generate notes --prompt a --repetition-penalty 0": "--repetition-penalty=0.0; expected 0.01 to 100",
    "generate notes --prompt a --repetition-penalty 1e-300": "--repetition-penalty=1e-300; expected 0.01 to 100",
    "generate notes --file missing.txt": "--file 'missing.txt' cannot be read: No such file or directory",
    "generate notes --file latin.txt": "--file 'latin.txt' is not UTF-8: ",
    "generate notes --prompt a --file short.txt": "--prompt and --file are both given; expected one of them",
    "inspect notes --prompt a --file short.txt": "--prompt and --file are both given; expected one of them",
    "generate notes --prompt a --temperature 0 --top-p 0.5": "--top-p has no effect at --temperature 0",
    "generate notes --prompt a --temperature 0 --top-k 5": "--top-k has no effect at --temperature 0",
    "generate notes --prompt a --temperature 0 --seed 1": "--seed has no effect at --temperature 0",
    "generate notes --prompt a --seed -1": "--seed=-1; expected at least 0",
    "generate notes --prompt a --cuda-graph --device cpu": "--cuda-graph with --device='cpu'; expected a GPU",
    "generate notes --prompt a --prompt-lookup 3 --cuda-graph": "--prompt-lookup has no effect with --cuda-graph",
    "generate notes --prompt a --prompt-lookup 3 --draft notes": "--draft has no effect with --prompt-lookup",
    "generate notes --prompt a --prompt-lookup 0": "--prompt-lookup=0; expected at least 1",
    "generate notes --prompt a --weights int4": "--weights='int4'; expected one of int8, bfloat16\n",
    "serve notes --port 0 --weights int4": "--weights='int4'; expected one of int8, bfloat16\n",
    "eval notes --suite language --seed 4294967296": "--seed=4294967296; expected at most 4294967295",
    "serve notes --max-prompt-tokens 0": "--max-prompt-tokens=0; expected at least 1",
    "serve notes --prefix-cache 9": "--prefix-cache='9'; expected a number of kB, MB or GB, such as 256MB, or 0",
    f"serve notes --prefix-cache {'9' * 400}GB": f"--prefix-cache='{'9' * 400}GB'; expected a number of kB, MB or GB",
    "train laptop-1m warmup=1 --dry-run": "warmup=1; expected less than 1, as a fraction of the training",
    "compare --heads 7": "num_heads=7 does not divide",
    "compare --mixers bahdanau": "'bahdanau' cannot train on --task pair",
    "compare --task dates --length 9": "the length of the task dates is fixed",
    "verify --mixers bahdanau": "'bahdanau' is a whole model, not a layer's mixer",
    "compare --task par": "--task 'par' is unknown; expected one of pair, ",
    "verify --mixers transformer(pattern.window=2)": "'pattern.window' names no field of this mixer ('pattern' is none",
    "compare --mixers gla(heads.count=2,heads.count=4)": "mixer 'gla(heads.count=2,heads.count=4)' sets 'heads.count'",
    "compare --mixers softmax-gla(competition.temperature=2,competition=paper)": "'competition.temperature' and 'comp",
    "compare --task mqar(pairs=8,pairs=16)": "--task 'mqar(pairs=8,pairs=16)' sets 'pairs' twice",
    "compare --task mqar(pars=8)": "the task mqar has no field 'pars'; did you mean 'pairs'",
    "compare --task needle(length=-5)": "needle.length=-5; expected at least 1",
    "compare --task text(length=1)": "length=1; expected at least 2",
    "compare --task copy(length=7)": "Copy(symbols=16, length=7); expected at least 2 symbols and an even length",
    "compare --task mqar(pairs=many)": "mqar.pairs='many' is not allowed; expected int",
    "compare --task mqar(pairs": "--task 'mqar(pairs' is not of the form NAME or NAME(field=value, ...)",
    "compare --task mqar --sweep hidden=32": "did you mean 'hidden_size'",
    "compare --task mqar --lr 0.1 --sweep lr=0.1,0.2": "'lr' is set twice, by --task, --sweep, --tune or its own",
    "compare --task mqar(pairs=8) --sweep pairs=4,8": "'pairs' is set twice, by --task, --sweep, --tune or its own",
    "compare --task mqar(length=64) --length 32": "'length' is set twice, by --task, --sweep, --tune or its own",
    "train laptop-1m mixer=gla --mixer retnet --dry-run": "'mixer' is set twice, to 'gla' and to 'retnet'",
    "bench --lengths 8,": "--lengths=8,; expected positive integers of less than 2^31 separated by commas, such as",
    "bench --lengths 9999999999": "--lengths=9999999999; expected positive integers of less than 2^31",
    "compare --task mqar --sweep pairs=8,8": "with distinct values",
    "compare --task mqar --sweep heads=4,7": "num_heads=7 does not divide",
    "compare --task mqar --sweep pairs=8,64": "length >= 4 * pairs",
    "prepare --output new": "prepare has neither text sources nor --task; expected one of them",
    "prepare a.txt --task mqar --output new": "prepare has both text sources and --task; expected one of them",
    "prepare --task mqar --train-bpe 300 --output new": "--train-bpe has no effect with --task",
    "prepare a.txt --tokens 0.5 --output new": "--tokens 0.5; expected an integer",
    "prepare a.txt --tokens 1e300 --output new": "--tokens 1e+300; expected an integer of less than 2^63",
    "generate notes --prompt a --save-state short.txt/state": "'short.txt/state' cannot be written: '",
    "prepare a.txt --tokens -1 --output new": "--tokens -1; expected at least 1",
    "prepare --task mqar --tokens 1 --output new": "--tokens has no effect with --task",
    "prepare --task needle(length=8) --length 9 --output new": "'length' is set twice, by --task and --length",
    "train laptop-1m --dry-run --data NOT-THERE": "--data 'NOT-THERE' is not a folder written by `headrace prepare`",
    "compare --suite large --mixers gla": "--suite 'large'; expected one of small",
    "compare --suite small": "--suite needs --mixers; expected the mixers that get a row",
    "compare --suite small --mixers gla --plan x.yaml": "--plan has no effect with --suite",
    "compare --task mqar --board x.csv": "--board has no effect without --suite",
    "compare --suite small --mixers gla --board none.csv": "--board 'none.csv' is no file of the leader",
    "compare --suite small --mixers bert": "cannot train on --task parity",
    "eval notes --suite piqa,nope": "--suite='nope'; expected language, recall, needle, blimp, or a task",
    "eval notes --suite piqa --max-length 0": "--max-length=0",
    "eval notes --suite piqa --lengths 0": "--lengths=0; expected positive integers",
    "eval notes --suite piqa --limit 0": "--limit=0",
    "eval notes --suite piqa --data nowhere": "expected a folder",
    "eval notes --suite piqa --data nowhere --output deep/er": "expected a folder",
    "prepare short.txt empty.txt --held-out 1 --output deep/er/new": "--held-out 1.0; expected a fraction between",
    "prepare missing.txt --output deep/er/new": "source 'missing.txt' is not a file; expected text",
    "convert notes --output deep/er/new": "checkpoint 'notes'",
    "export notes --to onnx --output deep/er/new": "checkpoint 'notes'",
    "retrofit notes --output deep/er/new": "checkpoint 'notes'",
    "linearize notes --data other --output deep/er/new": "--data 'other' is not a folder written by",
    "bench --mixers notes/ --output deep/er": "checkpoint 'notes'",
    "curves notes --output deep/er/a.png": "notes",
    "eval notes --suite needle --lengths a": "--lengths=a; expected positive integers",
    "prepare --task mqar --held-out 0.1 --output new": "--held-out has no effect with --task",
    "prepare a.txt --rows 5 --output new": "--rows has no effect without --task",
    "prepare --task mqar --tokenizer t.json --output new": "the task mqar has no field 'tokenizer'",
    "compare --seeds 0": "--seeds=0; expected more than 0",
    "compare --lr nan": "recipe.lr=nan is not allowed; expected finite float",
    "compare --seeds 4294967296": "asks for 4294967296 seeds; expected at most 65536",
    f"compare --seeds 0-{10**30}": "expected a number of seeds, or seeds such as 10-14",
    f"compare --steps {10**30}": "--steps has more than 64 bits; expected a smaller number",
    f"compare --mixers gla(heads.expand_v={10**400})": "linear.heads.expand_v has more than 64 bits",
    f"compare --task pair(keys={10**30})": "pair.keys has more than 64 bits",
    "compare --task pair(keys=4294967296)": "pair.keys=4294967296; expected less than 2^32 in size",
    "compare --task pair(pairs=32,distractors=4294967295)": "does not fit in memory: 175921860403200 bytes more",
    "compare --task mqar(vocabulary=33554432)": "length < vocabulary <= 2^24",
    "compare --mixers gla(heads.expand_v=1e300)": "heads.expand_v=1e+300; expected more than 0 and at most 2^16",
    "compare --mixers mamba2(heads.expand_v=1e10)": "heads.expand_v=10000000000.0; expected more than 0",
    "compare --mixers gla-outer(expand_k=1e20)": "expand_k=1e+20; expected more than 0 and at most 2^16",
    "compare --mixers mamba(expand=1e-300)": "hidden_size=64 is 0; expected an integer of at least 1",
    "compare --mixers mesa(decay.temperature=1e-300)": "decay.temperature=1e-300; expected more than 0, as float32",
    "compare --mixers mamba(expand=1e300)": "expand=1e+300; expected more than 0 and at most 2^16",
    "compare --mixers mamba2(decay.dt_ceiling=1e300)": "decay.dt_ceiling=1e+300; expected less than 2^128 in size",
    "compare --workers 0": "--workers=0; expected at least 1",
    "compare --workers 1000000000": "expected at least 1, and at most 1024",
    f"generate notes --prompt a --prompt-lookup {10**30}": "--prompt-lookup has more than 64 bits",
    "generate notes --prompt a --threads 1000000": "--threads=1000000; expected at most 1024",
    "bench --threads 1000000": "--threads=1000000; expected at most 1024",
    "generate notes --prompt a --temperature 1e-320": "expected 0, or at least 0.01",
    "prepare a.txt --workers 100000 --output new": "--workers=100000; expected at most 1024",
    "prepare short.txt --train-bpe 1000000000 --output new": "an end of text, and at most 16777216",
    "compare --length 7": "length=7: a row of the task pair",
    "compare --length 0": "length=0: a row of the task pair has 2 positions for each pair; expected a positive",
    "compare --plan missing.yaml": "'missing.yaml' cannot be read: No such file or directory",
    "prepare --task mqar --rows 0 --output new": "--rows=0; expected at least 1",
    "prepare --task mqar --workers 0 --output new": "--workers=0; expected at least 1",
    "prepare --task mqar --seed -1 --output new": "--seed=-1; expected at least 0",
    "prepare short.txt --sample 1e-9 --output new": "--sample 1e-09 keeps no document of the sources; expected a",
    "compare --task mqar --length 2": "an even length >= 4 * pairs",
    "compare --task key-value --length 2": "length >= 3 * pairs",
    "compare --task mqar(keys=32)": "the task mqar has no field 'keys'",
    "compare --task pair --text short.txt": "--task pair has no text; expected text, masked or spans",
    "compare --tokenizer t.json": "add --text FILE",
    "compare --text missing.txt --output new": "'missing.txt' does not exist; expected text, jsonl or Parquet files",
    "compare --text empty.txt": "the sources hold no documents: empty.txt row 1 is empty",
    "compare --text latin.txt": "source 'latin.txt' cannot be read: 'utf-8' codec can't decode byte 0xe9 in position 3",
    "compare --text short.txt": "too few for length=96",
    "compare short.txt notes.xls": "'notes.xls' does not exist",
    "compare --task text --tokenizer missing.json": "'missing.json' cannot be read: the file does not exist",
    "compare --output notes": "'notes' exists and is no folder of reports or runs",
    "compare --output other": "'other' holds another run",
    "compare --output broken": "is not JSON",
    "compare --output empty.txt": "'empty.txt' exists and is no folder of reports or runs",
    "verify --mixers retnt": "mixer 'retnt' is unknown; the nearest names are retnet",
    "verify --dtype float8": "--dtype='float8'; expected one of float64",
    "verify --backend cuda": "backend='cuda' is unknown; expected one of onnx, native, triton, fla, torch",
    "verify --backend torch,onnx": "backend='onnx' cannot run here",
    "prepare short.txt --output .": "--output '.' has no name of its own; expected a new file or folder",
    "convert notes --output /": "--output '/' has no name of its own; expected a new file or folder",
    "export notes --to onnx --output .": "--output '.' has no name of its own",
    "retrofit notes --output .": "--output '.' has no name of its own",
    "inspect notes --prompt a --output .": "--output '.' has no name of its own",
    "bench --what=": "--what names none; expected some of memory, training, prefill, decoding",
    "zoo --json --show cost": "--show and --json are both given; expected one of them",
    "train laptop-1m --efficiency 0.5": "--efficiency has no effect without --machine",
    "serve notes --host=": "--host='' is empty; expected a name or an address",
    "train laptop-1m --lr 1e-3": "headrace train has no option --lr; expected the field as lr=VALUE behind the recipe",
    "train laptop-1m --batch-tokens=9": "no option --batch_tokens; expected the field as batch_tokens=VALUE",
    "verify --plugin short.txt": "plug-in 'short.txt' (--plugin) is no Python file; expected a name that ends in .py",
    "verify --device meta": "--device='meta' cannot be used: its tensors have no numbers",
    "curves notes --output a.txt": "--output 'a.txt'; expected a file that ends in one of .png, .pdf, .svg",
    "curves notes --output .png": "--output '.png'; expected a file that ends in one of .png, .pdf, .svg",
    "compare --task pair(length=abc)": "pair.length='abc' is not allowed; expected int",
    "compare --task pair --sweep length=abc,def": "pair.length='abc' is not allowed; expected int",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_user_errors_print_one_sentence_and_exit_with_2(run_command, command, folder):
    """And no file or folder is left."""
    before = files(folder)
    code, out, error = run_command(*command.split())
    assert (code, out) == (2, "")
    assert MISTAKES[command] in error and error.startswith("headrace: ") and error.count("\n") == 1
    assert files(folder) == before


def files(folder):
    return {*folder.rglob("*")}


def test_a_file_where_a_folder_is_to_be_is_an_error_of_its_option():
    error = FileExistsError(errno.EEXIST, "", "short.txt")
    with pytest.raises(InputError, match=r"^--output 'short.txt/a/b\.png' cannot be written: File exists$"):
        app.check_written(error, {"output": Path("short.txt/a/b.png")})


@pytest.mark.parametrize("command", ["generate", "inspect"])
def test_text_that_is_not_utf8_is_refused(run_command, monkeypatch, command):
    bytes_ = io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf-8", "surrogateescape")  # as Python opens it in the locale C
    monkeypatch.setattr(sys, "stdin", bytes_)
    for name, options in {"--prompt": ["--prompt", "a\udcff"], "standard input": []}.items():
        code, out, error = run_command(command, "notes", *options)
        assert (code, out) == (2, "") and error.startswith(f"headrace: {name} is not UTF-8: ") and "0xff" in error


ALLOCATOR = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."
OVERFLOW = "numel: integer multiplication overflow"


@pytest.mark.parametrize(
    ("error", "asked"),
    [(RuntimeError(ALLOCATOR), ": 64 bytes more"), (RuntimeError(OVERFLOW), ""), (MemoryError(), "")],
)
def test_memory_that_ran_out_is_one_sentence(run_command, monkeypatch, error, asked):
    monkeypatch.setattr(catalog, "describe", Mock(side_effect=error))
    code, out, said = run_command("zoo")
    assert (code, out) == (2, "")
    assert said.startswith(f"headrace: what this command computes does not fit in memory{asked}")


@pytest.mark.parametrize(
    ("encoding", "cure"), [("utf-8", ""), ("ascii", ": Python reads names as ascii here; set PYT")]
)
def test_names_that_are_not_utf8_are_refused(run_command, monkeypatch, encoding, cure):
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: encoding)
    for command in ("generate mod\udcc3 --prompt a", "compare t\udcc3.txt", "export notes --to onnx --output \udcc3"):
        code, out, error = run_command(*command.split())
        assert (code, out) == (2, "") and error.startswith("headrace: --") and r"\udcc3" in error
        assert f"has bytes that are no {encoding} text; expected UTF-8{cure}" in error
    error = run_command("generate", "notes", "--prompt", "a", "--save-state", "\udcc3").err
    assert error.startswith("headrace: --save-state ")


def test_what_is_misspelt_is_refused_before_slow_imports(refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "headrace.comparison.choose", None)  # whose import then raises
    monkeypatch.setitem(sys.modules, "headrace.benchmarking.measure", None)
    assert "'softmx-retnet' is unknown" in refusal("compare", "--mixers", "softmx-retnet")
    for name, value in (("what", "speed"), ("lengths", "0"), ("contexts", "8,8")):
        assert refusal("bench", f"--{name}", value).startswith(f"headrace: --{name}={value}")


def test_closed_streams(run_command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert "--prompt is missing" in run_command("generate", "notes").err
    monkeypatch.setattr(sys, "stdout", None)
    assert run_command("zoo").code == 0
    assert sys.stdout.encoding == "utf-8"  # whatever the locale
    sys.stdout.close()


def test_bars_stay_out_of_files(monkeypatch):
    for name in ("TQDM_DISABLE", "TQDM_MININTERVAL"):
        monkeypatch.delenv(name, raising=False)
    app.prepare_streams()  # pytest's standard error is no terminal
    assert (os.environ["TQDM_DISABLE"], os.environ["TQDM_MININTERVAL"]) == ("1", "60")


def test_zoo_json_parses_to_the_same_specs(run_command):
    listed = json.loads(run_command("zoo", "--json")[1])
    specs = {name: zoo.get(row["spec"]) for name, row in listed.items()}
    assert specs == {name: zoo.get(name) for name in (*zoo.names(), *zoo.MODELS)}
    assert listed["softmax-gla"]["about"] == listed["gla"]["about"] == zoo.SENTENCES["gla"]
    assert all(row["about"].endswith(".") for row in listed.values())


@pytest.fixture
def mine(monkeypatch):
    monkeypatch.setitem(zoo.LINEAR, "mine", MixerSpec(decay=Decay("softplus"), read=Read("rms", "silu")))
    monkeypatch.setitem(zoo.ATTENTION, "mine-too", AttentionSpec(kv_heads=4))


@pytest.mark.parametrize("view", ["", "--json", *(f"--show {view}" for view in catalog.VIEWS)])
def test_zoo_lists_every_mixer_and_model(run_command, mine, view):
    code, out, _ = run_command("zoo", *view.split())
    listed = {"mine", "softmax-mine", "mine-too", *zoo.names(), *zoo.MODELS}
    assert code == 0 and listed <= {*re.findall(r"[\w.-]+", out)}


def test_verify_and_compare_accept_registered_mixers(run_command, mine):
    mixers = "mine,softmax-mine(competition.memories_per_head=2),mine-too(kv_heads=2),mine+mine-too"
    code, out, _ = run_command("verify", "--mixers", mixers)
    assert code == 0 and re.search(r"\b(\d+) of \1 laws hold", out) and "mine+mine-too" in out
    (plan,) = choose("pair", mixers=mixers).plans
    plan.check()
    assert [arm.spec for arm in plan.arms()[:4]] == [to_json(zoo.get(mixer)) for mixer in mixers.split(",")]


def test_verify_checks_only_named_backends(run_command):
    code, out, _ = run_command("verify", "--mixers", "gla", "--backend", "torch, torch")
    assert code == 0 and {name for name in dispatch.BACKENDS if f"{name} in float64" in out} == {"torch"}


@pytest.fixture
def register(monkeypatch):
    """Adds a backend with a recurrence of its own."""

    def add(run):
        row = dispatch.BACKENDS["torch"]._replace(linear_attention=Kernel(run, lambda call: None))
        monkeypatch.setitem(dispatch.BACKENDS, "new", row)

    return add


def test_verify_names_no_precision_of_the_op(run_command, monkeypatch):
    """Whose checks have their own."""
    row = Row("linear_attention", "torch in float32", 0.0, 1e-5)
    monkeypatch.setattr("headrace.verification.verify.verify", lambda *given, **named: [row])
    out = run_command("verify", "--mixers", "linear_attention", "--device", "cpu").out
    assert out.endswith("1 of 1 laws hold on cpu\n")


def test_verify_exits_with_1_for_a_broken_law(run_command, register):
    def run(call):
        out, state = dispatch.BACKENDS["torch"].linear_attention.run(call)
        return 1.01 * out, state

    register(run)
    code, out, _ = run_command("verify", "--mixers", "gla", "--backend", "new")
    assert code == 1 and "laws hold" in out and "BROKEN" in out
    assert run_command("backends").out in out  # the versions of what was run


def test_verify_shows_the_error_of_a_backend(run_command, register):
    def run(call):
        raise RuntimeError("misaligned address in chunk_gla_fwd")

    register(run)
    code, out, _ = run_command("verify", "--mixers", "gla")
    assert code == 1 and "gla, new in float64: RuntimeError: misaligned address in chunk_gla_fwd" in out


def test_backends_and_version_are_printed(run_command):
    assert "torch: available" in run_command("backends")[1]
    assert run_command("--version")[1] == f"headrace {headrace.__version__}\n{run_command('backends')[1]}"


IDLE = {
    "softmax-retnet(competition.read=query)": "competition.read='query' scales q by one number per head",
    "softmax-gla(heads.count=1)": "a softmax over num_heads=1 head is always 1",
    "softmax-gla(heads.count=1,competition.memories_per_head=2)": None,
    "softmax-retnet": None,
}


@pytest.mark.parametrize("mixer", IDLE)
def test_ineffective_gates_are_warned_about_before_a_run(run_command, mixer):
    """The run then finds a file in place of its folder."""
    code, out, _ = run_command("compare", "--mixers", mixer, "--output", "empty.txt")
    notes = [line for line in out.splitlines() if line.startswith("Note: ")]
    assert code == 2 and len(notes) == (IDLE[mixer] is not None)
    assert all(note.startswith(f"Note: {mixer}: {IDLE[mixer]}") for note in notes)


def test_output_encoding_errors_are_one_sentence(refusal, saved_model, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))  # as with PYTHONIOENCODING=ascii
    said = refusal("generate", saved_model, "--prompt", "é", "--max-new-tokens", 1, "--device", "cpu")
    sentence = "the output has '\\xe9', which ascii cannot write; set PYTHONIOENCODING=utf-8"
    assert said.endswith(f"headrace: {sentence}\n")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_quantized_before_the_text(kind, succeeds, saved_model):
    words = ["--prompt", "a", "--max-new-tokens", 5, "--temperature", 0, "--threads", 1, "--device", "cpu", "--json"]
    made = json.loads(succeeds("generate", saved_model, *words, "--weights", kind).out)
    model, tokenizer = headrace.quantize(headrace.load(saved_model), kind), checkpoint.read_tokenizer(saved_model)
    ids = tokenizer("a").input_ids
    expected = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=5, pad_token_id=0)[0, len(ids) :]
    assert made["tokens"] == expected.tolist()
    assert load_on(saved_model, "cpu", kind).lm_head.stored.dtype is getattr(torch, kind)


def test_weights_need_a_cpu(saved_model, monkeypatch):
    monkeypatch.setattr(checkpoint, "on_device", lambda name: "cuda:1")
    with pytest.raises(headrace.InputError, match="--weights='int8' with --device='cuda:1'; expected the CPU"):
        load_on(saved_model, "cuda:1", "int8")
