"""The harness on our checkpoints and others': as computed by hand, on local files, resumed, and with failures named."""

import gzip
import json
import math
import os
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats as by_scipy
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from damage import flip
from headrace import HeadraceConfig, HeadraceForCausalLM, InputError
from headrace.cli import app as cli
from headrace.convert.checkpoint import read_tokenizer
from headrace.data.tokenizer import byte_level
from headrace.evaluation import report, tasks
from headrace.evaluation.checkpoint import read_checkpoint
from headrace.evaluation.run import Evaluation, EvaluationPlan, Machine, evaluate, run_item, scored
from headrace.evaluation.scores import Score, difference, scores, unigram, weight
from headrace.evaluation.tasks import HOME, Item, Rows, items
from headrace.files.results import read_result, short_names
from stored import record
from tiny import trained

LENGTH = 48
MACHINE = Machine("cpu", 3)
CHOICES = [{"text": "p", "label": "A"}, {"text": "q", "label": "B"}, {"text": "r", "label": "C"}]
ROWS = {
    "lambada_openai": [{"text": text} for text in ("she saw the sea", "a stone is a stone", "who are you now")],
    "piqa": [
        {"goal": f"open jar {n}", "sol1": "twist the lid", "sol2": "eat it " * (1 + n % 3), "label": n % 2}
        for n in range(6)
    ],
    "winogrande": [
        {"sentence": f"Ann met Bo so _ was glad {n}.", "option1": "Ann", "option2": "Bo", "answer": str(1 + n % 2)}
        for n in range(4)
    ],
    "hellaswag": [{"query": "Swim: A man dives. he", "endings": ["sinks.", "flies.", "Pays.", "is in."], "label": 0}],
    "arc_easy": [{"question": {"stem": "What is wet?", "choices": CHOICES}, "answerKey": "B"}],
}
PAGE = " = {0} = \n \n {0} is a thing , and it is {0} again . \n \n = = Part = = \n \n" + " It is ." * 4 + " \n"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, rows in ROWS.items():
        (folder / f"{name}_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "wiki.test.raw").write_text(" \n" + "".join(PAGE.format(title) for title in ("Sea", "Stone", "Jar")))
    return folder


def build(kind):
    tokenizer = byte_level()
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": LENGTH}
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, intermediate_size=48))
    else:
        small = {"initializer_range": 0.02}  # so that the two are hardly better than each other
        model = HeadraceForCausalLM(HeadraceConfig(mixer=kind, **sizes, **small, num_heads=4, intermediate_size=48))
    return trained(model).float(), tokenizer


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    for kind in ("softmax-gla", "llama"):
        for part in build(kind):
            part.save_pretrained(folder / kind)
    return {kind: str(folder / kind) for kind in ("softmax-gla", "llama")}


@torch.no_grad()
def likelihood(model, before, scored):
    """Of `scored` after `before`, both token ids: the plain computation, one row at a time."""
    ids = torch.tensor([before + scored])
    log_p = model(ids[:, :-1]).logits.double().log_softmax(-1)
    return log_p[0, len(before) - 1 :].gather(-1, torch.tensor(scored)[:, None]).sum().item()


def rolling(model, tokens, start):
    """Every token once, in windows; the last one reaches back as far as the context goes."""
    total = likelihood(model, [start], tokens[:LENGTH])
    for at in range(LENGTH, len(tokens), LENGTH):
        end = min(at + LENGTH, len(tokens))
        total += likelihood(model, tokens[end - LENGTH - 1 : at], tokens[at:end])
    return total


def test_nonfinite_scores_are_null_and_marked(checkpoints, data, tmp_path):
    """A model whose output is NaN, of which the harness would take the first answer."""
    broken = shutil.copytree(checkpoints["softmax-gla"], tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    name = next(name for name in weights if name.endswith("o_proj.weight"))
    save_file({**weights, name: weights[name] * torch.nan}, broken / "model.safetensors", {"format": "pt"})
    (broken / "checksums.json").unlink()
    plan, paths = EvaluationPlan("wikitext,piqa", data=str(data)), [checkpoints["softmax-gla"], str(broken)]
    for _ in range(2):  # from the model, and from the records
        found = evaluate(paths, plan, MACHINE, tmp_path / "out")
        report.report(found, short_names(paths, "checkpoint"), tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "broken" / "results.json").read_text("utf-8"), parse_constant=pytest.fail)
    for item, metric in (("wikitext", "word_perplexity"), ("piqa", "acc")):
        assert stored["results"][item][f"{metric},none"] is None
        assert stored["not_finite"][f"/results/{item}/{metric},none"] == "nan"
        assert math.isnan(scores(found.items["broken"][item])[metric].value)
    assert [row[-1] for row in report.table(found)] == ["not finite"] * len(report.table(found))
    judged = report.against_the_first(found)
    assert {one.verdict for one in judged} == {"a score is not finite"}


@pytest.mark.parametrize("kind", ["softmax-gla", "llama"])
def test_scores_are_those_of_a_plain_computation(kind, checkpoints, data, tmp_path):
    path = checkpoints[kind]
    plan = EvaluationPlan("wikitext,lambada_openai,piqa", data=str(data))
    found = evaluate([path], plan, MACHINE, tmp_path).items[kind]
    checkpoint = read_checkpoint(path, "cpu")
    model, encode = checkpoint.model, lambda text: checkpoint.tokenizer(text, add_special_tokens=False).input_ids
    start = checkpoint.tokenizer.eos_token_id

    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    pages = tasks.pages((data / "wiki.test.raw").read_text("utf-8"))
    expected = [rolling(model, encode(wikitext_detokenizer({"page": page})), start) for page in pages]
    kept = [row["scores"]["word_perplexity"] for row in found["wikitext"]["samples"]]
    assert [row[0] for row in kept] == pytest.approx(expected, rel=1e-5)
    perplexity = math.exp(-sum(expected) / sum(len(page.split()) + page.startswith(" ") + 1 for page in pages))
    assert scores(found["wikitext"])["word_perplexity"].value == pytest.approx(perplexity, rel=1e-5)
    assert found["wikitext"]["unigram"]["word_perplexity"] > 1

    texts = [row["text"].rsplit(" ", 1) for row in ROWS["lambada_openai"]]
    expected = [likelihood(model, encode(before), encode(" " + last)) for before, last in texts]
    assert [r["scores"]["perplexity"] for r in found["lambada_openai"]["samples"]] == pytest.approx(expected, rel=1e-5)

    right = {"acc": [], "acc_norm": []}
    for row in ROWS["piqa"]:
        before = encode(f"Question: {row['goal']}\nAnswer:")
        log_p = [likelihood(model, before, encode(" " + row[name])) for name in ("sol1", "sol2")]
        shares = [p / max(len(row[name]), 1) for p, name in zip(log_p, ("sol1", "sol2"), strict=True)]
        right["acc"].append(log_p.index(max(log_p)) == row["label"])
        right["acc_norm"].append(shares.index(max(shares)) == row["label"])
    theirs, ours = found["piqa"]["results"]["results"]["piqa"], scores(found["piqa"])
    for metric, expected in right.items():
        assert [row["scores"][metric] for row in found["piqa"]["samples"]] == expected
        assert ours[metric].value == pytest.approx(theirs[f"{metric},none"])
        assert ours[metric].stderr == pytest.approx(theirs[f"{metric}_stderr,none"])


def test_local_rows_have_the_stock_columns():
    row = tasks.hellaswag(ROWS["hellaswag"][0])
    assert (row["activity_label"], row["ctx_a"], row["ctx_b"]) == ("Swim", "A man dives.", "he")
    assert tasks.hellaswag({"query": "How to swim: [header] Dive.", "endings": [], "label": 0})["ctx_b"] == ""
    assert tasks.hellaswag({"query": "Draw: She sits. iPads help", "endings": [], "label": 0})["ctx_b"] == "iPads help"
    assert tasks.arc(ROWS["arc_easy"][0])["choices"] == {"text": ["p", "q", "r"], "label": ["A", "B", "C"]}


def test_code_in_a_folder_of_a_model_is_not_run(tmp_path):
    config = {"model_type": "unheard-of", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
    (tmp_path / "code.py").write_text(code + "from transformers import PretrainedConfig as Config\n")
    with pytest.raises(InputError, match="cannot be read"):
        read_checkpoint(str(tmp_path), "cpu")
    assert not (tmp_path / "ran").exists()


def test_missing_data_is_named_and_the_rest_runs(checkpoints, data, tmp_path):
    plan = EvaluationPlan("language", data=str(data), limit=2)
    found = evaluate([checkpoints["llama"]], plan, MACHINE, tmp_path)
    assert list(found.missing) == ["arc_challenge"]
    assert list(found.items["llama"]) == ["wikitext", "lambada_openai", "piqa", "hellaswag", "winogrande", "arc_easy"]
    assert next(report.findings(found)).startswith("arc_challenge was not run: ")
    whole = read_result(tmp_path / "llama" / "results.json")
    assert set(whole["results"]) == set(found.items["llama"])
    assert whole["results"]["winogrande"]["acc,none"] == scores(found.items["llama"]["winogrande"])["acc"].value
    with pytest.raises(InputError, match="no task of --suite='recall' can be run"):
        evaluate([checkpoints["llama"]], EvaluationPlan("recall", data=str(data)), MACHINE, tmp_path / "recall")


def test_recall_on_local_rows(checkpoints, tmp_path):
    text = "Ann was born in Rome.\nborn:"
    row = {"doc_id": "1", "key": "born", "text": text, "value": "Rome", "title": "", "context": ""}
    for name in ("swde", "squad_completion", "fda"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    plan, path = EvaluationPlan("recall", data=str(tmp_path)), checkpoints["softmax-gla"]
    brief = shutil.copytree(path, tmp_path / "brief")  # whose settings would end answers before the harness does
    settings = {"max_new_tokens": 1, "stop_strings": ["<end>"]}
    (brief / "generation_config.json").write_text(json.dumps(settings))
    found = evaluate([path, str(brief)], plan, MACHINE, tmp_path / "out")
    lengths = {name: record["max_length"] for name, record in found.items["softmax-gla"].items()}
    assert lengths == {"swde": 4096, "squad_completion": 4096, "fda": 4096}
    assert ["fda", "contains", "1", "0.0 %", "0.0 %*", "0.0 %*"] in report.table(found)
    (answer,), (same,) = (records["fda"]["samples"][0]["answer"] for records in found.items.values())
    assert answer == same and len(answer) > 1


def test_finished_evaluations_are_not_repeated(checkpoints, data, tmp_path, monkeypatch):
    plan, path = EvaluationPlan("winogrande,lambada_openai", data=str(data), limit=2), checkpoints["llama"]
    first = evaluate([path], plan, MACHINE, tmp_path)
    (tmp_path / "llama" / "items" / "winogrande.json").unlink()
    kept = tmp_path / "llama" / "items" / "lambada_openai.json"
    written = kept.stat().st_mtime_ns
    again = evaluate([path], plan, MACHINE, tmp_path)
    assert kept.stat().st_mtime_ns == written
    assert again.items["llama"]["winogrande"]["samples"] == first.items["llama"]["winogrande"]["samples"]
    monkeypatch.setattr("headrace.evaluation.run.read_checkpoint", lambda *_: pytest.fail("loaded for nothing"))
    evaluate([path], plan, MACHINE, tmp_path)
    with pytest.raises(InputError, match="holds another run"):
        evaluate([path], EvaluationPlan("piqa", data=str(data)), MACHINE, tmp_path)


def test_a_checkpoint_that_changed_is_evaluated_again(checkpoints, data, tmp_path):
    """Of the same size and time."""
    path = Path(shutil.copytree(checkpoints["llama"], tmp_path / "llama-copy"))
    plan, weights = EvaluationPlan("winogrande", data=str(data), limit=2), path / "model.safetensors"
    run = lambda: evaluate([str(path)], plan, MACHINE, tmp_path / "out").items["llama-copy"]["winogrande"]  # noqa: E731
    before, at = run()["fingerprint"], weights.stat()
    flip(weights)
    os.utime(weights, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert run()["fingerprint"] != before


def test_rows_that_changed_are_evaluated_again(checkpoints, data, tmp_path):
    plan = EvaluationPlan("winogrande", data=str(shutil.copytree(data, tmp_path / "rows")), limit=2)
    run = lambda: evaluate([checkpoints["llama"]], plan, MACHINE, tmp_path / "out").items["llama"]["winogrande"]  # noqa: E731
    first = run()
    (file,) = (tmp_path / "rows").rglob("winogrande*")
    file.write_text(file.read_text().replace("Ann", "Eve"))
    hashes = [[sample["doc_hash"] for sample in record["samples"]] for record in (first, run())]
    assert hashes[0] != hashes[1]


def test_the_command_writes_a_report(checkpoints, data, tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.files.environment.present_device", lambda: torch.device("mps"))  # beside the CPU
    asked = ["--suite", "piqa,lambada_openai", "--data", str(data), "--limit", "5", "--output", str(tmp_path)]
    asked += ["--device", "cpu"]
    ran = CliRunner().invoke(cli.app, ["eval", *checkpoints.values(), *asked])
    assert ran.exit_code == 0, ran.output
    page = (tmp_path / "report.html").read_text("utf-8")
    for text in (
        *("acc_norm", "too few rows", "baseline", "lm-evaluation-harness 0.", "the first 5 rows of each task"),
        *("llama over softmax-gla", "95 % interval", "<svg"),
    ):
        assert text in page
    assert "too few rows" in ran.output
    lines = pandas.read_csv(tmp_path / "scores.csv").set_index(["task", "metric", "model"])
    assert len(lines) == 2 * len({name[:2] for name in lines.index})
    for model in checkpoints:
        theirs = read_result(tmp_path / model / "results.json")["results"]
        for (task, metric, _), line in lines.xs(model, level="model", drop_level=False).iterrows():
            own = theirs[task]
            assert line.score == pytest.approx(own[f"{metric},none"]) and line.rows == own["sample_len"]
            assert line.higher_is_better == (metric != "perplexity")
    record = read_result(tmp_path / "llama" / "items" / "piqa.json")
    assert record["environment"]["device"] == "cpu" and "mps" not in page


def test_the_page_names_each_machine_of_its_records_once(tmp_path):
    made = {"max_length": 8, "trained_length": 8, "seconds": 1.0}
    places = {"a": ("cpu", 1), "b": ("mps", 1), "c": ("cpu", 2)}
    own = {
        name: {"task": record([0.5, 1.0]) | made | {"environment": {"device": device, "threads_per_arm": threads}}}
        for name, (device, threads) in places.items()
    }
    page = report.report(Evaluation(EvaluationPlan("x"), own, {}), dict.fromkeys(own, "folder"), tmp_path)
    assert [one["device"] for one in page.environments] == ["cpu", "mps"]


def test_needles_are_rows_by_length():
    assert [item.name for item in items("niah_single_1", [1024, 2048])] == ["niah_single_1@1024", "niah_single_1@2048"]
    assert len(items("needle,piqa", [1024])) == 4


def test_a_suite_is_checked_before_the_hub_is_asked(checkpoints, monkeypatch):
    monkeypatch.setattr("headrace.cli.evaluate.ask_hub", lambda: pytest.fail("it was asked"))
    ran = CliRunner().invoke(cli.app, ["eval", str(checkpoints["llama"]), "--suite", "nope"])
    assert isinstance(ran.exception, InputError) and "--suite='nope'" in str(ran.exception)


def test_a_spoilt_checkpoint_of_another_library_is_refused(checkpoints, tmp_path):
    """Of ours: tests/hf/test_checkpoints.py."""
    folder = shutil.copytree(checkpoints["llama"], tmp_path / "spoilt")
    weights = folder / "model.safetensors"
    save_file({name: x for name, x in load_file(weights).items() if "lm_head" not in name}, weights, {"format": "pt"})
    with pytest.raises(InputError, match=r"is not a causal language model: the weights of lm_head\.weight are missing"):
        read_checkpoint(str(folder), "cpu")
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match="cannot be read"):
        read_checkpoint(str(folder), "cpu")


@pytest.mark.parametrize(
    ("task", "row", "sentence"),
    [
        ("piqa", "[1]", "line 1 is not a JSON object"),
        ("piqa", "{", "line 1 is not JSON"),
        ("piqa", '{"goal": "a"}', "has goal; expected goal, sol1, sol2, label, as piqa has"),
        ("hellaswag", '{"text": "a"}', "expected activity_label, ctx_a"),
        ("hellaswag", '{"query": null, "endings": [], "label": 0}', "expected activity_label, ctx_a"),
    ],
)
def test_malformed_local_rows_are_refused(task, row, sentence, tmp_path):
    (tmp_path / f"{task}.jsonl").write_text(row + "\n")
    with pytest.raises(InputError, match=sentence):
        tasks.read(task, tmp_path)


def test_rows_are_not_those_of_a_task_with_a_longer_name(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "index", lambda: SimpleNamespace(all_subtasks=["piqa", "piqa_ar", "mmlu_pro"]))
    (tmp_path / "piqa_ar.jsonl").write_text("{}")
    assert tasks.file_of("piqa", tmp_path) is None
    for name in ("piqa_some.jsonl.gz", "piqa.jsonl"):
        (tmp_path / name).write_text("{}")
        assert tasks.file_of("piqa", tmp_path) == tmp_path / name
    assert tasks.file_of("piqa_ar", tmp_path).name == "piqa_ar.jsonl"


def test_rows_of_training_are_read_last(tmp_path):
    for name in ("hellaswag_train.jsonl", "hellaswag_val.jsonl"):
        (tmp_path / name).write_text("{}")
        assert tasks.file_of("hellaswag", tmp_path) == tmp_path / name


@pytest.mark.parametrize("name", ["wiki.test.raw.gz", "test.raw.txt.gz"])
def test_wikitext_may_be_compressed(name, tmp_path):
    (tmp_path / name).write_bytes(gzip.compress(PAGE.format("Sea").replace("\n", "\r\n").encode()))
    assert tasks.read("wikitext", tmp_path) == [{"page": PAGE.format("Sea")}]


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("piqa.jsonl", b'{"goal": "\xe9"}', "is not UTF-8: byte 10 is 0xe9"),
        ("piqa.jsonl.gz", b"{}", "cannot be read: Not a gzipped file"),
        ("piqa.jsonl.gz", gzip.compress(b"{}", mtime=0)[:-9], "cannot be read: EOFError"),
        ("wiki.test.raw", b" = caf\xe9 = \n", "is not UTF-8: byte 6 is 0xe9"),
    ],
)
def test_unreadable_local_files_are_refused(name, data, sentence, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=sentence):
        tasks.read("wikitext" if name == "wiki.test.raw" else "piqa", tmp_path)


def test_every_task_is_given_the_tokenizer(monkeypatch):
    """Without it the harness makes no rows of those tasks of RULER that are not of the suite `needle`."""
    given = []
    monkeypatch.setattr("headrace.evaluation.run.TaskManager", lambda metadata, **_: given.append(metadata) or 1 / 0)
    checkpoint = SimpleNamespace(path="name", tokenizer=None, trained_length=64, harness=lambda *_: None)
    for item in Item("ruler_vt", HOME / "ruler/vt.yaml"), Item("niah_single_1", HOME / "ruler/niah_single_1.yaml", 99):
        with pytest.raises(ZeroDivisionError):
            run_item(Rows(item, item.stock.parent), None, lambda: checkpoint, EvaluationPlan("ruler_vt"), MACHINE)
    assert given == [{"tokenizer": "name"}, {"tokenizer": "name", "max_seq_lengths": [99]}]


def test_the_harness_runs_no_code_of_a_tokenizer(tmp_path):
    """For the rows of RULER it reads the tokenizer itself, with trust_remote_code=True."""
    byte_level().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    code = {"auto_map": {"AutoTokenizer": [None, "code.Tokens"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | code))
    checkpoint = SimpleNamespace(path="name", tokenizer=read_tokenizer(tmp_path))
    rows = Rows(Item("ruler_vt", HOME / "ruler/vt.yaml"), HOME)
    with pytest.raises(InputError, match="would run code of the tokenizer of 'name' for ruler_vt"):
        run_item(rows, None, lambda: checkpoint, EvaluationPlan("ruler_vt"), MACHINE)


@pytest.mark.parametrize("kind", ["checkpoint", "run"])
def test_names_of_folders_are_short_and_differ(tmp_path, monkeypatch, kind):
    (tmp_path / "run" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run")
    assert short_names(["model"], kind) == {"run": "model"} and short_names(["."], kind) == {"run": "."}
    monkeypatch.chdir("model")
    assert short_names([".."], kind) == {"run": ".."} and short_names(["."], kind) == {"run": "."}
    assert short_names(["runs/a/model", "b"], kind) == {"a": "runs/a/model", "b": "b"}
    assert short_names(["x/a", "y/a"], kind) == {"x/a": "x/a", "y/a": "y/a"}
    with pytest.raises(InputError, match=f"a {kind} is given twice; expected each {kind} once"):
        short_names(["a", "a/"], kind)


def test_models_whose_names_are_spelt_alike_have_results_of_their_own(data, tmp_path, monkeypatch):
    folders = []
    first_of = lambda folder, claim, points, *_: folders.append(points[0].path.parts[0]) or [{"results": {}}]  # noqa: E731
    monkeypatch.setattr("headrace.evaluation.run.engine.run", first_of)
    monkeypatch.setattr("headrace.evaluation.run.fingerprint", str)
    evaluate(["x/a", "y/a", "x_a"], EvaluationPlan("piqa", data=str(data)), MACHINE, tmp_path)
    assert len(set(folders)) == 3 and "y_a" in folders and "x_a" not in folders


def test_a_missing_checkpoint_is_refused_before_any_is_evaluated(data, tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.evaluation.run.engine.run", lambda *_: pytest.fail("the first was evaluated"))
    (tmp_path / "config.json").write_text("{}")
    sentence = "'no/such/place' is not a local folder and cannot be loaded from the Hub: expected"
    with pytest.raises(InputError, match=sentence):
        evaluate([str(tmp_path), "no/such/place"], EvaluationPlan("piqa", data=str(data)), MACHINE, tmp_path / "out")


def test_rows_that_cannot_be_downloaded_are_one_sentence(checkpoints, tmp_path, monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach 'Rowan/hellaswag' on the Hub")

    monkeypatch.setattr("lm_eval.simple_evaluate", unreachable)
    with pytest.raises(InputError, match="rows of hellaswag cannot be downloaded: Couldn't reach 'Rowan/hellaswag'"):
        evaluate([str(checkpoints["llama"])], EvaluationPlan("hellaswag", limit=1), MACHINE, tmp_path)


@pytest.mark.parametrize("max_length", [2, 3])
def test_answers_longer_than_the_context_are_one_sentence(max_length, checkpoints, data, tmp_path):
    plan = EvaluationPlan("piqa", data=str(data), max_length=max_length)
    with pytest.raises(InputError, match=f"the answers of piqa do not fit in a context of {max_length} tokens"):
        evaluate([checkpoints["softmax-gla"]], plan, MACHINE, tmp_path)
    evaluate([checkpoints["softmax-gla"]], replace(plan, limit=1, max_length=None), MACHINE, tmp_path)  # is free again


def test_a_token_that_the_model_lacks_is_one_sentence(checkpoints, data, tmp_path):
    folder = shutil.copytree(checkpoints["llama"], tmp_path / "more")
    tokenizer = byte_level()
    tokenizer.add_tokens(["jar"])
    tokenizer.save_pretrained(folder)
    sentence = f"the prompt has the token {len(tokenizer) - 1}; the model has {len(tokenizer) - 1}: its tokenizer"
    with pytest.raises(InputError, match=sentence):
        evaluate([str(folder)], EvaluationPlan("piqa", data=str(data)), MACHINE, tmp_path / "out")


def test_the_docs_have_the_columns_of_local_rows():
    page = (Path(__file__).parents[2] / "docs" / "understand.md").read_text("utf-8")
    for task, columns in tasks.STOCK.items():
        (row,) = re.findall(rf"^\| .*`{task}(?:_NAME)?`.*$", page, re.MULTILINE)
        assert ", ".join(columns) in row, task


def test_an_article_begins_with_its_title_and_not_with_a_section():
    text = " = One = \n\n Some text .\n\n = = Section = = \n\n More .\n = Two words = \n\n A line with = in it \n"
    assert tasks.pages(text) == [text[: text.index(" = Two")], text[text.index(" = Two") :]]


@pytest.mark.slow(seconds=25)
def test_needles_in_local_essays_need_no_download(checkpoints, tmp_path, monkeypatch, capsys):
    """S-NIAH-2 and 3, where nltk has no punkt_tab: the needle stands between two sentences."""
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(nltk, "download", lambda *_: pytest.fail("a download was tried"))
    made = cache(tasks.without_tables.__wrapped__)
    monkeypatch.setattr(tasks, "without_tables", made)
    folder = tmp_path / "data" / "paul_graham_essays"
    folder.mkdir(parents=True)
    for name in "ab":
        (folder / f"{name}.txt").write_text("One is a way. So it is! Do we go on? " * 60)
    plan = EvaluationPlan("niah_single_2,niah_single_3", (1024,), str(tmp_path / "data"), limit=1)
    found = evaluate([checkpoints["softmax-gla"]], plan, MACHINE, tmp_path / "out")
    assert not found.missing and list(found.items["softmax-gla"]) == ["niah_single_2@1024", "niah_single_3@1024"]
    assert all(len(record["samples"]) == 1 for record in found.items["softmax-gla"].values())
    assert capsys.readouterr().err.count(tasks.UNTRAINED) == 1
    sentences = nltk.sent_tokenize("It is 3.5 now. So it is! Do we go on? No.")
    assert sentences == ["It is 3.5 now.", "So it is!", "Do we go on?", "No."]
    made().cleanup()


# --- numbers ---------------------------------------------------------------------------------------------------------
def test_a_picture_shows_the_interval_of_a_difference():
    a, b = torch.rand(2, 50, dtype=torch.float64)
    records = {name: record(side.tolist()) for name, side in (("a", a), ("b", b))}
    (axes,) = report.forest([difference("b", "a", "piqa", "acc", records)]).axes
    (bar,) = axes.containers
    gains = 100 * (b - a).numpy()
    expected = by_scipy.t.interval(0.95, 49, gains.mean(), by_scipy.sem(gains))
    assert bar.lines[2][0].get_segments()[0][:, 0] == pytest.approx(expected)


def test_a_model_has_one_colour_in_all_panels_and_a_difference_without_a_number_no_place(tmp_path):
    """b reads other rows of a needle task than a: its accuracy is in no panel."""
    a, b, c = torch.rand(3, 50, dtype=torch.float64).tolist()
    accuracies = {"a": record(a), "b": record([math.nan, *b[1:]]), "c": record(c)}
    losses = {"a": a, "b": b, "c": c}
    losses = {name: record([[-x, 1.0] for x in own], "word_perplexity") for name, own in losses.items()}
    unknown = difference("b", "a", "piqa", "acc", accuracies)
    section = report.differences([unknown], tmp_path)
    assert not section.pictures and section.rows[0][-1] == "a score is not finite"
    known = [difference(name, "a", "wikitext", "word_perplexity", losses) for name in "bc"]
    figure = report.forest([*known, difference("c", "a", "piqa", "acc", accuracies)])
    colours = [{bar.get_label(): bar.lines[0].get_color() for bar in ax.containers} for ax in figure.axes]
    assert colours[0] == colours[1] and colours[0]["b"] != colours[0]["c"]
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["b", "c"]
    assert len(figure.axes[0].get_yticks()) == 1


def test_perplexities_and_bits_of_a_text():
    """Two rows of 3 and 5 bytes, −2 and −6 nats: 1 nat a byte."""
    rows = [(-2.0, 3.0), (-6.0, 5.0)]
    bits, perplexity = Score("bits_per_byte", rows), Score("byte_perplexity", rows)
    assert bits.value == pytest.approx(1 / math.log(2)) and perplexity.value == pytest.approx(math.e)
    error = math.sqrt(((-6 / 5 + 1) ** 2 + (-2 / 3 + 1) ** 2) / 2)  # by the jackknife: the means without either row
    assert bits.stderr == pytest.approx(error / math.log(2)) and perplexity.stderr == pytest.approx(math.e * error)
    assert [str(Score(name, [(-1.0, 1.0)])) for name in ("acc", "word_perplexity")] == ["-100.0 %", "2.718"]
    assert str(perplexity) == "2.718 ± 0.75"


def test_the_metrics_of_other_lengths_of_a_needle_task_are_left_out():
    samples = [{"scores": {"1024": -1.0, "2048": found}} for found in (1.0, 0.0)]
    assert {name: score.value for name, score in scores({"samples": samples}).items()} == {"2048": 0.5}


def test_only_means_of_rows_are_scores():
    """Of F1 the rows are labels and guesses, of BLEU texts, of a ROUGE numbers to 100; of the error rate less is
    better. A row comes once for each filter of answers."""
    rows = [
        {"doc_id": 0, "doc_hash": "a", "arguments": [("p", "q")], "filtered_resps": ["x"], "filter": kind, **own,
         "metrics": list(own)}
        for kind, right in (("strict", (1, 0, 1)), ("loose", (True, True, True)))
        for own in ({"acc": x, "f1": (x, 1), "bleu": ("a", "b"), "rouge1_max": 35.0, "error": 0.5} for x in right)
    ]  # fmt: skip
    better = {"item": {"acc": True, "f1": True, "error": False}}
    kept = record([]) | {"samples": [scored(row) for row in rows], "results": {"higher_is_better": better}}
    found = {name: (score.value, len(score.rows)) for name, score in scores(kept).items()}
    assert found == {"acc,strict": (pytest.approx(2 / 3), 3), "acc,loose": (1.0, 3)}
    unclear = record([]) | {"samples": [{"scores": kept["samples"][0]["scores"] | {"bleu,strict": 0.0}}]}
    items = {"model": {"item": kept}, "other": {"item": unclear}}
    evaluation = SimpleNamespace(items=items, missing={})
    (sentence,) = report.findings(evaluation)
    assert sentence.startswith("acc,loose, bleu,loose, bleu,strict, error,loose, error,strict, f1,loose, f1,strict")
    assert report.metrics(evaluation, "item") == ["acc,strict"]


def test_a_task_with_examples_in_its_prompts_is_not_run_on_local_rows(tmp_path):
    """All splits are the rows of one file, so that the tested row with its answer could be an example."""
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "1 + 1", "answer": "#### 2"}\n')
    with pytest.raises(tasks.Missing, match="its prompts have examples"):
        tasks.localize(Item("gsm8k", HOME / "gsm8k" / "gsm8k.yaml"), tmp_path, tmp_path / "scratch")


def test_models_that_read_a_task_in_other_contexts_are_named():
    items = {n: {"same": record([0.5]), "other": record([0.5]) | {"max_length": n}} for n in (4, 8)}
    (sentence,) = report.findings(SimpleNamespace(items=items, missing={}))
    assert sentence == "The models' contexts differ in other (see Settings); --max-length gives them one."


def test_each_model_has_the_unigram_of_its_own_tokens():
    unigrams = {"a": 50.0, "b": 60.0, "c": 50.0}
    items = {
        name: {"text": record([(-3.0, 1.0), (-4.0, 1.0)], "word_perplexity", unigram={"word_perplexity": value})}
        for name, value in unigrams.items()
    }
    (row,) = report.table(SimpleNamespace(items=items))
    assert row[:4] == ["text", "word_perplexity", "2", "50, 60"]


def test_choices_that_are_also_asked_without_their_question_count_once():
    """Of acc_mutual_info, for which the harness asks for each choice twice."""
    asked = [("q", choice) for choice in "abcd"] + [("", choice) for choice in "abcd"]
    row = {"doc_id": 0, "doc_hash": "a", "arguments": asked, "filtered_resps": [], "filter": "none"}
    both = row | {"metrics": ["acc", "acc_mutual_info"], "acc": 1.0, "acc_mutual_info": 0.0}
    assert [scored(each)["choices"] for each in (both, row | {"metrics": ["acc"], "acc": 1.0})] == [4, 8]


def test_the_unigram_is_that_of_the_evaluated_rows():
    """Tokens a a b | a c and | c a, those after the bar scored: of 7 tokens 4 are a and 2 are c; weights of 4 and 2."""
    samples = [
        {"arguments": [text], "metrics": ["word_perplexity", "acc"], "word_perplexity": (-1.0, words)}
        for text, words in ((("aab", "ac"), 4), (("ca",), 2))
    ]
    found = unigram(samples, SimpleNamespace(tok_encode=lambda text: list(map(ord, text))))
    assert found == {"word_perplexity": pytest.approx(math.exp(-2 * (math.log(4 / 7) + math.log(2 / 7)) / 6))}
    assert (weight(-3.0), unigram([{"metrics": ["acc"]}], None)) == (1.0, {})
    long = [{"arguments": [("ab" * 600,)], "metrics": ["perplexity"], "perplexity": -1.0}]
    assert unigram(long, SimpleNamespace(tok_encode=list)) == {"perplexity": math.inf}
