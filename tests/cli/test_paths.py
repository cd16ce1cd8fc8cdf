"""Every command works in a folder, and on files, whose names are more than letters to a shell, a URL or a pattern."""

import json
import shlex
import shutil

import pytest

import tiny
from headrace.files import workers
from trained import arguments

assert workers  # so that conftest.py has workers of `compare` forked
pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries
ODD = "My [a] é 100% %20 # q? s* {x} & b;c ~"
SMALL = "--mixers gla --seeds 1 --steps 1 --length 8 --batch-size 2 --layers 1 --hidden-size 16 --heads 2 --workers 1"


@pytest.fixture(scope="module")
def home(tmp_path_factory, prepared):
    """A folder of that name with a text, prepared data, and a model; beside it one that a pattern of the name finds."""
    home = tmp_path_factory.mktemp("home") / ODD
    for folder in (home, home.with_name(ODD.replace("*", "X").replace("[a]", "a").replace("?", "y"))):
        (folder / "bench [1]").mkdir(parents=True)
        texts = ["she saw the sea", "a stone is a stone"] if folder == home else ["no"]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / "bench [1]" / "lambada_openai.jsonl").write_text(lines, "utf-8-sig")
        (folder / "a [b].txt").write_text("".join(f"It was the year {i}. " for i in range(60)))
    shutil.copytree(prepared, home / "data [1]")
    tiny.saved(tiny.build("gla", vocab_size=257, max_position_embeddings=64), home / "model [1]")
    tiny.saved(tiny.build("transformer", vocab_size=257).float(), home / "attention [1]")
    return home


COMMANDS = {  # words, in which "OUT" is what is written
    "prepare": "prepare 'a [b].txt' --tokenizer 'model [1]' --length 16 --held-out 0.05 --output OUT",
    "prepare by a file of a tokenizer": "prepare 'a [b].txt' --tokenizer 'model [1]/tokenizer.json' --length 16 "
    "--held-out 0.05 --output OUT",
    "generate": "generate 'model [1]' --file 'a [b].txt' --max-new-tokens 2",
    "inspect": "inspect 'model [1]' --file 'a [b].txt' --tokens 8 --output OUT",
    "convert": "convert 'model [1]' --to gla --output OUT",
    "retrofit": "retrofit 'model [1]' --output OUT",
    "linearize": "linearize 'attention [1]' --data 'data [1]' --steps 1 --held-out 1 --keep none --output OUT",
    "eval": "eval 'model [1]' --suite lambada_openai --data 'bench [1]' --output OUT",
    "compare": f"compare 'a [b].txt' --tokenizer 'model [1]/tokenizer.json' {SMALL} --output OUT",
}


def files_beside(home):
    return sorted(path for path in home.parent.rglob("*/*") if not path.is_relative_to(home))


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_accept_paths_with_special_characters(name, home, succeeds, monkeypatch):
    """What it reads is named from within the folder, what it writes from the root."""
    monkeypatch.chdir(home)
    out = home / f"out [{name}]"
    words = [out if word == "OUT" else word for word in shlex.split(COMMANDS[name])]
    beside = files_beside(home)
    succeeds(*words)
    assert out.exists() == ("OUT" in COMMANDS[name]) and beside == files_beside(home)
    if name == "eval":
        (result,) = out.glob("*/results.json")
        assert json.loads(result.read_text("utf-8"))["n-samples"]["lambada_openai"]["effective"] == 2


def test_training_accepts_paths_with_special_characters(home, succeeds, refusal, monkeypatch):
    """Trained, resumed, and plotted, with the logs of TensorBoard."""
    monkeypatch.chdir(home)
    words = arguments(home / "data [1]", home / "run [1]", tokens=128 * 6)
    words[-1] = "tensorboard"
    for _ in range(2):
        succeeds(*words)
    assert list((home / "run [1]").rglob("events.out.tfevents*"))
    succeeds("curves", "run [1]", "--output", "curves [1].png")
    assert (home / "curves [1].png").stat().st_size
    (home / "folder.png").mkdir()
    said = refusal("curves", "run [1]", "--output", "folder.png")
    assert said == "headrace: --output 'folder.png' cannot be written: Is a directory\n"


LONG = 300 * "x"


@pytest.mark.parametrize(
    "words",
    [f"generate {LONG} --prompt a", f"train {LONG}", f"verify {LONG}.py:a", f"zoo --plugin {LONG}.py",
     f"compare --output {LONG} {SMALL}", "generate MODEL --prompt a --max-new-tokens 1 --save-state loop/state"],
    ids=lambda words: words.split()[0],
)  # fmt: skip
def test_paths_that_no_file_can_have_are_one_sentence(words, home, refusal, monkeypatch):
    monkeypatch.chdir(home)
    (home / "loop").unlink(missing_ok=True)
    (home / "loop").symlink_to("loop")
    said = refusal(*("model [1]" if word == "MODEL" else word for word in shlex.split(words)))
    last = said.splitlines()[-1]
    ends = "too long for the name of a file", "name too long", "File exists"
    assert last.startswith("headrace: ") and last.endswith(ends), said
