"""Every way of running every mixer of the zoo, with every option of head competition, is the literal equation."""

import warnings
from functools import cache

import pytest
import torch

import tiny
from headrace import GateWarning, InputError, backends, layers, zoo
from headrace.ops.backends.base import Kernel
from headrace.ops.dispatch import BACKENDS
from headrace.spec import serialize as spec
from headrace.verification import verify as verification
from headrace.verification.errors import Row, device_failed
from headrace.verification.op import Recurrence, op_laws
from headrace.verification.verify import BATCH, FORMS, HEADS, HIDDEN, WAYS, laws, relative, specimen, worst

COVERING = tiny.covering(zoo.names())
# Layers with a chunk, a tile, a block or a window of more than 21 tokens.
LONG = {
    "gla", "retnet", "comba", "gsa", "rwkv7", "mlstm", "lolcats", "bigbird", "longformer",
    "fox", "flash-reference", "s4",
}  # fmt: skip
CASES = [
    # A backbone without gates, which its version with gates has too, once for each value of its fields.
    *(name for name in zoo.names() if f"softmax-{name}" not in zoo.names() or name in COVERING),
    # Each option of competition and of what is beside it once, several to a mixer.
    "softmax-retnet(competition.source=diag, competition.temperature=0.5, inputs.conv=3)",
    "softmax-gla(competition.source=query, competition.activation=sigmoid, inputs.rotary=true)",
    "softmax-gated-deltanet(competition.source=hidden, competition.shuffle=true, heads.qk_groups=2)",
    "softmax-retnet(competition.read=query, competition.activation=sigmoid, competition.range=2, read.norm=none)",
    "softmax-gla(competition.read=none, competition.activation=null, read.order=gate-norm, read.gate=sigmoid)",
    "softmax-gated-deltanet(competition.write=none, read.norm=rms-joint, read.skip=true)",
    "softmax-retnet(competition=paper)", "softmax-retnet(heads.count=1)",
    "softmax-gla(competition.scale=one, competition.read=none, read.norm=group)",
    "jamba(style.experts.count=4)", "zamba", "softmax-gla+sliding-window",
    "softmax-gated-deltanet(competition.write=beta)", "softmax-kda(competition.write=beta)",
    "softmax-gated-deltanet(competition.write=beta, competition.activation=null)",
    "softmax-gla(competition.top_k=2, competition.memories_per_head=2, competition.freeze=true)",
    "softmax-residual-delta(competition.top_k=2, competition.freeze=true, competition.write=beta)",
    "softmax-gated-deltanet(decay.kind=none, competition=paper)", "softmax-linear-attention(competition=paper)",
    "softmax-gla(inputs.feature_map=relu, read.norm=sum)", "gla(inputs.feature_map=silu, write.beta=sigmoid)",
    "taylor-softmax(inputs.order=3, read.norm=rms, decay.kind=retnet)",
    "softmax-gla(inputs.order=2, heads.key_dim=3)", "softmax-gated-deltanet(inputs.order=2, heads.key_dim=3)",
    "rwkv6(inputs.order=2, heads.key_dim=3)",
    "softmax-rnn-norm(numerator=relu, denominator=layer, affine=true)", "softmax-rnn-gate(gate=none)",
    "softmax-rnn-gate(order=3, gate=both)", "softmax-rnn-norm(numerator=elu+1, denominator=sum)",
    "softmax-rnn-norm(numerator=cosine, order=2, denominator=detached)",
    "softmax-rnn-norm(numerator=cosine, denominator=input-length)",
    "softmax-rnn-norm(numerator=cosine, denominator=input-length, order=2)",
    "softmax-rnn-norm(denominator=detached)", "softmax-rnn-norm(denominator=rms)",
    "softmax-rnn-norm(denominator=layer)",
    "recurrent-softmax-rnn-norm(numerator=cosine, denominator=input-length, order=2)",
    "recurrent-softmax-rnn-norm(numerator=elu+1, denominator=sum, gate=output)",
    "recurrent-softmax-rnn-norm(numerator=relu, denominator=detached, by_length=true, gate=both)",
    "recurrent-softmax-rnn-norm(order=1, denominator=layer, affine=true, by_length=true, gate=output, "
    "gate_order=gate-norm)",
    "softmax-gla(read.norm=layer, read.affine=true, inputs.value_gate=true, read.gate=sigmoid-head, inputs.order=1)",
    "softmax-linear-attention(read.norm=detached, competition.memories_per_head=2, competition.read=query)",
    "softmax-retnet(read.norm=l2, read.by_length=true, inputs.by_length=true, inputs.conv=3)",
    "residual-delta(write.residual_chunk=1)", "kda(write.residual_chunk=5)",
    "softmax-residual-delta(heads.qk_groups=2, decay.kind=retnet, competition.write=beta)",
    "softmax-linear-attention(competition.memories_per_head=3)", "softmax-mamba2(competition.memories_per_head=3)",
    "softmax-rwkv6(competition.memories_per_head=3)", "softmax-residual-delta(competition.memories_per_head=3)",
    "softmax-kda(competition.memories_per_head=2, competition.write=beta, competition.source=diag)",
    "softmax-retnet(competition.memories_per_head=2, competition.read=none, heads.qk_groups=2, "
    "competition.activation=null)",
    "lolcats(window=4, kv_heads=2, map=exp)", "softmax-lolcats(window=3, decay.kind=sigmoid-head, kv_heads=1)",
    "softmax-mamba2(heads.qk_groups=2, read.norm=rms-groups, inputs.bias=true, read.bias=true, decay.dt_floor=0.01)",
    "softmax-kda(decay.rank=full, decay.lower_bound=-5.0, read.gate_bias=false, write.beta=sigmoid-2)",
    "retnet(decay.kind=slopes, decay.rate=0.5, inputs.value_map=silu, read.norm=rms-joint, read.gate=sigmoid)",
    "softmax-gated-deltanet(inputs.shift=ddlerp, inputs.bias=true, competition.source=hidden)",
    "softmax-deltaproduct(competition.write=beta, decay.kind=retnet)",
    "rg-lru(expand=2)", "short-conv(bias=true, conv_bias=true)", "rwkv4(expand=2)", "mamba(bias=true, conv_bias=false)",
    "mamba3(inputs.turns=0, inputs.order=1)",
    "sliding-window(pattern.window=2)", "longformer(pattern.window=7)", "gqa(null=true)", "mqa(buckets=8)",
    "gqa(null=learned, gate=channel, qk_norm=joint, head_dim=6, bias=qkv, rope.dims=4)", "mla(q_rank=5, gate=head)",
    "mla(rotary=false, gate=channel)", "fox(kv_heads=2, buckets=8)", "gla-outer(rank=4)",
    "sliding-window(null=learned, pattern.window=3, qk_norm=head, rope.kind=yarn, rope.original=8, rope.factor=4)",
    "bigbird(pattern.block=4, pattern.window=8, pattern.first=0, kv_heads=2, null=true, buckets=8)",
    "bigbird(pattern.block=4, pattern.window=8, pattern.first=6, kv_heads=2, null=true, buckets=8)",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::headrace.GateWarning")
@pytest.mark.parametrize("name", CASES)
def test_every_form_equals_the_reference(name, monkeypatch):
    """In float32 too, where what rounds is wrong by 1e-7, for every value of every field. 21 tokens are the fewest that
    can be padded and split."""
    monkeypatch.setattr(verification, "TOKENS", 67 if name in LONG else 21)
    monkeypatch.setattr(verification, "exact", cache(verification.exact))
    made = f"{name}(ridge_steps=3)" if name.endswith("mesa") else name  # 30 of them: tests/extra/test_mesa.py
    rows = list(laws(made, "cpu", torch.float64, seed=0))
    assert len(rows) >= 7
    if name in COVERING:  # the native backend has computed in float32
        rows += laws(made, "cpu", torch.float32, seed=0, backends=["torch"])
    assert [row for row in rows if not row.holds] == []


def test_bfloat16_computes_in_float32():
    rows = list(laws("softmax-gla", "cpu", torch.bfloat16, seed=0))
    assert rows and not [row for row in rows if not row.holds]


def test_laws_can_fail():
    """A mixer with a wrong memory is caught: the laws are not satisfied by anything that runs."""
    mixer, x = specimen("gla", 0)
    y = mixer(x)[0]
    mixer.in_proj.weight.data.add_(1e-6)
    assert all(relative(way(mixer, x), y) > 1e-10 for way in (FORMS | WAYS).values())


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_nonfinite_values_are_an_infinite_error(wrong):
    """In any place: Python's max of several numbers passes over a NaN that is not the first."""
    right, bad = torch.ones(3), torch.tensor([1, wrong, 1])
    assert relative(bad, right) == relative(right, bad) == float("inf")
    for i in range(2):
        pair = [bad if i == j else right for j in range(2)]
        assert worst(pair, [right, right]) == worst([right, right], pair) == float("inf")


def test_every_backend_is_checked_in_a_supported_precision():
    rows = {row.law: row for row in laws("gla", "cpu", torch.float64, seed=0)}
    assert {"torch in float64", "torch in float64, gradients", "torch in float64, decoding"} <= set(rows)
    if backends()["native"]["linear_attention"] is None:
        assert {"native in float32", "native in float32, gradients", "native in float32, decoding"} <= set(rows)


def worse(result):
    return result[0] + 1e-3, result[1]


def test_backends_are_checked_while_decoding(monkeypatch):
    kernel = BACKENDS["torch"].step
    wrong = kernel._replace(run=lambda *arguments: worse(kernel.run(*arguments)))
    monkeypatch.setitem(BACKENDS, "new", BACKENDS["torch"]._replace(step=wrong))
    rows = laws("gla", "cpu", torch.float64, seed=0)
    assert [row.law.partition(", ")[2] for row in rows if not row.holds] == ["decoding"]


@pytest.mark.parametrize(
    ("wrong", "notes"),
    [(lambda out: out * 1.001, []),
     (lambda out: out.nonexistent, ["AttributeError: 'Tensor' object has no attribute 'nonexistent'"])],
    ids=["inexact", "failing"],
)  # fmt: skip
def test_wrong_backend_breaks_its_law(monkeypatch, wrong, notes):
    def run(call):
        out, state = BACKENDS["torch"].linear_attention.run(call)
        return wrong(out), state

    monkeypatch.setitem(BACKENDS, "new", BACKENDS["torch"]._replace(linear_attention=Kernel(run, lambda call: None)))
    broken = [row for row in laws("gla", "cpu", torch.float64, seed=0) if not row.holds]
    assert broken and all(row.law.startswith("new in float64") for row in broken)
    assert [row.note for row in broken if row.note] == notes


@pytest.mark.parametrize("name", [*zoo.names(), "softmax-residual-delta(competition.memories_per_head=3)"])
def test_state_shapes_and_bytes_match_the_spec(name):
    mixer, x = specimen(name, 0)
    named = mixer(x)[1]._asdict()
    described = zoo.get(name)
    shapes = described.state_shapes(HIDDEN, HEADS, x.shape[1])
    assert {key: tuple(named[key].shape) for key in shapes} == {key: (BATCH, *s) for key, s in shapes.items()}
    measured = sum(named[key][0].numel() * 4 for key in shapes)
    assert measured == described.state_bytes(HIDDEN, HEADS, x.shape[1])


def test_new_mixer_is_one_table_entry(monkeypatch):
    monkeypatch.setitem(zoo.LINEAR, "leaky-delta", spec.change(zoo.LINEAR["deltanet"], "decay.kind", "retnet"))
    for name in ("leaky-delta", "softmax-leaky-delta"):
        assert name in zoo.names() and all(row.holds for row in laws(name, "cpu", torch.float64, seed=0))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("softmax-gla(competition=paper)", "divides it out again"),
        ("softmax-retnet(competition.read=query, read.norm=group)", "divides it out again"),
        ("softmax-gla(heads.count=1)", "the identity"),
    ],
)
def test_ineffective_gates_are_warned_about(name, sentence):
    with pytest.warns(GateWarning, match=sentence):
        layers.build(zoo.get(name), hidden_size=32, num_heads=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers.build(zoo.get("softmax-gla"), hidden_size=32, num_heads=4)


SMALL = [Recurrence(decay, rule, 2, 9, 2, 4, 3) for decay in ("", "H", "BTH", "BTHK") for rule in ("add", "delta")]
SMALL.append(Recurrence("BTH", "delta", 2, 9, 2, 4, 3, queries=2))


def test_op_equals_the_reference():
    rows = list(op_laws("cpu", 0, ["torch"], SMALL))
    assert len(rows) == len(SMALL) * 2 * 3 and not [row for row in rows if not row.holds]
    assert len({row.law for row in rows}) == len(rows)


def test_wrong_op_breaks_its_law(monkeypatch):
    """An output that is off by 0.1 %, in float32, and a state that is off by 2 % in both precisions."""

    def run(call):
        out, state = BACKENDS["torch"].linear_attention.run(call)
        return out * 1.001, state * 1.02

    monkeypatch.setitem(BACKENDS, "new", BACKENDS["torch"]._replace(linear_attention=Kernel(run, lambda call: None)))
    broken = {row.law.rpartition("new in ")[2] for row in op_laws("cpu", 0, ["new"], SMALL[:1]) if not row.holds}
    assert broken == {"float32", "float32, state", "float32, gradients", "bfloat16, state"}


def test_failed_device_is_recognized(monkeypatch):
    def illegal_access(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    failed = Row("gla", "triton in float32", float("inf"), 1e-5, "RuntimeError: misaligned address")
    assert not device_failed("cpu", [failed])
    monkeypatch.setattr(torch, "ones", illegal_access)
    assert device_failed("cuda", [failed]) and not device_failed("cuda", [failed._replace(note="")])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dtype": torch.float16}, "dtype=torch.float16; expected one of torch.float64"), ({"device": "tpu7"}, "tpu7"),
     ({"backends": ["cuda"]}, "backend='cuda' is unknown"), ({"backends": ["onnx"]}, "backend='onnx' cannot run here"),
     ({"backends": "torch,cuda"}, "backend='cuda' is unknown"), ({"backends": 5}, "backends=5; expected names in"),
     ({"seed": 10**400}, "seed=1000*…; expected an integer"), ({"dtype": []}, r"dtype=\[\]; expected one of")],
)  # fmt: skip
def test_invalid_arguments_of_verify_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        verification.verify(["gla"], **options)


def test_a_seed_draws_the_same_layer_whatever_was_drawn_before():
    found = []
    for before in range(2):
        torch.manual_seed(before)
        mixer, x = specimen("gla", 3, in_block=True)
        assert torch.initial_seed() == before
        found.append([x, *mixer.parameters()])
    assert all(map(torch.equal, *found))


def test_small_gradients_are_measured_relative_to_their_norm():
    large, small = torch.tensor([1.0, 2.0]), torch.tensor([1e-20, 2e-20])
    assert worst([large, 1.5 * small], [large, small]) == pytest.approx(0.5)
