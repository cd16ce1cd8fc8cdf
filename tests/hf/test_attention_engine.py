"""Softmax attention, and linear attention that imitates it, in the engine of single tokens: against float64 and the
modules. tests/convert/test_families.py compares its tokens with those of transformers' models."""

import copy
import json

import pytest
import torch

import tiny
from decoding import decoded, error_of_modules, is_accurate, read
from equation import MAX_ERROR_RATIO
from families import dense, parallel, softmax, sparse
from families.every import VARIANTS, described
from headrace.convert import FORMATS
from headrace.hf import HeadraceConfig, HeadraceForCausalLM
from headrace.verification.verify import relative

ATTENTION = [
    "transformer", "gqa(kv_heads=2)", "gqa(kv_heads=1, head_dim=12, bias=true)",
    "gqa(head_dim=20, kv_heads=2, qk_norm=head)",
    "gqa(count=8, kv_heads=1, head_dim=80)", "gqa(qk_norm=head-offset, gate=channel)", "gqa(qk_norm=joint, kv_heads=2)",
    "gqa(gate=head, bias=qkv)", "gqa(rotary=false, bias=o, scale=one)", "gqa(scale=half-key, rope.theta=500)",
    "gqa(rope.kind=linear, rope.factor=4, rope.dims=4, scale=0.3)",
    "gqa(rope.kind=yarn, rope.factor=4, rope.original=8)",
    "gqa(rope.kind=llama3, rope.factor=8, rope.original=16, rope.fast=4)",
    "gqa(null=true)", "gqa(null=learned, kv_heads=2)", "sliding-window(pattern.window=4)",
    "sliding-window(kv_heads=2, pattern.window=3, pattern.first=2, null=learned)", "sliding-window(pattern.window=1)",
    "sliding-window(pattern.window=1, pattern.first=3)",
]  # fmt: skip
LINEARIZED = [
    "hedgehog", "hedgehog(map=exp, decay.kind=sigmoid-head)", "hedgehog(heads.count=2, decay.kind=softplus)",
    "hedgehog(qk_norm=head, rope.kind=llama3, rope.factor=8, rope.original=16, rope.fast=4, inputs.bias=true)",
    "hedgehog(qk_norm=head, rope.kind=yarn, rope.factor=4, rope.original=8, rope.dims=4, read.scale=one)",
    "hedgehog(inputs.rotary_first=false, read.norm=rms, inputs.qk_norm=l2)",
    "softmax-hedgehog(decay.kind=sigmoid, qk_norm=head)", "softmax-hedgehog(competition.source=query)",
    "lolcats", "lolcats(window=5, kv_heads=2, map=exp, qk_norm=head)", "lolcats(window=1, kv_heads=1)",
    "hedgehog(qk_norm=joint)", "lolcats(window=5, kv_heads=2, qk_norm=joint)",
    "lolcats(window=0, kv_heads=2, qk_norm=joint)", "softmax-lolcats(window=0, kv_heads=1, qk_norm=joint)",
    "lolcats(window=4, kv_heads=2, decay.kind=sigmoid-head)", "lolcats(window=3, decay.kind=retnet, read.scale=one)",
    "lolcats(window=4, inputs.rotary=false, inputs.rotary_first=false, read.gate=silu)",
    "softmax-lolcats(window=0, kv_heads=2)", "retnet(inputs.feature_map=relu, inputs.rotary_first=true)",
]  # fmt: skip
SOME = [
    "gqa(kv_heads=2)", "sliding-window(kv_heads=2, pattern.window=3, pattern.first=2)",
    "hedgehog(decay.kind=sigmoid-head)", "lolcats(window=3, kv_heads=2, decay.kind=sigmoid-head)",
]  # fmt: skip
HYBRID = ["gated-deltanet", "gqa(kv_heads=2)", "gla", "sliding-window(pattern.window=4)"]
FAMILIES = softmax.FAMILIES | parallel.FAMILIES | dense.FAMILIES | sparse.FAMILIES
KNOWN = "without caps", "no growth", "another activation"  # variants without what the engine lacks
LACKS = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gpt_neo", "opt"), "positions"),
    **dict.fromkeys(("mixtral", "qwen3_moe", *sparse.FAMILIES), "Experts"), "gpt_oss": "ClampedMixture",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), "LatentAttention"),
    **dict.fromkeys(("gemma2", "vaultgemma"), "a bound of the logits"), "phimoe": "NearMixture",
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), "after the rotation"),
    "ministral3": "grows with its position", "apertus": "Sloped",
}  # fmt: skip
LONG = 40  # tokens, over which the memory of a cache moves several times
pytestmark = pytest.mark.usefixtures("native", "no_grad")


def model_of(*mixers, dtype=torch.float32, **changes):
    return tiny.build([*mixers], num_hidden_layers=len(mixers), **changes).to(dtype)


@pytest.mark.parametrize("mixer", [*ATTENTION, *LINEARIZED])
def test_tokens_equal_the_full_forward(mixer):
    assert is_accurate(model_of(mixer, mixer), tiny.tokens(2, LONG))


@pytest.mark.parametrize("mixer", [*SOME, "gqa(null=learned)"])
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batches_in_both_dtypes(mixer, rows, dtype):
    assert is_accurate(model_of(mixer, dtype=dtype), tiny.tokens(rows, 12))


@pytest.mark.parametrize(("kind", "variant"), [each for each in VARIANTS if each[0] in FAMILIES])
def test_models_of_transformers_are_computed_or_have_a_reason(kind, variant):
    fields = json.loads(described(kind, variant).to_json_string(use_diff=False))
    model = HeadraceForCausalLM(HeadraceConfig(**FORMATS[kind].model(fields)[0].arguments)).float().eval()
    of_length = "depend on the length" if variant.startswith(("dynamic", "longrope")) else None
    lacks = (of_length if kind == "phimoe" else None) or LACKS.get(kind, of_length)
    reason = model.engine.unsupported_reason(model)
    assert reason is None if lacks is None or variant in KNOWN else lacks in reason


def test_a_window_without_weight():
    """γ of e^−95, and no older token at first: 0 / 0 without its lower bound."""
    model = model_of("lolcats(window=4)")
    model.model.layers[0].mixer.window_factor.fill_(-95.0)
    assert is_accurate(model, tiny.tokens(2, 12))


def test_default_device_does_not_matter():
    """What the library gets lies on the CPU."""
    model, ids = model_of("transformer", "sliding-window(pattern.window=4)"), tiny.tokens(2, 12)
    expected = decoded(copy.deepcopy(model), ids, 5)
    with torch.device("meta"):
        found = decoded(model, ids, 5)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("mixer", SOME)
def test_padding_is_not_attended_to(mixer):
    model, ids = model_of(mixer, "gla", mixer), tiny.tokens(3, 20)
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[0, :5], mask[1, 2:4] = 0, 0
    cache = read(model, ids[:, :8], attention_mask=mask)
    native = torch.cat([model.engine.step(model, token, cache) for token in ids[:, 8:].T], 1)
    for row, kept in enumerate(mask.bool()):
        alone = torch.cat([ids[row : row + 1, :8][:, kept], ids[row : row + 1, 8:]], 1)
        error, exact = error_of_modules(model, alone)
        assert relative(native[row : row + 1], exact[:, -12:]) <= MAX_ERROR_RATIO * error


@pytest.mark.parametrize("mixer", SOME)
def test_modules_and_the_native_call_continue_each_other(mixer):
    """The caches of both have the same numbers at the same places."""
    model, ids = model_of(mixer), tiny.tokens(2, 24)
    cache, logits = read(model, ids[:, :4]), []
    for t in range(4, 24):
        token = ids[:, t : t + 1]
        if t % 3:
            logits.append(model.engine.read(model, token, cache))
        else:
            states = model.model(token, past_key_values=cache, use_cache=True)
            logits.append(model.logits(states.last_hidden_state))
    error, exact = error_of_modules(model, ids)
    assert relative(torch.cat(logits, 1), exact[:, 4:]) <= MAX_ERROR_RATIO * error


@pytest.mark.parametrize("mixers", [SOME[:1], SOME[1:2], SOME[:3], SOME[3:], HYBRID], ids=str)
@torch.inference_mode()
def test_several_tokens_of_a_sequence_in_one_call(mixers):
    model, ids = model_of(*mixers), tiny.tokens(1, 30)
    cache = read(model, ids[:, :5])
    logits = torch.cat([model.engine.read(model, piece, cache) for piece in ids[:, 5:].split([1, 17, 7], 1)], 1)
    error, exact = error_of_modules(model, ids)
    assert cache.columns == 30 and relative(logits, exact[:, 5:]) <= MAX_ERROR_RATIO * error


@pytest.mark.parametrize("mixers", [SOME[:1], SOME[1:2], SOME[:3], SOME[3:], HYBRID], ids=str)
@torch.inference_mode()
def test_a_cache_goes_back(mixers):
    model, ids = model_of(*mixers), tiny.tokens(1, 30)
    cache = read(model, ids[:, :6])
    cache.snapshot()
    for token in tiny.tokens(1, 9).T:
        model.engine.step(model, token, cache)
    cache.rewind(9)
    for token in ids[:, 6:20].T:
        model.engine.step(model, token, cache)
    cache.rewind(3)
    logits = torch.cat([model(piece, past_key_values=cache).logits for piece in ids[:, 17:].split(4, 1)], 1)
    error, exact = error_of_modules(model, ids)
    assert relative(logits, exact[:, 17:]) <= MAX_ERROR_RATIO * error


def test_a_hybrid_and_its_copies_continue_apart():
    model, ids = model_of(*HYBRID), tiny.tokens(3, LONG)
    assert is_accurate(model, ids)
    cache = read(model, ids[:, :10])
    model.engine.step(model, ids[:, 10], cache)
    other = copy.deepcopy(cache)
    expected = model.engine.step(model, ids[:, 11], cache)
    for token in (0, 1):
        model.engine.step(model, torch.full((3,), token), cache)
    assert torch.equal(model.engine.step(model, ids[:, 11], other), expected)
    other.reorder_cache(torch.tensor([2, 0]))
    error, exact = error_of_modules(model, ids)
    logits = model.engine.step(model, ids[[2, 0], 12], other)
    assert relative(logits[:, 0], exact[[2, 0], 12]) <= MAX_ERROR_RATIO * error


@pytest.mark.parametrize(
    "mixers", [["gqa(kv_heads=2)", "sliding-window(pattern.window=4)"], SOME[:3], SOME[3:]], ids=str
)
def test_generate_gives_the_tokens_of_the_modules(mixers):
    model, ids = model_of(*mixers), tiny.tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": LONG, "do_sample": False, "pad_token_id": 0}
    native = model.generate(ids, **options)
    assert "one native call" in model.engine.about(model)
    hook = model.model.backbone.layers[0].mixer.o_proj.register_forward_hook(lambda module, args, out: out)
    assert "has a hook" in model.engine.about(model) and torch.equal(model.generate(ids, **options), native)
    hook.remove()


@pytest.mark.parametrize(
    ("mixer", "reason"),
    [
        ("gqa(forget=true)", "it does not support forget=True, in softmax attention"),
        (
            "gqa(rope.kind=dynamic, rope.factor=2, rope.original=64)",
            "rope.kind='dynamic', whose frequencies depend on the",
        ),
        ("softmax-lolcats(window=3)", "it does not support competition with a window"),
        ("lolcats(window=3, read.skip=true)", "it does not support read.skip with a window"),
        ("hedgehog(write.beta=sigmoid-2)", "it does not support beta='sigmoid-2'"),
        ("mla", "mixer is a "),
        ("bigbird", "mixer is a "),
    ],
)
def test_what_is_not_supported_has_a_reason(mixer, reason):
    model = model_of(mixer, "gla")
    assert reason in model.engine.about(model)
    ids = tiny.tokens(2, 9)
    assert is_accurate(model, ids, check=False)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("q_norm", {"eps": None}, "norms of q and k with eps=None and 1e-06"),
        ("k_norm", {"eps": 0.5}, "norms of q and k with eps=1e-06 and 0.5"),
        ("k_norm", {"eps": 1e-6, "elementwise_affine": False}, "k_norm is not a parameter of the mixer"),
    ],
)
def test_a_replaced_norm_of_heads_has_a_reason(name, settings, reason):
    model = model_of("hedgehog(qk_norm=head)")
    mixer = model.model.layers[0].mixer
    setattr(mixer, name, torch.nn.RMSNorm(mixer.K, **settings))
    assert reason in model.engine.about(model)
    assert "affine" in str(settings) or is_accurate(model, tiny.tokens(2, 9), check=False)


def test_a_cache_of_another_precision_is_read_by_modules():
    """They widen it; from then on the native call takes it."""
    model, ids = model_of("gqa"), tiny.tokens(1, 9)
    cache = read(model, ids[:, :5])
    cache.states = [state._replace(k=state.k.bfloat16(), v=state.v.bfloat16()) for state in cache.states]
    for token in ids[:, 5:].T:
        before, logits = cache.columns, model.engine.read(model, token[:, None], cache)
        assert (logits is None) == (before == 5) and cache.columns == before + (logits is not None)
        if logits is None:
            model(token[:, None], past_key_values=cache, use_cache=True)
    assert cache.states[0].k.dtype is torch.float32
