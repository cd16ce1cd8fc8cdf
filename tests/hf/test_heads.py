"""The heads of transformers on our backbone: padding, losses, folders, and TRL's reward model."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset

from headrace.data.tokenizer import byte_level
from headrace.hf import HeadraceForCausalLM
from tiny import SIZES, build, close, config, saved, tokens, trained

MIXERS = ["gla", "softmax-gated-deltanet", "rwkv4 and s4d", "hybrid", "experts"]
HEADS = {"SequenceClassification": "score", "TokenClassification": "score", "QuestionAnswering": "qa_outputs"}


def headed(head, mixer):
    auto = getattr(transformers, f"AutoModelFor{head}")
    return trained(auto.from_config(config(mixer, num_labels=3, pad_token_id=0)))


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_padding_changes_no_output(head, mixer):
    model, ids = headed(head, mixer), tokens(2)
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[0, -2:] = 0
    together, kept = model(ids * mask, attention_mask=mask), mask.bool()
    for row in range(2):
        alone = model(ids[row, kept[row]][None])
        for name in ("logits", "start_logits", "end_logits"):
            if name in alone:
                found = together[name][row]
                close(found if head == "SequenceClassification" else found[kept[row]], alone[name][0])


def test_losses_are_cross_entropies():
    ids = tokens(4)
    ids[:, -1] = 0
    outputs = {head: headed(head, "gla") for head in HEADS}
    kinds, of_tokens, starts, ends = (torch.randint(3, size) for size in ((4,), ids.shape, (4,), (4,)))
    of_tokens[:, :2] = -100
    out = outputs["SequenceClassification"](ids, labels=kinds)
    close(out.loss, F.cross_entropy(out.logits, kinds))
    out = outputs["TokenClassification"](ids, labels=of_tokens)
    close(out.loss.double(), F.cross_entropy(out.logits.flatten(0, 1), of_tokens.flatten()), 1e-6)
    out = outputs["QuestionAnswering"](ids, start_positions=starts, end_positions=ends)
    close(out.loss, (F.cross_entropy(out.start_logits, starts) + F.cross_entropy(out.end_logits, ends)) / 2)
    out.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in outputs["QuestionAnswering"].parameters())


@pytest.mark.parametrize(("labels", "loss"), [([0, 1, 2, 1], F.cross_entropy), ([0.5, 1.0, 2.0, 1.5], F.mse_loss)])
def test_trainer_takes_the_mean_of_the_batches_of_a_step(labels, loss, tmp_path):
    count = 3 if loss is F.cross_entropy else 1
    auto = transformers.AutoModelForSequenceClassification
    model, ids, labels = auto.from_config(config("gla", num_labels=count)).double(), tokens(4), torch.tensor(labels)
    expected = copy.deepcopy(model)
    for rows, targets in zip(ids.split(1), labels.double().split(1) if count == 1 else labels.split(1), strict=True):
        logits = expected(rows).logits
        (loss(logits[:, 0] if count == 1 else logits, targets) / 4).backward()
    rows = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]
    settings = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=4, optim="sgd",
        learning_rate=0.1, max_grad_norm=0.0, lr_scheduler_type="constant", use_cpu=True, report_to=[],
        save_strategy="no",
    )  # fmt: skip
    transformers.Trainer(model, settings, train_dataset=rows).train()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        close(p, q - 0.1 * q.grad)


@pytest.mark.parametrize("head", HEADS)
def test_folder_of_a_language_model_gives_the_backbone(head, tmp_path):
    """And the head is reported as new; the model is saved and loaded with it."""
    backbone, ids = build("gla", pad_token_id=0), tokens(2)
    backbone.save_pretrained(tmp_path / "lm")
    auto = getattr(transformers, f"AutoModelFor{head}")
    model, report = auto.from_pretrained(tmp_path / "lm", num_labels=3, output_loading_info=True)
    assert {name.split(".")[0] for name in report["missing_keys"]} == {HEADS[head]}
    assert not report["unexpected_keys"] and not report["mismatched_keys"]
    close(model.model(ids).last_hidden_state, backbone.model(ids).last_hidden_state)
    model.save_pretrained(tmp_path / "headed")
    again, report = auto.from_pretrained(tmp_path / "headed", output_loading_info=True)
    assert not any(report.values()) and type(again) is type(model)
    assert again.config.auto_map[f"AutoModelFor{head}"] == f"modeling_headrace.{type(model).__name__}"
    close(again(ids)[0], model(ids)[0])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_trl_learns_a_reward(tmp_path):
    trl, tokenizer = pytest.importorskip("trl", reason="trl is not installed"), byte_level()
    sizes = SIZES | {"vocab_size": len(tokenizer), "num_hidden_layers": 1}
    saved(HeadraceForCausalLM(config("gla", **sizes)), tmp_path / "lm")
    settings = trl.RewardConfig(
        output_dir=str(tmp_path / "run"), max_steps=6, per_device_train_batch_size=4, learning_rate=1e-2, seed=0,
        logging_steps=1, report_to="none", use_cpu=True, bf16=False, save_strategy="no",
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": "a b", "chosen": " c d e", "rejected": " x"}] * 24)
    trainer = trl.RewardTrainer(str(tmp_path / "lm"), args=settings, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.1
