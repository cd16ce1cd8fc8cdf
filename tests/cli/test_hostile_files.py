"""Files that no program of ours has written: each is refused by one sentence or read, without a traceback or a hang."""

import errno
import json
import os
import shutil

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import tiny
from groups import refused
from headrace import HeadraceForCausalLM, InputError, load, load_state
from headrace.cli.console import printable
from headrace.convert import export_checkpoint, import_checkpoint
from headrace.convert.checkpoint import read_tokenizer
from headrace.data import open_data, tokenizer
from headrace.data.tokenizer import byte_level
from headrace.files.checks import RECORDED, damage, misfit, read_json, read_record
from headrace.files.processes import locked
from headrace.files.provenance import MADE

pytestmark = pytest.mark.filterwarnings("ignore")
HUGE = 10**400  # does not fit a float
VALUES = {
    "null": None, "true": True, "negative": -1, "zero": 0, "many": 10**9, "huge": HUGE, "fraction": 0.5,
    "infinite": float("inf"), "text": "evil", "list": [1, "a"], "object": {"a": {"b": [None]}},
}  # fmt: skip
# Fields that transformers reads from any config.json, beside those that `save_pretrained` has written.
ADDED = (
    "torch_dtype", "label2id", "quantization_config", "attn_implementation", "experts_implementation", "num_labels",
    "problem_type", "_name_or_path", "num_attention_heads",
)  # fmt: skip
# With values of transformers that raise where the field is read, or later where the model is used.
KNOWN = ("dtype", "id2label", "quantization_config", "attn_implementation", "is_encoder_decoder", "return_dict")
SIZES = {"vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 1, "num_heads": 2, "intermediate_size": 8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint of ours, and one in the format of Llama."""
    made = {name: tmp_path_factory.mktemp("models") / name for name in ("ours", "llama")}
    model = tiny.build("transformer", **SIZES).float()
    model.save_pretrained(made["ours"])
    export_checkpoint(model, "llama", made["llama"])
    return made


def hostile(fields):
    """Each field with three of the values in turn, those of KNOWN with all."""
    values = list(VALUES.values())
    for i, field in enumerate(fields):
        for value in values if field in KNOWN else [values[(3 * i + j) % len(values)] for j in range(3)]:
            yield field, value


def leaves(value, path=()):
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from leaves(value[key], (*path, key))
    yield path


def replaced(value, path, new):
    if not path:
        return new
    value = value.copy()
    value[path[0]] = replaced(value[path[0]], path[1:], new)
    return value


def used(folder):
    with torch.no_grad():
        load(folder).generate(torch.tensor([[1, 2, 3]]), max_new_tokens=1, pad_token_id=0)


@pytest.mark.slow(seconds=15)
@pytest.mark.parametrize(("kind", "use"), [("ours", used), ("llama", import_checkpoint)])
def test_hostile_config_fields_are_refused_or_loaded(kind, use, folders, tmp_path):
    folder = shutil.copytree(folders[kind], tmp_path / kind)
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    inner = [where for where in leaves(whole) if len(where) > 1]
    cases = [({**whole, field: value}, field) for field, value in hostile([*whole, *ADDED])]
    cases += [(replaced(whole, where, [*VALUES.values()][i % len(VALUES)]), where) for i, where in enumerate(inner)]
    sentences = 0
    for content, where in cases:
        path.write_text(json.dumps(content))
        try:
            use(folder)
        except InputError as error:
            sentences += 1
            assert str(folder) in str(error) and "\n" not in str(error), (where, error)
    assert sentences > len(cases) / 3


@pytest.mark.parametrize("field", ["num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size"])
@pytest.mark.parametrize("count", [10**9, HUGE])
@pytest.mark.parametrize(("kind", "read"), [("ours", load), ("llama", import_checkpoint)])
def test_sizes_larger_than_the_weights_are_refused_before_allocation(kind, read, field, count, folders, tmp_path):
    folder = shutil.copytree(folders[kind], tmp_path / kind)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: count}))
    assert len(refused(lambda: read(folder))) < 500


@pytest.mark.parametrize("name", ["temperature", "top_k", "eos_token_id", "max_length"])
def test_hostile_generation_settings_are_named(name, folders, tmp_path):
    folder = shutil.copytree(folders["ours"], tmp_path / "ours")
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: "evil"}))
    assert f"{name}='evil'; expected" in refused(lambda: load(folder))


# --- JSON files of ours ----------------------------------------------------------------------------------------------

CONTENTS = ["null", "3", '"evil"', "evil", "", "[" * 100_000, "[1]", '{"a": null}', '{"a": [1]}', '{"a": {"bytes": 1}}']


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: content[:20])
@pytest.mark.parametrize(("form", "own"), [(RECORDED, "{}"), (MADE, "[]"), ({"length": int}, '{"length": 3}')])
def test_malformed_json_is_one_sentence(content, form, own, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(content)
    sentence = refused(lambda: read_json(path, form))
    assert str(path) in sentence and "\n" not in sentence and len(sentence) < 400
    path.write_text(own)
    assert read_json(path, form) == json.loads(own)
    path.unlink()
    assert "cannot be read: No such file" in refused(lambda: read_json(path))


@pytest.mark.parametrize(
    ("value", "form", "wrong"),
    [
        ({"a": 1}, {"a": int, "b?": str}, None), ({"a": 1, "b": 2}, {"a": int, "b?": str}, "'b' is 2, not a text"),
        ({"a": True}, {"a": int}, "'a' is true, not an integer"),
        ({"a": HUGE}, {...: int}, "which has more than 64 bits"), ({}, {"a": None}, "it has no 'a'"),
        ([1, 2.5, None], [(float, None)], None), ([1, "x"], [float], 'item 1 of it is "x", not a number'),
        (None, (str, None), None),
    ],
)  # fmt: skip
def test_schema_mismatch_is_named(value, form, wrong):
    result = misfit(value, form)
    assert result is None if wrong is None else wrong in result


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret"])
def test_checksums_cannot_name_files_outside_the_folder(name, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a").mkdir()
    (tmp_path / "secret").write_text("mine")
    recorded = {name: {"bytes": 4, "sha256": "0"}}
    (folder / "checksums.json").write_text(json.dumps(recorded))
    assert f"it names {name!r}, which is outside the folder" in refused(lambda: read_record(folder / "checksums.json"))
    assert "outside the folder" in damage(folder, recorded)


def test_checkpoint_marker_cannot_delete_files_outside(tmp_path):
    from headrace.training import checkpoints

    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "checkpoint-1" / checkpoints.MARKER).write_text(json.dumps({"../mine.txt": 4}))
    assert "outside the folder" in refused(lambda: checkpoints.delete(tmp_path / "checkpoint-1"))
    assert "outside the folder" in refused(lambda: checkpoints.newest(tmp_path)) and (tmp_path / "mine.txt").exists()


@pytest.mark.parametrize("content", ["null", "[]", "{}", '{"length": "x"}', '{"sources": 3}', "[" * 100_000])
def test_malformed_manifest_is_refused(content, tmp_path):
    (tmp_path / "manifest.json").write_text(content)
    sentence = refused(lambda: open_data(tmp_path))
    assert "is not a folder written by `headrace prepare`" in sentence and "\n" not in sentence


def test_hostile_tokenizers_are_refused_or_loaded(tmp_path):
    byte_level().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = tmp_path / name
        own = path.read_text()
        whole = json.loads(own)
        contents = ["null", "[]", "3", "{}", *(json.dumps({**whole, f: v}) for f, v in hostile(whole))]
        for content in contents:
            path.write_text(content)
            try:
                read_tokenizer(tmp_path)("It was")
            except InputError as error:
                assert "has no readable tokenizer" in str(error)
        path.write_text(own)


READERS = {"ours": load, "llama": import_checkpoint}
needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("place", ["../outside.safetensors", "{folder}/../outside.safetensors"])
def test_index_of_weights_cannot_name_files_outside_the_folder(kind, place, folders, tmp_path):
    folder = shutil.copytree(folders[kind], tmp_path / kind, ignore=shutil.ignore_patterns("checksums.json"))
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    names = load_file(tmp_path / "outside.safetensors")
    place = place.format(folder=folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, place)}))
    assert f"names {place!r}, which is outside the folder" in refused(lambda: READERS[kind](folder))


@needs_pipes
@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("name", ["model.safetensors", "part/weights.safetensors", "generation_config.json"])
def test_pipes_in_a_folder_are_refused_unread(kind, name, folders, tmp_path):
    folder = shutil.copytree(folders[kind], tmp_path / kind, ignore=shutil.ignore_patterns("checksums.json"))
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    if "/" in name:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert f"{name}' is not a regular file" in refused(lambda: READERS[kind](folder))


@needs_pipes
def test_pipes_for_tokenizers_and_states_are_refused_unread(folders, tmp_path):
    os.mkfifo(tmp_path / "tokenizer.json")
    for read in (read_tokenizer, lambda path: tokenizer.load(str(path))):
        assert "tokenizer.json' is not a regular file" in refused(lambda read=read: read(tmp_path))
    assert "is not a regular file" in refused(lambda: load_state(tmp_path / "tokenizer.json", load(folders["ours"])))


def test_links_to_weights_are_followed(folders, tmp_path):
    """As in the Hub's cache."""
    folder = shutil.copytree(folders["ours"], tmp_path / "snapshot", ignore=shutil.ignore_patterns("checksums.json"))
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to("../blob")
    assert load(folder).config.vocab_size == SIZES["vocab_size"]


# --- what reaches the terminal ---------------------------------------------------------------------------------------


def test_control_characters_are_escaped_on_the_terminal(folders, tmp_path, run_command):
    folder = shutil.copytree(folders["ours"], tmp_path / "ours")
    (folder / "checksums.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"\x1b[2Jevil\x07\u202e": torch.zeros(1)}, folder / "model.safetensors", {"format": "pt"})
    message = run_command("retrofit", folder, "--output", tmp_path / "out").err
    assert r"\x1b[2Jevil\x07\u202e" in message and not {"\x1b", "\x07", "\u202e"} & {*message}
    assert printable("größe 大\n") == "größe 大\n"


# --- what is removed or full -----------------------------------------------------------------------------------------


def test_full_disk_while_saving_weights_is_one_sentence(folders, tmp_path, monkeypatch, refusal):
    def full(*arguments, **options):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(HeadraceForCausalLM, "save_pretrained", full)
    said = refusal("convert", folders["llama"], "--output", tmp_path / "out")
    named = f"--output {str(tmp_path / 'out')!r}, or what is printed, cannot be written"
    assert f"{named}: {os.strerror(errno.ENOSPC)}" in said and not any(tmp_path.iterdir())


@pytest.mark.skipif(not os.path.exists("/proc/self"), reason="no folder in which nobody can write")
def test_a_state_that_cannot_be_written_is_one_sentence(saved_model, refusal):
    said = refusal("generate", saved_model, "--prompt", "a", "--max-new-tokens", 1, "--save-state", "/proc/new")
    assert f"--save-state '/proc/new' cannot be written: {os.strerror(errno.ENOENT)}" in said


def test_removed_output_folder_is_one_sentence(tmp_path):
    def write():
        with locked(tmp_path / "out"):
            shutil.rmtree(tmp_path / "out")
            (tmp_path / "out" / "report.html").write_text("")

    assert "out' was removed while the command wrote to it" in refused(write)
    with pytest.raises(FileNotFoundError), locked(tmp_path / "out"):
        os.stat(tmp_path / "missing")
