"""A cache that goes back is as if it had never read what it forgot."""

import copy
import itertools
import random
import re
from contextlib import nullcontext

import pytest
import torch

import tiny
from equation import MAX_ERROR_RATIO, skip_if_missing
from headrace import HeadraceCache, InputError, quantize, zoo
from headrace.hf.cache import NAME
from headrace.hf.snapshots import is_growing
from headrace.history.specs.softmax_rnn import SoftmaxRNNSpec
from headrace.layers.blocks import stack
from headrace.verification.verify import relative

PROGRAMS = 4  # of each model, each others
ATTENTION = ["transformer", "mqa", "mla", "gpt", "softmax-rnn-norm"]
pytestmark = pytest.mark.usefixtures("no_grad")


class Reader:
    """A cache and the columns that it has not forgotten."""

    def __init__(self, model, rows):
        self.model, self.cache = model, HeadraceCache()
        self.ids, self.mask = (torch.empty(rows, 0, dtype=torch.long) for _ in range(2))

    def read(self, ids, mask=None):
        self.ids = torch.cat([self.ids, ids], 1)
        self.mask = torch.cat([self.mask, torch.ones_like(ids) if mask is None else mask], 1)
        where = {} if mask is None else {"attention_mask": self.mask}
        return self.model(ids, past_key_values=self.cache, **where).logits

    def read_random(self, dice, padded=True):
        ids = tiny.tokens(len(self.ids), dice.randint(1, 4))
        padded = padded and dice.random() < 0.3
        return self.read(ids, (torch.rand(ids.shape) < 0.7).long() if padded else None)

    def rewind(self, columns):
        end = self.ids.shape[1] - columns
        kept = [column for column in self.cache.snapshots.columns if column <= end]
        self.cache.rewind(columns)
        self.ids, self.mask = self.ids[:, :end], self.mask[:, :end]
        assert self.cache.columns == end and self.cache.snapshots.columns == kept

    def choose(self, rows):
        self.ids, self.mask = self.ids[rows], self.mask[rows]
        self.cache.reorder_cache(rows)

    def step(self, dice):
        """One random operation."""
        kind = dice.choice(["read", "read", "read", "rewind", "rewind", "keep", "keep one", "read pending", "rows"])
        if kind == "read" or not self.ids.shape[1]:
            self.read_random(dice)
        elif kind == "rewind":
            self.rewind(dice.randint(0, self.ids.shape[1]))
        elif kind == "rows":
            self.choose(torch.tensor([dice.randrange(len(self.ids)) for _ in range(len(self.ids))]))
        else:
            self.model.read_pending(self.cache)
            assert not self.cache.pending
            if kind != "read pending":
                assert self.cache.snapshot(temporary=kind == "keep one") == self.cache.snapshots.columns[-1]

    def copy(self):
        """A reader that goes on by itself, with the same model."""
        other = copy.copy(self)
        other.cache = copy.deepcopy(self.cache)
        return other

    def error(self):
        """Of the logits of three more tokens, relative to those of the same columns without a cache."""
        logits = self.read(tiny.tokens(len(self.ids), 3), torch.ones(len(self.ids), 3, dtype=torch.long))
        return relative(logits, self.model(self.ids, attention_mask=self.mask).logits[:, -3:])


def tensors(cache, growing=True):
    states = [s for s in cache.states if s is not None and (growing or not is_growing(s))]
    return [x for s in states for x in s if isinstance(x, torch.Tensor)]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def model():
    return tiny.build("softmax-gated-deltanet")


@pytest.mark.parametrize("name", [*tiny.MIXERS, *tiny.by_state(zoo.names())])
def test_every_mixer(name):
    """Programs of reads, rewinds, snapshots and exchanged rows, half of them of two padded rows; then a snapshot, to
    which two more calls go back."""
    model = tiny.build(name, **({} if name in tiny.MIXERS else {"num_hidden_layers": 1}))
    for program in range(PROGRAMS):
        dice = random.Random(f"{name} {program}")
        reader = Reader(model, 1 + program % 2)
        for _ in range(5):
            reader.step(dice)
        assert reader.error() <= 1e-12
        other = reader.copy()
        reader.cache.snapshot()
        keeps_columns = not isinstance(zoo.get(name) if name in zoo.names() else None, SoftmaxRNNSpec)
        calls = [reader.read_random(dice, keeps_columns) for _ in range(2)]
        reader.rewind(sum(logits.shape[1] for logits in calls))
        assert not reader.cache.pending and same(tensors(reader.cache), tensors(other.cache))
        ids = tiny.tokens(len(reader.ids), 3)
        after = [[each.read(piece) for piece in ids.split([2, 1], 1)] for each in (reader, other)]
        assert same(*after)


@pytest.mark.parametrize("name", ["gla", "rwkv6", "softmax-gated-deltanet", "hybrid", "mamba and s4", "transformer"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@torch.inference_mode()
def test_the_engine_goes_back(name, kind):
    skip_if_missing("native")
    model = tiny.build(name).float()
    exact = copy.deepcopy(model).double()
    model = quantize(model) if kind == "int8" else model.to(getattr(torch, kind))
    ids, forgotten, cache = tiny.tokens(2, 9), tiny.tokens(2, 4), HeadraceCache()
    model(ids[:, :5], past_key_values=cache)
    cache.snapshot()
    expected = [model.engine.step(model, token, other) for other in [copy.deepcopy(cache)] for token in ids[:, 5:].T]
    places = [x.data_ptr() for x in tensors(cache, growing=False)]
    for token in forgotten.T:
        model.engine.step(model, token, cache)
    cache.rewind(4)
    logits = [model.engine.step(model, token, cache) for token in ids[:, 5:].T]
    assert same(logits, expected)
    if model.engine.unsupported_reason(model) is None:  # and its program was not bound anew
        assert places == [x.data_ptr() for x in tensors(cache, growing=False)]
    cache.rewind(2)
    after = torch.cat([model.engine.step(model, token, cache) for token in ids[:, 7:].T], 1)
    exact = exact(ids).logits[:, 7:]
    rounding = max(relative(torch.cat(expected[2:], 1), exact), 2**-24)
    assert relative(after, exact) <= MAX_ERROR_RATIO * rounding


@pytest.mark.parametrize("name", ATTENTION)
def test_softmax_attention_is_cropped_without_snapshots(name):
    model, reader = tiny.build(name), None
    for padded in (False, True):
        reader = Reader(model, 2)
        reader.read(tiny.tokens(2, 5), torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 1]]) if padded else None)
        for _ in range(4):
            reader.read(tiny.tokens(2, 1))
        reader.cache.snapshot()
        assert reader.cache.snapshots.nbytes == (16 if name == "gpt" else 0)  # the numbers of tokens, for its positions
        reader.rewind(3 if padded and name == "softmax-rnn-norm" else 7)  # which takes padding out of its keys
        assert reader.cache.pending == 0 and reader.error() <= 1e-12
        reader.rewind(4)
        reader.read(tiny.tokens(2, 3))
        assert reader.error() <= 1e-12


def test_a_padded_call_that_is_forgotten_leaves_no_mask():
    reader = Reader(tiny.build("transformer"), 2)
    reader.read(tiny.tokens(2, 3))
    reader.read(tiny.tokens(2, 2), torch.tensor([[1, 0], [1, 1]]))
    reader.rewind(1)
    assert all(state.valid is None for state in reader.cache.states)


@pytest.mark.parametrize("name", ["gla", "hybrid", "transformer"])
def test_a_snapshot_before_the_first_token(name):
    """Behind padding alone, where no layer has a state."""
    reader = Reader(tiny.build(name), 1)
    reader.read(tiny.tokens(1, 2), torch.zeros(1, 2, dtype=torch.long))
    reader.cache.snapshot()
    reader.read(tiny.tokens(1, 3))
    reader.rewind(3)
    assert reader.cache.pending == 0 and reader.error() <= 1e-12


def test_crop_as_in_transformers(model):
    reader = Reader(model, 1)
    reader.read(tiny.tokens(1, 9))
    reader.cache.crop(-3)
    reader.cache.crop(0)
    reader.cache.crop(20)
    assert reader.cache.is_croppable and reader.cache.get_seq_length() == 6
    reader.cache.crop(4)
    reader.ids, reader.mask = reader.ids[:, :4], reader.mask[:, :4]
    assert reader.error() <= 1e-12


def test_pending_tokens(model):
    reader = Reader(model, 2)
    reader.read(tiny.tokens(2, 6))
    reader.rewind(2)
    assert (reader.cache.pending, reader.cache.batch_size, reader.cache.is_initialized) == (4, 2, True)
    with pytest.raises(InputError, match="4 tokens are pending after `rewind`, and the states do not cover them"):
        _ = reader.cache.states
    for refused in (reader.cache.snapshot, lambda: HeadraceCache().append(reader.cache)):
        with pytest.raises(InputError, match="are pending"):
            refused()
    ids = tiny.tokens(2, 3)
    frozen = model(ids, past_key_values=reader.cache, use_cache=False, output_hidden_states=True)
    assert reader.cache.pending == 4
    whole = model(torch.cat([reader.ids, ids], 1), output_hidden_states=True)
    for ours, all_of in zip((frozen.logits, *frozen.hidden_states), (whole.logits, *whole.hidden_states), strict=True):
        assert relative(ours, all_of[:, 4:]) <= 1e-12
    labelled = model(ids, past_key_values=copy.deepcopy(reader.cache), labels=ids)
    assert abs(labelled.loss - torch.nn.functional.cross_entropy(whole.logits[:, 4:-1].mT, ids[:, 1:])) < 1e-6
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids), past_key_values=reader.cache).logits
    assert relative(embedded, whole.logits[:, 4:]) <= 1e-12
    reader.cache.rewind(7)
    assert not reader.cache.is_initialized


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_a_loss_of_experts_leaves_pending_tokens_out(name):
    model, ids = tiny.build("experts").train(), tiny.tokens(2, 9)
    caches = [HeadraceCache() for _ in range(2)]
    for cache in caches:
        model(ids[:, :6], past_key_values=cache)
        cache.rewind(2)
    model.read_pending(caches[0])
    first, second = (model(ids[:, 4:], past_key_values=cache, **{name: ids[:, 4:]}).loss for cache in caches)
    assert abs(first - second) < 1e-6


def test_embeddings_are_gone_behind_to_a_snapshot_alone(model):
    ids, cache = tiny.tokens(2, 6), HeadraceCache()
    x = model.get_input_embeddings()(ids)
    model(inputs_embeds=x[:, :3], past_key_values=cache)
    cache.snapshot()
    model(inputs_embeds=x[:, 3:], past_key_values=cache)
    with pytest.raises(InputError, match="columns 3 to 5 were read from embeddings, which are not kept"):
        cache.rewind(1)
    assert cache.columns == 6 and cache.states is not None
    cache.rewind(3)
    logits = model(ids[:, 3:], past_key_values=cache).logits
    assert relative(logits, model(ids).logits[:, 3:]) <= 1e-12
    cache.rewind(1)
    assert cache.pending == 2


def test_a_pack_is_not_gone_behind():
    for name in ("gla", "hybrid", "transformer"):
        model, ids, cache = tiny.build(name), tiny.tokens(1, 9), HeadraceCache()
        model(ids, cu_seqlens=torch.tensor([0, 4, 9]), past_key_values=cache)
        last, forgotten = tiny.tokens(2, 2), tiny.tokens(2, 3)
        cache.snapshot()
        other = copy.deepcopy(cache)
        model(forgotten, past_key_values=cache)
        with pytest.raises(InputError, match=r"columns 0 to \d+ were read as packed sequences"):
            cache.rewind(4)
        assert cache.columns == 12
        cache.rewind(3)
        assert torch.equal(model(last, past_key_values=cache).logits, model(last, past_key_values=other).logits)
        if name == "transformer":
            cache.rewind(1)
            assert cache.columns == 10 and cache.pending == 0
        cache.rewind(cache.columns)
        assert torch.equal(model(ids, past_key_values=cache).logits, model(ids).logits)
        cache.reset()
        for _ in range(2):  # the second one drops the snapshot between them
            model(ids, cu_seqlens=torch.tensor([0, 4, 9]), past_key_values=cache)
            cache.snapshot()
        assert cache.snapshots.columns == [0, 18]


WRONG = [
    *(("crop", wrong, "tokens_to_remove=.*; expected an integer") for wrong in ("a", None, 1.5, torch.tensor([1, 2]))),
    *(("batch_repeat_interleave", wrong, "repeats=.*; expected a positive integer") for wrong in ("a", 0, 1.5, None)),
    *(("reorder_cache", wrong, "beam_idx is no index of the sequences") for wrong in ("a", None, 0.5)),
    *(("batch_select_indices", wrong, "indices is no index of the sequences") for wrong in ("a", None, [0.5])),
]


def test_refusals_lose_nothing(model):
    cache = model(tiny.tokens(2, 5)).past_key_values
    before = [x.clone() for x in tensors(cache)]
    for columns in (-1, 6, 2.0, None, "2", torch.tensor([1, 2])):
        shown = re.escape(str(columns))
        with pytest.raises(InputError, match=f"rewind\\({shown}\\) of a cache of 5 columns; expected 0 to 5"):
            cache.rewind(columns)
    with pytest.raises(InputError, match="cache of 5 columns"):
        cache.crop(-6)
    for each in (cache, HeadraceCache()):
        for name, wrong, sentence in WRONG:
            with pytest.raises(InputError, match=sentence):
                getattr(each, name)(wrong)
    for name, wrong in itertools.product(("reorder_cache", "batch_select_indices"), ([2], torch.tensor([True] * 3))):
        with pytest.raises(InputError, match=r"is no index of the sequences of a cache: IndexError: .*\b2\b"):
            getattr(cache, name)(wrong)
    cache.states = cache.states
    with pytest.raises(InputError, match="columns 0 to 3 were read elsewhere, and their states set"):
        cache.rewind(2)
    assert cache.columns == 5 and same(before, tensors(cache))


def test_a_cache_goes_back_to_states_that_were_set(model):
    ids, given = tiny.tokens(1, 3), model(tiny.tokens(1, 4)).past_key_values.states
    cache, expected = HeadraceCache(), None
    for columns in (0, 3):
        cache.states = copy.deepcopy(given)
        for _ in range(2):
            logits = model(ids, past_key_values=cache).logits
            assert expected is None or relative(logits, expected) <= 1e-12
            expected = logits
            cache.rewind(3)
            model.read_pending(cache)
            assert cache.columns == columns and cache.states is not None
        model(ids, past_key_values=cache)


def test_prompts_of_padding_alone_have_rows(model):
    ids, none = tiny.tokens(2, 3), torch.zeros(2, 3)
    cache = model(ids, attention_mask=none, use_cache=True).past_key_values
    assert cache.batch_size == 2
    with pytest.raises(InputError, match="past_key_values holds 2 sequences; expected 1"):
        model(ids[:1], past_key_values=cache)
    cache.rewind(1)
    model.read_pending(cache)
    later = model(ids, past_key_values=cache).logits
    assert relative(later, model(ids).logits) <= 1e-12


def test_states_that_cannot_be_joined_are_refused():
    ids, none = tiny.tokens(1, 3), torch.zeros(1, 3)
    gla, padded = tiny.build("gla"), {"attention_mask": none}
    for model, other, mine, theirs in (
        (gla, tiny.build("mamba and s4"), {}, {}), (gla, gla, {}, padded), (gla, gla, padded, padded),
        (*[tiny.build("transformer")] * 2, {}, {}), (gla, tiny.build("gla", hidden_size=64), {}, {}),
    ):  # fmt: skip
        pairs = (model, mine), (other, theirs)
        first, second = (each(ids, use_cache=True, **where).past_key_values for each, where in pairs)
        before = [x.clone() for x in tensors(first)]
        with pytest.raises(InputError, match="append joins states of the same kinds and of one size"):
            first.append(second)
        assert same(before, tensors(first))


def test_rows_of_snapshots_and_ids_change_together(model):
    for name in ("reorder_cache", "batch_select_indices", "batch_repeat_interleave"):
        reader = Reader(model, 3)
        reader.read(tiny.tokens(3, 4), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [1, 0, 1, 1]]))
        reader.cache.snapshot()
        reader.read(tiny.tokens(3, 3))
        rows = torch.tensor([2, 0]) if name != "batch_repeat_interleave" else torch.tensor([0, 0, 1, 1, 2, 2])
        getattr(reader.cache, name)(2 if "repeat" in name else rows)
        reader.ids, reader.mask = reader.ids[rows], reader.mask[rows]
        assert reader.cache.batch_size == len(rows)
        reader.rewind(2)
        assert reader.cache.pending == 1 and reader.error() <= 1e-12
        reader.rewind(6)
        assert reader.cache.pending == 2 and reader.error() <= 1e-12
    first, second = Reader(model, 1), Reader(model, 1)
    for reader in (first, second):
        reader.read(tiny.tokens(1, 5))
        reader.cache.snapshot()
    first.cache.append(HeadraceCache())
    first.cache, read = HeadraceCache(), first.cache
    first.cache.append(read)  # neither of them changes what was read
    first.cache.append(second.cache)
    last = tiny.tokens(2, 1)
    with pytest.raises(InputError, match="were read before sequences of another cache were appended"):
        first.cache.rewind(1)
    logits = model(last, past_key_values=first.cache).logits
    assert relative(logits[1:], second.model(torch.cat([second.ids, last[1:]], 1)).logits[:, -1:]) <= 1e-12


def test_copies_are_independent(model):
    reader = Reader(model, 1)
    reader.read(tiny.tokens(1, 4))
    reader.cache.snapshot()
    reader.read(tiny.tokens(1, 3))
    other = reader.copy()
    reader.rewind(2)
    reader.read(tiny.tokens(1, 3))
    assert other.cache.columns == 7 and other.error() <= 1e-12
    other.rewind(6)
    assert other.error() <= 1e-12 and reader.error() <= 1e-12
    reader.cache.reset()
    assert (reader.cache.snapshots.columns, reader.cache.columns, reader.cache.pending) == ([0], 0, 0)


def test_a_temporary_snapshot_takes_the_place_of_the_last_one(model):
    cache, found = HeadraceCache(), []
    # also twice at a column: it stays if one of them is not temporary
    for kinds in ([True], [False], [True], [True], [False, True], [True, False], [True]):
        model(tiny.tokens(1, 2), past_key_values=cache)
        for temporary in kinds:
            cache.snapshot(temporary=temporary)
        found.append(cache.snapshots.columns)
    assert found[:4] == [[0, 2], [0, 2, 4], [0, 4, 6], [0, 4, 8]]
    assert found[4:] == [[0, 4, 10], [0, 4, 10, 12], [0, 4, 10, 12, 14]]


def test_ids_that_come_one_by_one_are_kept_in_few_pieces(model):
    cache, ids = HeadraceCache(), tiny.tokens(1, 70)
    for token in ids.unbind(1):
        model(token[:, None], past_key_values=cache)
    assert len(cache.snapshots.pieces) <= 7 and torch.equal(cache.snapshots.ids(3, 69)[0], ids[:, 3:69])


def test_generation_takes_no_snapshots(model):
    out = model.generate(tiny.tokens(1, 5), max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
    cache = getattr(out, NAME)
    assert cache.snapshots.columns == [0] and cache.snapshots.nbytes == 0 and cache.columns == 13
    cache.rewind(6)
    assert cache.pending == 7
    model.read_pending(cache)
    ids, last = out.sequences[:, :7], tiny.tokens(1, 2)
    assert relative(model(last, past_key_values=cache).logits, model(torch.cat([ids, last], 1)).logits[:, 7:]) <= 1e-12


def test_a_call_that_fails_in_a_later_piece_loses_nothing(monkeypatch):
    monkeypatch.setattr(stack, "PIECE", 1)
    reader = Reader(tiny.build("gla", style={"positions": "learned"}, max_position_embeddings=8), 2)
    reader.read(tiny.tokens(2, 3))
    other = reader.copy()
    with pytest.raises(InputError, match="a sequence has 9 tokens; expected"):
        reader.model(tiny.tokens(2, 6), past_key_values=reader.cache)
    assert reader.cache.columns == 3 and same(tensors(reader.cache), tensors(other.cache)) and reader.error() <= 1e-12


@pytest.mark.parametrize("name", ["softmax-gated-deltanet", "hybrid", "gpt", "window", "rwkv7"])
@pytest.mark.parametrize("kept", [None, 4, 7])
def test_a_call_that_fails_between_two_layers_is_forgotten(name, kept):
    """As for want of memory, or after Ctrl-C: the layers before have written their states."""
    reader = Reader(tiny.build(name), 2)
    for columns in (4, 3):
        reader.read(tiny.tokens(2, columns))
        if reader.cache.columns == kept:
            reader.cache.snapshot()
    later = reader.model.model.layers[-1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        reader.model(tiny.tokens(2, 1), past_key_values=reader.cache)
    assert (reader.cache.columns, reader.cache.pending) == (7, 7 - (kept or 0))
    with pytest.raises(ZeroDivisionError) if reader.cache.pending else nullcontext():
        reader.model.read_pending(reader.cache)
    later.remove()
    assert reader.error() <= 1e-12


def test_a_call_of_embeddings_that_fails_between_two_layers_leaves_no_states(model):
    cache, failed = HeadraceCache(), model.model.layers[-1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(inputs_embeds=model.model.embed_tokens(tiny.tokens(1, 3)), past_key_values=cache)
    failed.remove()
    assert not cache.is_initialized
    model(inputs_embeds=model.model.embed_tokens(tiny.tokens(1, 3)), past_key_values=cache)
    failed = model.model.layers[-1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(tiny.tokens(1, 1), past_key_values=cache)
    failed.remove()
    with pytest.raises(InputError, match="columns 0 to 3 were read from embeddings, which are not kept"):
        model(tiny.tokens(1, 1), past_key_values=cache)


@torch.inference_mode()
def test_a_native_call_that_fails_loses_nothing():
    """Also where pending tokens are read before an unknown one."""
    skip_if_missing("native")
    model = tiny.build("gla").float()
    for pending in (0, 2):
        reader = Reader(model, 1)
        reader.read(tiny.tokens(1, 4))
        reader.cache.snapshot()
        reader.read(tiny.tokens(1, 3))
        reader.rewind(3 - pending)
        other = reader.copy()
        with pytest.raises(InputError, match="a token is not below"):
            model(torch.tensor([[1, 2, model.config.vocab_size]]), past_key_values=reader.cache)
        assert reader.cache.columns == 4 + pending and reader.cache.pending == pending
        assert same(reader.cache.covered_states[0][:1], other.cache.covered_states[0][:1])
