"""BERT against transformers', weights copied, and its task."""

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from transformers import BertConfig, BertForPreTraining

from headrace import InputError, zoo
from headrace.history import models
from headrace.tasks import IGNORED, Masked
from headrace.verification.verify import relative
from tiny import gradients_agree, perturbed

V, D, H, WIDTH, LAYERS = 29, 32, 4, 48, 2


def build(name, **changes):
    sizes = {"vocab_size": V, "hidden_size": D, "num_heads": H, "num_layers": LAYERS, "intermediate_size": WIDTH}
    return models.build(name, **sizes | changes)


def batch():
    """Two segments; the second row is shorter."""
    ids, mask = torch.randint(V, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    labels = torch.where(torch.rand(2, 9) < 0.5, ids, IGNORED).masked_fill(mask == 0, IGNORED)
    labels[0, 0] = 3
    segments, apart = (torch.arange(9) > torch.tensor([[4], [2]])).long(), torch.tensor([0, 1])
    return {
        "input_ids": ids, "attention_mask": mask, "token_type_ids": segments, "labels": labels,
        "next_sentence_label": apart,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["bert", "t5", "luong", "transformer-2017"])
def test_batch_without_labels_has_loss_0_and_zero_gradients(name):
    """transformer-2017 smooths its labels."""
    model, ids = build(name).train(), torch.randint(V, (2, 9))
    given = {"attention_mask": torch.ones_like(ids), "labels": torch.full_like(ids, IGNORED)}
    loss = model(ids, **given | ({} if name != "bert" else {"next_sentence_label": ids.new_full((2,), IGNORED)})).loss
    loss.backward()
    assert loss == 0 and all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)


RENAMED = {
    "bert.embeddings.word_embeddings": "embedding", "bert.embeddings.token_type_embeddings": "segments",
    "bert.embeddings.position_embeddings": "encoder.positions.table",
    "bert.embeddings.LayerNorm": "encoder.embedding_norm", "bert.pooler.dense": "next_head.0",
    "cls.seq_relationship": "next_head.2", "cls.predictions.transform.dense": "token_head.0",
    "cls.predictions.transform.LayerNorm": "token_head.2", "cls.predictions.bias": "token_bias",
    "bert.encoder.layer": "encoder.layers", "attention.output.LayerNorm": "mixer_norm",
    "attention.output.dense": "mixer.o_proj", "attention.self.query": "mixer.q_proj",
    "attention.self.key": "mixer.k_proj", "attention.self.value": "mixer.v_proj", "output.LayerNorm": "mlp_norm",
    "intermediate.dense": "mlp.up_proj", "output.dense": "mlp.down_proj",
}  # fmt: skip


def from_bert(theirs):
    """Their parameters under our names."""
    mine = {}
    for name, value in theirs.items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        mine[name] = value
    return mine


def test_bert_equals_transformers():
    """Both heads' logits, the loss, and every gradient of the loss."""
    config = BertConfig(
        vocab_size=V, hidden_size=D, num_hidden_layers=LAYERS, num_attention_heads=H, intermediate_size=WIDTH,
        max_position_embeddings=16, layer_norm_eps=1e-6,
    )  # fmt: skip
    ours = build("bert", max_positions=16).eval().double()
    theirs = perturbed(BertForPreTraining(config), 0.2).eval().double()
    ours.load_state_dict(from_bert({name: p.detach() for name, p in theirs.named_parameters()}))
    rows = batch()
    actual, expected = ours(**rows), theirs(**rows)
    kept = rows["attention_mask"] == 1
    for a, b in (
        (actual.logits[kept], expected.prediction_logits[kept]),
        (actual.next_logits, expected.seq_relationship_logits),
        (actual.loss, expected.loss),
    ):
        assert relative(a, b) <= 1e-10
    actual.loss.backward()
    expected.loss.backward()
    theirs = from_bert({name: p.grad for name, p in theirs.named_parameters()})
    gradients_agree({name: p.grad for name, p in ours.named_parameters()}, theirs, 1e-10)


def test_padding_at_the_start_is_refused():
    rows = batch()
    with pytest.raises(InputError, match="expected padding at the end"):
        build("bert")(rows["input_ids"], 1 - rows["attention_mask"])


# --- the task --------------------------------------------------------------------------------------------------------


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"{i} and {i * i % 97}; " for i in range(3000)), encoding="utf-8")
    return path


def drawn(task, rows):
    """The rows as they stood before masking, and what was done to them."""
    batch = default_collate([*task.training(3, rows)])
    masked = batch["shift_labels"] != IGNORED
    return batch, masked, torch.where(masked, batch["shift_labels"], batch["input_ids"])


def test_half_of_the_sentence_pairs_are_consecutive(book):
    task = Masked((str(book),), length=40)
    batch, _, whole = drawn(task, 400)
    text = task.corpus.parts["training"].tokens.tobytes()
    apart = batch["next_sentence_label"]
    assert 0.4 < apart.float().mean() < 0.6
    for row, segments, other in zip(whole.tolist(), batch["token_type_ids"].tolist(), apart.tolist(), strict=True):
        assert row[0] == 257 and row[-1] == 258 and row.count(258) == 2 and row.count(257) == 1
        cut = row.index(258)
        first, second = (np.array(part, np.uint16).tobytes() for part in (row[1:cut], row[cut + 1 : -1]))
        assert segments == [0] * (cut + 1) + [1] * (39 - cut)
        assert first in text and second in text and (first + second in text) == (not other)


def test_masking_follows_the_paper(book):
    task = Masked((str(book),), length=103)
    batch, masked, whole = drawn(task, 500)
    assert (masked.sum(1) == 15).all() and (whole[masked] < 257).all()
    given, stood = batch["input_ids"][masked], whole[masked]
    assert abs((given == 259).float().mean() - 0.8) < 0.02 and abs((given == stood).float().mean() - 0.1) < 0.02
    assert torch.equal(batch["input_ids"][~masked], whole[~masked]) and (whole != 259).all()


def test_held_out_rows_are_of_the_held_out_text(book):
    task = Masked((str(book),), length=40)
    rows, text = task.held_out(50), task.corpus.parts["held-out"].tokens.tobytes()
    assert torch.equal(rows["input_ids"], task.held_out(50)["input_ids"])
    whole = torch.where(rows["shift_labels"] != IGNORED, rows["shift_labels"], rows["input_ids"])
    for row in whole.tolist():
        assert np.array(row[1 : row.index(258)], np.uint16).tobytes() in text


def test_models_are_built_by_name_or_spec():
    by_name, by_spec = build("bert(mixer=gla)"), build(zoo.get("bert(mixer=gla)"))
    assert isinstance(by_name, models.BertModel) and str(by_name) == str(by_spec)
    for name, sentence in (
        ("gla", "'gla' is no encoder-decoder or BERT; expected rnn, luong, bahdanau, transformer-2017, t5, bert"),
        ("gpt", "'gpt' is no encoder-decoder or BERT"),
        ("berd", "mixer 'berd' is unknown; the nearest names are bert"),
    ):
        with pytest.raises(InputError, match=sentence):
            build(name)


def test_bert_may_have_no_mlp():
    bert = build("bert(style.mlp=none)").eval()
    assert bert.encoder.layers[0].mlp is None and bert(torch.tensor([[2, 3, 4]])).logits.isfinite().all()


def test_too_short_row_is_refused():
    with pytest.raises(InputError, match="length=7; expected at least 8"):
        Masked(length=7)
