"""Models in programs of the Hugging Face world that do not import headrace, or that train them by their own loop."""

import json

import pytest
import torch
import transformers
from datasets import Dataset

import fresh
import tiny
from groups import free_port
from headrace import HeadraceForCausalLM, InputError, load
from headrace.data.tokenizer import byte_level
from headrace.verification.verify import relative
from released import release

TEXT = "one two three four five six seven eight nine ten. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    model = HeadraceForCausalLM(tiny.config("softmax-gla", vocab_size=257))
    return tiny.saved(model, tmp_path_factory.mktemp("integrations") / "model")


@pytest.fixture(scope="module", params=["softmax-gla", "qwen3_next"])
def model_folder(request, folder, tmp_path_factory):
    """Of our own model, and of a converted one."""
    if request.param == "softmax-gla":
        return folder
    path = tmp_path_factory.mktemp(request.param)
    return tiny.saved(load(release(request.param, path / "theirs")), path / "ours")


@pytest.mark.parametrize(
    ("name", "value"), {"tp_plan": "auto", "tp_size": 2, "distributed_config": {}, "device_mesh": object()}.items()
)
def test_tensor_parallelism_is_refused(folder, name, value):
    """transformers loads the whole model without a word in one process, and has no plan for it in several."""
    with pytest.raises(InputError, match=f"{name}=.* every process loads the whole model"):
        transformers.AutoModelForCausalLM.from_pretrained(folder, **{name: value})


def run(program, *words, cache):
    """(exit code, output, errors) of a program that knows headrace from the folder alone."""
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
    offline |= dict.fromkeys(("HF_MODULES_CACHE", "HF_DATASETS_CACHE"), str(cache))
    done = fresh.run(program, *map(str, words), folder=cache, before=fresh.TRANSFORMERS, **offline)
    return done.returncode, done.stdout, done.stderr


# The command `lm_eval`, which otherwise reads the descriptions of its own 14,000 tasks first.
LM_EVAL = """
from functools import partialmethod
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import TaskManager

TaskManager.__init__ = partialmethod(TaskManager.__init__, include_defaults=False)
cli_evaluate()
"""


@pytest.mark.slow
def test_lm_eval_command_gives_the_perplexity_of_the_model(folder, tmp_path):
    """lm_eval's perplexity of a text is that of the model."""
    pytest.importorskip("lm_eval", reason="the extra [eval] is not installed")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": TEXT * 3}))
    (tmp_path / "task.yaml").write_text(f"""
task: counting
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "text.jsonl"}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
""")
    failed, _, errors = run(
        LM_EVAL, "run", "--model", "hf", "--tasks", "counting", "--include_path", tmp_path, "--device", "cpu",
        "--model_args", f"pretrained={folder},trust_remote_code=True,backend=causal,max_length=256,logits_cache=False",
        "--output_path", tmp_path / "results.json", cache=tmp_path,
    )  # fmt: skip
    assert not failed, errors[-2000:]
    result = json.loads(next(tmp_path.glob("results*.json")).read_text())["results"]["counting"]["bits_per_byte,none"]
    tokenizer, model = byte_level(), load(folder)
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer.encode(TEXT * 3)]])
    with torch.no_grad():
        nats = float(model(ids, labels=ids).loss)
    assert result == pytest.approx(nats / torch.tensor(2.0).log().item(), rel=1e-4)


def test_trainer_smooths_the_labels_of_the_next_tokens(folder, tmp_path):
    """It shifts labels before it smooths them only for models that it knows by name."""
    model, share, rows = load(folder), 0.1, torch.randint(1, 100, (4, 12), generator=torch.Generator().manual_seed(0))
    settings = transformers.TrainingArguments(str(tmp_path), label_smoothing_factor=share, use_cpu=True, report_to=[])
    trainer = transformers.Trainer(model, settings)
    with torch.no_grad():
        found = trainer.compute_loss(model, {"input_ids": rows, "labels": rows})
        log_p = model(rows).logits[:, :-1].double().log_softmax(-1)
    right = log_p.gather(-1, rows[:, 1:, None])[..., 0]
    expected = -((1 - share) * right + share * log_p.mean(-1)).mean()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def test_trainer_keeps_the_columns_that_mark_packed_sequences(folder, tmp_path):
    """It drops columns that `forward` does not name, and the sequences of a row would be read as one."""
    row = {"input_ids": [1, 2, 3, 4], "labels": [1, 2, -100, 4], "position_ids": [0, 1, 0, 1], "seq_idx": [0, 0, 1, 1]}
    settings = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    data = Dataset.from_list([row])
    collator = transformers.default_data_collator
    trainer = transformers.Trainer(load(folder), settings, train_dataset=data, data_collator=collator)
    assert next(iter(trainer.get_train_dataloader())).keys() == row.keys()


@pytest.mark.parametrize(
    ("model_folder", "adapter"),
    [("softmax-gla", True), ("softmax-gla", False), ("qwen3_next", False)],
    indirect=["model_folder"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_trl_fine_tuning_lowers_the_loss(model_folder, tmp_path, adapter):
    """On whole rows, and on several rows in a pack."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    import peft

    model, tokenizer = load(model_folder), byte_level()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rows = Dataset.from_list([{"prompt": "one two", "completion": TEXT}] * 16)
    settings = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=8, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
        report_to="none", use_cpu=True, bf16=False, save_strategy="no", seed=0, packing=not adapter, max_length=256,
    )  # fmt: skip
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if adapter else None
    given = {"args": settings, "train_dataset": rows, "processing_class": tokenizer, "peft_config": lora}
    trainer = trl.SFTTrainer(model=model, **given)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.1
    moved = [name for name, p in model.named_parameters() if name in before and not torch.equal(p, before[name])]
    assert bool(moved) is not adapter


def test_trl_computes_the_loss_with_the_cap_of_the_logits():
    """Its trainers compute log-probabilities from hidden states, and know a cap by a field of the config."""
    pytest.importorskip("trl", reason="trl is not installed")
    from trl.trainer import utils

    model, ids = tiny.build("gemma2"), tiny.tokens(2)
    expected = model(ids, labels=ids).loss
    utils.add_fused_lm_head(model)
    torch.testing.assert_close(model(ids, labels=ids, fused_lm_head=True).loss, expected)


# Two processes with the environment that `accelerate launch` gives them, forked once the libraries are imported.
TRAIN = """
import os, sys, torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

child = os.fork()
rank = "0" if child else "1"
where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[3], "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
os.environ |= where | {"RANK": rank, "LOCAL_RANK": rank}
accelerator = Accelerator(cpu=True)
print(f"one of {accelerator.num_processes}\\n", end="", flush=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
rows = torch.randint(1, 100, (24, 12), generator=torch.Generator().manual_seed(0))
batches = DataLoader(rows, batch_size=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for ids in batches:
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.wait_for_everyone()
accelerator.unwrap_model(model).save_pretrained(sys.argv[2], is_main_process=accelerator.is_main_process)
accelerator.end_training()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os._exit(0)
"""


@pytest.mark.slow
def test_accelerate_with_two_processes_equals_one(folder, tmp_path):
    failed, output, errors = run(TRAIN, folder, tmp_path / "trained", free_port(), cache=tmp_path)
    assert not failed, errors[-2000:]
    assert output.count("one of 2") == 2
    start, expected = load(folder), load(folder).train()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    rows = torch.randint(1, 100, (24, 12), generator=torch.Generator().manual_seed(0))
    for ids in rows.split(4):
        expected(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    actual = dict(load(tmp_path / "trained").named_parameters())
    for name, weight in expected.named_parameters():
        assert relative(actual[name], weight) < 1e-4, name  # measured: 8e-6 in float32
    assert any(relative(actual[name], weight) > 1e-2 for name, weight in start.named_parameters())


def test_pipeline_equals_generate(folder, tmp_path):
    """And without the argument that lets transformers import headrace, it says so."""
    code = f"""
from transformers import pipeline
try:
    pipeline("text-generation", model={str(folder)!r})
except ValueError as error:
    print(error)
generator = pipeline("text-generation", model={str(folder)!r}, trust_remote_code=True)
print(generator({TEXT!r}, max_new_tokens=8, do_sample=False))
"""
    failed, output, errors = run(code, cache=tmp_path)
    assert not failed, errors[-2000:]
    assert "trust_remote_code=True" in output
    tokenizer, model = byte_level(), load(folder)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    written = tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=False)[0], skip_special_tokens=True)
    assert repr(written) in output
