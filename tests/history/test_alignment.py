"""Alignment attention and recurrent encoder-decoders against their equations, position by position, in float64."""

import itertools
import math

import pytest
import torch

from headrace import HeadraceConfig, InputError, zoo
from headrace.history import models
from headrace.history.layers.alignment import SCORES, WINDOWS, AlignmentAttention
from headrace.history.specs.encoder_decoder import Alignment, RecurrentSpec
from tiny import close

B, T, L, N, M = 3, 9, 7, 6, 6
LENGTHS = (7, 5, 1)
KINDS = list(itertools.product(SCORES, WINDOWS))


def attention(score, window, reach=2, memory_size=M):
    torch.manual_seed(0)
    module = AlignmentAttention(Alignment(score, window=window, reach=reach), N, memory_size).double()
    return module, torch.randn(B, T, N).double(), torch.randn(B, L, memory_size).double()


def valid(lengths=LENGTHS, size=L):
    return torch.arange(size) < torch.tensor(lengths)[:, None]


def literal_score(name, module, q, h):
    if name == "dot":
        return q @ h
    if name == "general":
        return q @ (module.keys.weight @ h)
    joined = torch.cat([module.query.weight, module.keys.weight], 1)  # W_a [q; h]
    return module.value.weight[0] @ torch.tanh(joined @ torch.cat([q, h]))


def literal_weights(module, score, window, q, t, source, reach):
    """α of one step by the equations: a dict from position to weight."""
    S, centre = len(source), torch.tensor(float(t))
    if window == "local-p":
        hidden = torch.tanh(module.window.hidden.weight @ q)
        centre = S / (1 + torch.exp(-(module.window.centre.weight[0] @ hidden)))
    inside = [s for s in range(S) if window == "global" or abs(s - centre.item()) <= reach]
    exps = {s: torch.exp(literal_score(score, module.score, q, source[s])) for s in inside}
    total = sum(exps.values())
    weights = {s: e / total for s, e in exps.items()}
    if window == "local-p":
        sigma = reach / 2
        weights = {s: w * torch.exp(-((s - centre) ** 2) / (2 * sigma**2)) for s, w in weights.items()}
    return weights


def literal_attention(module, score, window, query, annotations, reach=2):
    contexts, alignments = [], []
    for b, length in enumerate(LENGTHS):
        for t in range(T):
            source = annotations[b, :length]
            weights = literal_weights(module, score, window, query[b, t], t, source, reach)
            row = [weights.get(s, query.new_zeros(())) for s in range(L)]
            contexts.append(sum((row[s] * source[s] for s in weights), query.new_zeros(annotations.shape[2])))
            alignments.append(torch.stack(row))
    return torch.stack(contexts).view(B, T, -1), torch.stack(alignments).view(B, T, L)


@pytest.mark.parametrize(
    ("score", "window", "memory_size"),
    [(*kind, size) for kind in KINDS for size in (M, M - 2) if kind[0] != "dot" or size == N],
)
def test_scores_and_windows_equal_their_equations(score, window, memory_size):
    """Also of annotations that are narrower than the query."""
    module, query, annotations = attention(score, window, memory_size=memory_size)
    inputs = [query.requires_grad_(), annotations.requires_grad_(), *module.parameters()]
    actual = module(query, module.memory(annotations, valid()))
    expected = literal_attention(module, score, window, query, annotations)
    for ours, literal in zip(actual, expected, strict=True):
        close(ours, literal)
        weight = torch.randn_like(ours)
        grads = [
            torch.autograd.grad(
                (out * weight).sum(), inputs, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for out in (ours, literal)
        ]
        for own, other in zip(*grads, strict=True):
            close(own, other)


def test_monotonic_window_at_the_borders():
    module, query, annotations = attention("dot", "local-m", reach=2)
    _, weights = module(query, module.memory(annotations, valid()))
    seen = [[s for s in range(L) if weights[0, t, s] > 0] for t in range(T)]
    assert seen[0] == [0, 1, 2] and seen[3] == [1, 2, 3, 4, 5] and seen[6] == [4, 5, 6] and seen[8] == [6]
    context, weights = module(query, module.memory(annotations, valid()), first=L + 2)
    assert not weights.any() and not context.any(), "the window begins where the source has ended"
    later = module(query[:, 4:], module.memory(annotations, valid()), first=4)
    close(later[1], module(query, module.memory(annotations, valid()))[1][:, 4:])


@pytest.mark.parametrize(("logit", "centre"), [(-40.0, 0.0), (0.0, 3.5), (40.0, 7.0)])
def test_predicted_window_at_the_borders(logit, centre):
    module, query, annotations = attention("dot", "local-p", reach=3)
    with torch.no_grad():
        module.window.hidden.weight.zero_()[0, 0] = 1e9
        module.window.centre.weight.zero_()[0, 0] = logit
    query[..., 0] = 1.0
    _, weights = module(query, module.memory(annotations, valid()))
    seen = [s for s in range(L) if weights[0, 0, s] > 0]
    assert seen == [s for s in range(L) if abs(s - centre) <= 3]
    gauss = [math.exp(-((s - centre) ** 2) / (2 * 1.5**2)) for s in seen]
    plain = (query[0, 0] @ annotations[0, seen].T).softmax(-1)
    close(weights[0, 0, seen], plain * torch.tensor(gauss, dtype=torch.float64))


# --- whole models -----------------------------------------------------------------------------------------------------
RECURRENT = [name for name, spec in zoo.MODELS.items() if isinstance(spec, RecurrentSpec)]
VARIANTS = {
    **{name: name for name in RECURRENT},
    "rnn-gru": "rnn(cell=gru, bidirectional=true)",
    "bahdanau-lstm": "bahdanau(cell=lstm, alignment.window=local-p)",
    "luong-dot": "luong(alignment.score=dot, alignment.feed=false)",
    "luong-both": "luong(bidirectional=true, alignment.score=concat, alignment.window=local-m, alignment.reach=3)",
}


def model_of(variant, **sizes):
    torch.manual_seed(1)
    spec = zoo.get(VARIANTS[variant])
    return models.build(spec, **{"vocab_size": 11, "hidden_size": N, "num_layers": 2} | sizes).double().eval()


def rows(lengths=LENGTHS, target=5):
    torch.manual_seed(2)
    ids = torch.randint(2, 11, (B, L)).masked_fill(~valid(lengths), 0)
    return ids, valid(lengths).long(), torch.randint(2, 11, (B, target))


def gru_cell(rnn, x, h, layer=0):
    """torch's GRU, written out."""
    W, U, b, c = (getattr(rnn, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    (r, z, n), (hr, hz, hn) = (W @ x + b).chunk(3), (U @ h + c).chunk(3)
    r, z = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
    return (1 - z) * torch.tanh(n + r * hn) + z * h


def literal_bahdanau(model, source, target):
    """Logits and alignments of one pair of sequences, by the equations of arXiv 1409.0473 with torch's GRU."""
    n, x = model.sizes.hidden_size, model.source_embedding(source)
    sides = []
    for suffix, order in (("", range(len(source))), ("_reverse", range(len(source) - 1, -1, -1))):
        h, states = x.new_zeros(n), {}
        for j in order:
            h = gru_cell(model.encoder, x[j], h, f"0{suffix}")
            states[j] = h
        sides.append(states)
    annotations = [torch.cat([sides[0][j], sides[1][j]]) for j in range(len(source))]
    score, s = model.decoder.attention.score, torch.tanh(model.first_state(sides[1][0]))
    logits, alignments = [], []
    for y in model.target_embedding(torch.cat([torch.zeros(1, dtype=torch.long), target[:-1]])):
        e = torch.stack([score.value.weight[0] @ torch.tanh(score.query(s) + score.keys(h)) for h in annotations])
        alpha = e.exp() / e.exp().sum()
        c = sum(a * h for a, h in zip(alpha, annotations, strict=True))
        s = gru_cell(model.decoder.rnn, torch.cat([y, c]), s)
        pairs = model.decoder.out(torch.cat([s, y, c]))
        logits.append(model.lm_head(torch.maximum(pairs[0::2], pairs[1::2])))
        alignments.append(alpha)
    return torch.stack(logits), torch.stack(alignments)


def test_bahdanau_equals_its_equations():
    model, (ids, mask, labels) = model_of("bahdanau", num_layers=1), rows()
    output = model(ids, mask, labels, output_alignments=True)
    parts = [literal_bahdanau(model, ids[b, :length], labels[b]) for b, length in enumerate(LENGTHS)]
    for b, (logits, alphas) in enumerate(parts):
        close(output.logits[b], logits)
        close(output.alignments[b, :, : LENGTHS[b]], alphas)
        assert not output.alignments[b, :, LENGTHS[b] :].any()
    loss = torch.nn.functional.cross_entropy(torch.cat([logits for logits, _ in parts]), labels.flatten())
    close(output.loss, loss)
    for own, other in zip(
        *(torch.autograd.grad(x, list(model.parameters())) for x in (output.loss, loss)), strict=True
    ):
        close(own, other)


@pytest.mark.parametrize("feed", [True, False])
def test_luong_equals_its_equations(feed):
    """The encoder is torch's; the decoder's steps, attention and feeding are written out."""
    torch.manual_seed(0)
    spec = RecurrentSpec("gru", alignment=Alignment("general", "after", feed=feed))
    model = models.build(spec, vocab_size=11, hidden_size=N).double()
    ids, mask, labels = rows((L, L, L))
    output = model(ids, mask, labels, output_alignments=True)
    annotations, last = model.encoder(model.source_embedding(ids))
    general = model.decoder.attention.score.keys.weight
    for b in range(B):
        h, fed = last[0, b], torch.zeros(N).double()
        for t, y in enumerate(model.target_embedding(torch.cat([torch.zeros(1, dtype=torch.long), labels[b, :-1]]))):
            h = gru_cell(model.decoder.rnn, torch.cat([y, fed]) if feed else y, h)
            alpha = torch.stack([h @ general @ s for s in annotations[b]]).softmax(-1)
            fed = torch.tanh(model.decoder.out.weight @ torch.cat([alpha @ annotations[b], h]))
            close(output.logits[b, t], model.lm_head(fed))
            close(output.alignments[b, t], alpha)


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_does_not_matter(variant):
    model, (ids, mask, labels) = model_of(variant), rows()
    output = model(ids, mask, labels, output_alignments=True)
    longer = torch.nn.functional.pad(ids, (0, 4)).masked_fill(~valid(size=L + 4), 9)
    again = model(longer, valid(size=L + 4), labels, output_alignments=True)
    close(again.logits, output.logits)
    alone = [model(ids[b : b + 1, :n], None, labels[b : b + 1]).logits for b, n in enumerate(LENGTHS)]
    close(torch.cat(alone), output.logits)
    if output.alignments is not None:
        assert again.alignments.shape == (B, 5, L + 4) and not again.alignments[1, :, LENGTHS[1] :].any()
    assert (output.alignments is None) == (variant.startswith("rnn"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_generation_takes_the_likeliest_token(variant):
    model, (ids, mask, _) = model_of(variant), rows()
    written = model.generate(ids, mask, max_new_tokens=8)
    likeliest = model(ids, mask, written).logits.argmax(-1)
    ended = (written == 1).cumsum(1) - (written == 1).long() > 0
    assert torch.equal(written, likeliest.masked_fill(ended, 0))
    with torch.no_grad():
        model.lm_head.bias[1] += 1e3
    assert model.generate(ids, mask, max_new_tokens=8).tolist() == [[1]] * B


def test_ignored_labels_do_not_change_the_loss():
    model, (ids, mask, labels) = model_of("bahdanau"), rows()
    loss = model(ids, mask, labels[:, :3]).loss
    padded = labels.clone()
    padded[:, 3:] = -100
    close(model(ids, mask, padded).loss, loss)
    assert model(ids, mask, decoder_input_ids=labels).loss is None
    assert models.shift_right(padded, 0)[0].tolist() == [0, *labels[0, :3].tolist(), 0]


@pytest.mark.parametrize("name", RECURRENT)
def test_whole_models_are_refused_as_mixers(name):
    with pytest.raises(InputError, match=r"headrace\.history\.models\.build"):
        HeadraceConfig(mixer=name, hidden_size=8)


def test_invalid_specs_and_inputs_are_refused():
    model, (ids, mask, labels) = model_of("luong"), rows()
    gap, absent = "attention_mask has padding before a token, or a row without tokens", "labels=None and decoder_input"
    for sentence, call in (
        ("alignment.score='dot' needs annotations as wide", lambda: zoo.get("bahdanau(alignment.score=dot)")),
        ("alignment.feed=True with query='before'", lambda: zoo.get("bahdanau(alignment.feed=true)")),
        ("alignment.reach=0; expected at least 1", lambda: zoo.get("luong(alignment.reach=0)")),
        (gap, lambda: model(ids, mask.flip(1), labels)),
        (gap, lambda: model(ids, torch.zeros_like(mask), labels)),
        (r"attention_mask has shape \[3, 6\]; expected \[3, 7\]", lambda: model(ids, mask[:, 1:], labels)),
        (absent, lambda: model(ids, mask)),
    ):
        with pytest.raises(InputError, match=sentence):
            call()


def test_hf_trainer_trains_an_encoder_decoder(tmp_path):
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    model = models.build(zoo.get("bahdanau"), vocab_size=11, hidden_size=16)
    ids, mask, labels = rows()
    data = [{"input_ids": i, "attention_mask": m, "labels": y} for i, m, y in zip(ids, mask, labels, strict=True)] * 60
    options = {"per_device_train_batch_size": 3, "learning_rate": 1e-2, "use_cpu": True, "report_to": "none"}
    args = TrainingArguments(str(tmp_path), num_train_epochs=1, disable_tqdm=True, save_strategy="no", **options)
    Trainer(model, args, train_dataset=data).train()
    assert model(ids, mask, labels).loss < 0.2
