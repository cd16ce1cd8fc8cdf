"""Attention layers that become linear mixers: what is taken over, what stays, and what is refused."""

import copy
import math
from functools import partial

import pytest
import torch

import tiny
from decoding import decoded
from equation import MAX_ERROR_RATIO, skip_if_missing
from headrace import InputError, load, quantize, zoo
from headrace.convert import export_checkpoint
from headrace.convert.linearize import linearize, with_linear_layers
from headrace.extra.capped import CappedSpec
from headrace.extra.late_norm import LateNormSpec
from headrace.layers.rotary import angles, rotate
from headrace.spec import AttentionSpec, MixerSpec, Rope
from headrace.verification.verify import laws, relative

ATTENTION = [
    "transformer", "gqa(kv_heads=2, bias=true)", "gqa(kv_heads=1, qk_norm=head, head_dim=12)",
    "gqa(qk_norm=head-offset, gate=channel)", "gqa(gate=head, bias=qkv)", "gqa(rotary=false, bias=o, scale=one)",
    "gqa(rope.theta=500, scale=half-key)", "gqa(rope.kind=linear, rope.factor=4, rope.dims=4, scale=0.3)",
    "gqa(qk_norm=head, scale=0.3)", "sliding-window", "gqa(kv_heads=2, qk_norm=joint, scale=0.3)",
    "gqa(rope.kind=dynamic, rope.factor=2, rope.original=64)",
    AttentionSpec(rope=Rope("longrope", factor=2.0, original=64, short=(1.0, 2.0, 3.0, 4.0), long=(8.0,) * 4)),
]  # fmt: skip
ATTENTION += [LateNormSpec(2, rope=Rope("yarn", factor=4.0, original=4)), LateNormSpec(2, weights=False)]
CAPPED = CappedSpec(2, rotary=False, cap=1.0)  # whose bound is not taken over: new layers learn it
SINKS = "gqa(kv_heads=2, null=learned)"  # likewise
PAIRS = "linear-attention(inputs.feature_map=identity, read.norm=none)"  # the weight of a pair of tokens is its logit
SCALES = {"key": lambda d: d**-0.5, "one": lambda d: 1.0, "half-key": lambda d: (d / 2) ** -0.5}


def model_of(*mixers):
    """A model whose biases and norms are not those of an initialization."""
    return tiny.trained(tiny.build([*mixers], num_hidden_layers=len(mixers)).double()).eval()


def mixer(model, i=0):
    return model.model.backbone.layers[i].mixer


def literal(layer, x):
    """The layer's output [B, T, D] with its logits as the weights of the values."""
    spec, d, T = layer.spec, layer.head_dim, x.shape[1]
    q, k, v = (p(x).unflatten(-1, (-1, d)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    late = isinstance(spec, LateNormSpec)
    q, k = (q, k) if late else (normalized(q, layer.q_norm), normalized(k, layer.k_norm))
    if spec.rotary:
        turn = angles(torch.arange(T)[None], spec.rope, layer.rope_theta, d, torch.tensor([[T]]))
        q, k = rotate(q, turn), rotate(k, turn)
    q, k = (normalized(q, layer.q_norm), normalized(k, layer.k_norm)) if late else (q, k)
    scale, out = spec.scale if isinstance(spec.scale, float) else SCALES[spec.scale](d), torch.zeros_like(q)
    for h in range(q.shape[2]):
        g = h // (q.shape[2] // k.shape[2])
        for t in range(T):
            for s in range(t + 1):
                out[:, t, h] += scale * (q[:, t, h] * k[:, s, g]).sum(-1, keepdim=True) * v[:, s, g]
    if layer.g_proj is not None:
        out = out * layer.g_proj(x).sigmoid().unflatten(-1, (q.shape[2], -1))
    return layer.o_proj(out.flatten(-2))


def normalized(y, norm):
    """Of each head, or of all together."""
    return y if norm is None else norm(y.flatten(2).unflatten(2, (-1, *norm.normalized_shape))).view_as(y)


@pytest.mark.parametrize("attention", [*ATTENTION, CAPPED, SINKS])
@torch.no_grad()
def test_logits_of_pairs_and_values_are_taken_over(attention):
    model = model_of(attention)
    x = torch.randn(2, 7, model.config.hidden_size, dtype=torch.float64)
    assert relative(mixer(linearize(model, PAIRS))(x)[0], literal(mixer(model), x)) < 1e-12


@pytest.mark.parametrize("attention", [*ATTENTION, CAPPED])
@torch.no_grad()
def test_a_first_token_is_as_before(attention):
    """It attends to itself alone. The sum of weights, here over 0.01, has 1e-6 added."""
    model, ids = model_of("gla", attention, attention), tiny.tokens(3, 1)
    model.generation_config.eos_token_id = [1, 7]  # the ends of a text and of a turn
    linear = linearize(model, "hedgehog")
    assert relative(linear(ids).logits, model(ids).logits) < 1e-4 and linear.generation_config.eos_token_id == [1, 7]


@pytest.mark.parametrize("attention", ATTENTION)
@torch.no_grad()
def test_a_window_that_is_never_left_is_attention(attention):
    model = model_of(attention)
    x = torch.randn(2, 11, model.config.hidden_size, dtype=torch.float64)
    new = mixer(linearize(model, "lolcats(window=11)"))
    assert new.in_proj.weight.shape[0] == sum(p.out_features for p in projections(mixer(model)))
    assert relative(new(x)[0], mixer(model)(x)[0]) < 1e-12


@pytest.mark.parametrize("norm", ["qk_norm=head", "qk_norm=joint", "late"])
def test_norms_of_q_and_k_keep_their_epsilon(norm):
    model = model_of(LateNormSpec(2) if norm == "late" else f"gqa(kv_heads=2, {norm})")
    new = mixer(linearize(model, "gla(read.eps=0.1)"))
    assert new.norm_eps == 0.1 and new.q_norm.eps == new.k_norm.eps == mixer(model).q_norm.eps == model.config.norm_eps


def projections(layer):
    return [p for p in (layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj) if p is not None]


@torch.no_grad()
def test_other_layers_stay_and_the_model_is_one_of_ours(tmp_path):
    model, ids = model_of("transformer", "gla", "gqa(kv_heads=2, qk_norm=head)", "transformer"), tiny.tokens(2)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    linear = linearize(model, "hedgehog", [2, 0])
    assert linear.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    after = linear.state_dict()
    replaced = "model.backbone.layers.0.mixer", "model.backbone.layers.2.mixer"
    same = [name for name in before if not name.startswith(replaced)]
    assert same and all(torch.equal(after[name], before[name]) for name in same)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    linear.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert torch.equal(again(ids).logits, linear(ids).logits)
    new = again.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(new[:, -1], again(new[:, :-1]).logits[:, -1].argmax(-1))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_stays_is_shared_on_the_models_device(device):
    """As on a GPU, to which a device without numbers is nearest here."""
    model = model_of("gqa(kv_heads=2)", "gqa(kv_heads=2)").to(device)
    linear = with_linear_layers(model, "lolcats", [1])
    before, after = (x.state_dict() for x in (model, linear))
    assert {x.device.type for x in (*after.values(), *linear.buffers())} == {device}
    if device == "cpu":
        shared = {name for name in before.keys() & after if before[name].is_set_to(after[name])}
        assert shared == {name for name in after if ".layers.1.mixer." not in name}
    assert linear.lm_head.weight is linear.get_input_embeddings().weight
    assert all(p.requires_grad for p in linear.parameters())


@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
def test_a_quantized_model_is_refused(kind):
    model = quantize(model_of("gqa(kv_heads=2)", "gqa(kv_heads=2)").float(), kind)
    with pytest.raises(InputError, match="as a quantized one; expected a model as"):
        linearize(model, "hedgehog", [1])


@pytest.mark.parametrize("change", [quantize, partial(torch.compile, backend="eager")])
def test_a_model_with_other_parameters_than_its_config_is_not_exported(change, tmp_path):
    model = change(tiny.build("gla", num_hidden_layers=1))
    with pytest.raises(InputError, match=r"differ in .*; expected neither quantized layers nor adapters"):
        export_checkpoint(model, "gla", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


@torch.no_grad()
def test_new_parts_begin_as_the_manual_says():
    new = mixer(linearize(model_of("gqa(kv_heads=2)"), "lolcats(decay.kind=sigmoid-head)"))
    for weight in (new.learned_map.q, new.learned_map.k):
        assert torch.equal(weight, torch.eye(new.K, dtype=weight.dtype).expand_as(weight))
    assert new.window_factor.sigmoid().tolist() == pytest.approx([0.1] * new.H)
    half = -math.log(2) / new.decay(torch.zeros(1, 1, new.H))[0, 0]  # tokens
    assert (round(half[0].item()), round(half[-1].item())) == (14, 280)


def test_a_converted_model_has_no_way_back(tmp_path):
    """Neither does the export to GGUF name one."""
    model = model_of("transformer", "transformer")
    model.config.converted_from = {"model_type": "llama"}
    linear = linearize(model, "hedgehog", [1])
    with pytest.raises(InputError, match="layer 1 has a mixer of type 'linearized'; expected 'attention'"):
        export_checkpoint(linear, "llama", tmp_path)
    pytest.importorskip("gguf")
    from headrace.export.gguf import architecture

    with pytest.raises(InputError, match=r"in all layers$"):
        architecture(linear.config)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", ["hedgehog(decay.kind=sigmoid-head)", "lolcats(window=4)", "gla", "gated-deltanet"])
@torch.no_grad()
def test_the_hybrid_decodes_in_one_native_call(name, quantized):
    skip_if_missing("native")
    model = linearize(model_of("gqa(kv_heads=2)", "gqa(kv_heads=2, qk_norm=head)"), name, [1]).float()
    model, ids = quantize(model) if quantized else model, tiny.tokens(2, 20)
    exact = copy.deepcopy(model).double()(ids).logits
    error = max(relative(a, b) for a, b in zip(model(ids).logits.unbind(1), exact.unbind(1), strict=True))
    limit = 40 * 2**-16 if quantized else MAX_ERROR_RATIO * error  # int8: x is rounded to 16 bits
    assert relative(decoded(model, ids, 3), exact[:, 3:]) <= limit


def test_what_a_spec_can_express_has_no_plug_in():
    """So that the native kernels compute its tokens."""
    plain = linearize(model_of("gqa(kv_heads=2, bias=qkv)"), "gla").config.mixers[0]
    assert type(plain) is MixerSpec and plain.inputs.rotary and plain.inputs.bias and plain.heads.count == 4


@pytest.mark.parametrize("norm", ["head", "joint"])
@pytest.mark.parametrize(
    "name",
    ["gated-deltanet", "gated-deltaproduct", "kda", "rwkv6", "mamba2", "mamba3", "mlstm", "based", "softmax-gla"],
)
def test_mixers_of_all_kinds_take_a_layer_over(name, norm):
    linear, ids = linearize(model_of(f"gqa(kv_heads=2, qk_norm={norm})"), name), tiny.tokens(2)
    loss = linear(ids, labels=ids).loss
    loss.backward()
    assert loss.isfinite() and mixer(linear).in_proj.weight.grad.any()
    if mixer(linear).conv is not None:
        assert mixer(linear).conv.weight.sum((1, 2)).eq(1).all()


@pytest.mark.parametrize(
    ("attention", "name", "layers", "sentence"),
    [
        ("transformer", "mamba", None, "mixer='mamba' has no q, k and v of heads"),
        ("transformer", "mesa", None, "mixer='mesa' adds steps to linear attention"),
        ("transformer", "hgrn2", None, "mixer='hgrn2' has no k to take over: inputs.key='complement'"),
        ("gqa(rotary=false, qk_norm=head)", "hgrn2", None, "inputs.key='complement'; expected 'projected'"),
        ("transformer", "gla", [1], "layer 1 is no layer of softmax attention; expected one of 0"),
        ("transformer", "gla", [], "layers=.. makes no layer linear; expected some of 0"),
        ("gla", "gla", None, "the model has no attention layer that could become linear$"),
        ("mla", "gla", None, "could become linear: its k and v are projections of a normalized latent"),
        ("fox", "gla", None, "^layer 0 has forget=True, which no linear mixer has"),
        ("gqa(rope.dims=4)", "xpos-retnet", None, "^mixer='xpos-retnet' cannot take over layer 0: decay.kind"),
        ("gqa(rotary=false)", "xpos-retnet", None, "^mixer='xpos-retnet' cannot take over layer 0: decay.kind"),
        ("gqa(rotary=false)", "gla(inputs.rotary=true)", None, "inputs.rotary=True, and the layer has False"),
        ("gqa(rotary=false)", zoo.get("hedgehog(inputs.rotary=true, rope.theta=5)"), None, "theta=5.0, and .* None"),
        ("transformer", "hedgehog(qk_norm=head)", None, "qk_norm=head, and the layer has none; expected the same"),
        ("transformer", "gla(heads.key_dim=5)", None, "heads.key_dim=5, and the layer has 8; expected the same"),
        ("gqa(gate=channel)", "gla(read.gate=silu)", None, "read.gate=silu, and the layer has sigmoid"),
    ],
)
def test_what_cannot_be_taken_over_is_named(attention, name, layers, sentence):
    with pytest.raises(InputError, match=sentence):
        linearize(model_of(attention), name, layers)


@pytest.mark.parametrize(
    ("attention", "setting", "sentence"),
    [
        ("transformer", "heads.count=2", "heads.count=2, and the layer has 4"),
        ("gqa(rope.theta=500)", "rope.theta=10000", "rope.theta=10000.0, and the layer has 500.0"),
        ("transformer", "rope.theta=500", "rope.theta=500.0, and the layer has 10000.0"),
    ],
)
def test_a_setting_that_is_not_the_layers_is_refused(attention, setting, sentence):
    model, name = model_of(attention), f"hedgehog(inputs.rotary=true, {setting})"
    for mixer in (name, zoo.get(name)):
        with pytest.raises(InputError, match=f"cannot take over layer 0: {sentence}; expected the same"):
            linearize(model, mixer)


@pytest.mark.parametrize(
    "name", ["hedgehog(heads.count=4, inputs.rotary=true, rope.theta=10000)", "delta-fast-weights"]
)
def test_settings_of_the_layer_and_of_the_zoo_are_taken(name):
    """delta-fast-weights stands for 8 heads."""
    assert mixer(linearize(model_of("transformer"), name)).H == 4


OWN = "qk_norm=head, rope.kind=linear, rope.factor=2, rope.dims=4"


@pytest.mark.parametrize(
    "expression",
    [
        f"hedgehog(map=exp, decay.kind=sigmoid-head, {OWN})", f"softmax-hedgehog(competition.write=value, {OWN})",
        "gla(inputs.rotary=true)",
    ],
)  # fmt: skip
def test_laws_hold_with_frequencies_and_norms_of_its_own(expression):
    spec = zoo.get(expression)
    if type(spec) is MixerSpec:
        spec = linearize(model_of(f"gqa({OWN})"), spec).config.mixers[0]
    rows = list(laws(spec, "cpu", torch.float64, seed=0))
    assert len(rows) > 10 and all(row.holds for row in rows)
