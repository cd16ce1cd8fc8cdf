"""The engine of single tokens: the whole model in one native call, against the modules of the same model in float64."""

import copy
import gc
import pickle
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

import tiny
from decoding import decoded, error_of_modules, is_accurate, read
from equation import MAX_ERROR_RATIO
from headrace import HeadraceCache, InputError, quantize, zoo
from headrace.hf.generation import MOST
from headrace.layers.linear.readout import Gate
from headrace.spec import MixerSpec, Rope
from headrace.spec.stack import BlockStyle, Decoder, Layer
from headrace.verification.verify import relative

LINEAR = tiny.covering([name for name in zoo.names() if isinstance(zoo.get(name), MixerSpec)])
STYLES = {
    "post": {"order": "post"}, "branch": {"order": "branch"}, "both": {"order": "both"},
    "parallel": {"order": "parallel"}, "parallel-joint": {"order": "parallel-joint", "head_bias": True},
    "layer norm": {"norm": "layer", "bias": True}, "offset": {"norm": "rms-offset"}, "plain": {"norm": "rms-plain"},
    "gelu": {"mlp": "gelu", "bias": True}, "geglu": {"mlp": "geglu-tanh"}, "relu2": {"mlp": "relu2"},
    "factors": {"embedding_scale": 3.0, "logits_cap": 2.0, "embedding_norm": True},
}  # fmt: skip
KINDS = [
    "gqa(kv_heads=2, bias=true)", "gated-deltanet", "hedgehog(decay.kind=sigmoid-head)",
    "lolcats(window=3, kv_heads=2, decay.kind=sigmoid-head)",
]  # fmt: skip
pytestmark = pytest.mark.usefixtures("native", "no_grad")


@pytest.mark.parametrize("name", LINEAR)
def test_tokens_equal_the_full_forward(name):
    model = tiny.build(name).float()
    if (reason := model.engine.unsupported_reason(model)) is not None:
        assert "it does not support" in reason or "mixer is a " in reason  # a plug-in's layer
    assert is_accurate(model, torch.randint(29, (2, 12)), check=reason is None)


def test_the_page_names_the_mixers_that_decode_in_one_native_call():
    page = (Path(__file__).parents[2] / "docs" / "layer.md").read_text("utf-8")
    assert f"a prompt of up to {MOST} tokens, of one sequence" in page
    gated, others = re.findall(
        r"one native call computes a token of .*?:(.*?), with or without (.*?)\n\nOne", page, re.S
    )[0]
    gates = "", "competition=default", "competition=sigmoid"
    names = [f"{name}({form})" for name in re.findall("`(.*?)`", gated) for form in gates]
    for name in names + re.findall("`(.*?)`", others):
        model = tiny.build(name).float()
        assert model.engine.unsupported_reason(model) is None, name


@pytest.mark.parametrize("style", STYLES)
def test_every_style_of_blocks(style):
    model = tiny.build("softmax-gla", style=STYLES[style]).float()
    assert is_accurate(model, torch.randint(29, (3, 9)))


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 15, 23, 24, 33, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batches_of_every_size(rows, dtype):
    model = tiny.build("softmax-gated-deltanet").to(dtype)
    assert is_accurate(model, torch.randint(29, (rows, 6)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_default_dtype_does_not_change_logits(dtype, default_dtype):
    model, ids = tiny.build("gla").float(), torch.randint(29, (2, 6))
    expected = decoded(model, ids, 3)
    default_dtype(dtype)
    assert torch.equal(decoded(model, ids, 3), expected)


@pytest.mark.parametrize(
    ("mixers", "rows"), [*((["gla"] * 2, rows) for rows in (1, 9, 23, 24, 64)), (KINDS, 1), (KINDS, 9)], ids=str
)
def test_int8_model_equals_its_weights_in_float64(mixers, rows):
    """x is rounded to 16 bits: 2^-16 of the largest number of a row, for each product."""
    model = quantize(tiny.build(mixers, num_hidden_layers=len(mixers)).float())
    ids = torch.randint(29, (rows, 9))
    exact = copy.deepcopy(model).double()(ids).logits
    assert relative(decoded(model, ids, 2), exact[:, 2:]) < 40 * 2**-16


@pytest.mark.parametrize("rows", [1, 9, 24])
@pytest.mark.parametrize("mixer", ["transformer", "gated-deltanet", "rwkv6"])
def test_weights_in_bfloat16_change_no_bit_of_a_model_released_in_it(mixer, rows):
    """They are the same numbers, and the sums have the same order."""
    model, ids = tiny.build(mixer).bfloat16().float(), torch.randint(29, (rows, 6))
    narrow = quantize(copy.deepcopy(model), "bfloat16")
    cache = model(ids[:, :2], use_cache=True).past_key_values
    caches = [(model, cache), (narrow, copy.deepcopy(cache))]
    for t in range(2, 6):
        logits, same = (each.engine.read(each, ids[:, t : t + 1], own) for each, own in caches)
        assert torch.equal(logits, same)


def test_changed_weights_and_modules_are_noticed():
    model, ids = tiny.build("softmax-gla").float(), torch.randint(29, (2, 9))
    changes = [
        lambda block: block.mlp.up_proj.weight.mul_(2),
        lambda block: setattr(block.mlp.up_proj, "weight", nn.Parameter(block.mlp.up_proj.weight * 2)),
        lambda block: setattr(block.mlp.up_proj.weight, "data", block.mlp.up_proj.weight.data * 2),
        lambda block: setattr(block, "mlp", copy.deepcopy(block.mlp)),
        lambda block: setattr(block.mixer_norm, "eps", 0.1),
        lambda block: setattr(block.mixer, "norm_eps", 0.1),
        lambda block: setattr(block.mlp.down_proj, "bias", nn.Parameter(torch.randn(block.mixer.hidden_size))),
        lambda block: quantize(block),
        lambda block: setattr(block.mlp.up_proj, "bias", torch.randn(block.mlp.up_proj.out_features)),
        lambda block: block.mixer.o_proj.register_forward_hook(lambda module, args, out: 2 * out),
    ]
    decoded(model, ids, 3)
    last = decoded(model, ids, 3)
    for change in changes:
        change(model.model.backbone.layers[1])
        now = decoded(model, ids, 3, check=False)
        same = change is changes[3]
        assert (relative(now, last.double()) < 1e-5) == same and relative(now, model(ids).logits[:, 3:].double()) < 1e-3
        last = now
    assert "o_proj" in model.engine.unsupported_reason(model)


@pytest.mark.parametrize("view", [torch.t, lambda x: x[:1].expand_as(x)])
def test_a_weight_that_is_read_otherwise_from_its_memory_is_noticed(view):
    model, ids = tiny.build("gla").float(), torch.randint(29, (2, 9))
    weight, last = model.model.backbone.layers[1].mixer.o_proj.weight, decoded(model, ids, 3)
    address, weight.data = weight.data_ptr(), view(weight.data)
    assert weight.data_ptr() == address
    now = decoded(model, ids, 3, check=False)
    assert relative(now, model(ids).logits[:, 3:].double()) < 1e-3 < relative(now, last.double())


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [("gla", "scale", 0.001), ("retnet", "rope", Rope(theta=10.0)), ("rwkv6", "group_eps", 50.0)],
)
def test_changed_settings_of_a_mixer_are_noticed(name, setting, value):
    model, ids = tiny.build(name).float(), torch.randint(29, (2, 9))
    before = decoded(model, ids, 3)
    setattr(model.model.layers[1].mixer, setting, value)
    now = decoded(model, ids, 3)
    assert relative(now, before.double()) > 1e-3 and relative(now, model(ids).logits[:, 3:].double()) < 1e-3


class Adapted(nn.Module):
    """A linear layer with something added, without the attributes of one."""

    def __init__(self, base):
        super().__init__()
        self.base, self.more = base, nn.Linear(base.in_features, base.out_features)

    def forward(self, x):
        return self.base(x) + self.more(x)


@pytest.mark.parametrize("name", ["softmax-gla", "rwkv6", "transformer(gate=channel)"])
def test_layers_in_wrappers_and_removed_layers_run(name):
    model = tiny.build(name, style={"mlp": "swiglu"}).float()
    for path, module in list(model.model.backbone.layers[1].named_modules()):
        if isinstance(module, nn.Linear):
            changed = copy.deepcopy(model)
            changed.model.backbone.layers[1].set_submodule(path, Adapted(module))
            assert is_accurate(changed, torch.randint(29, (2, 9)), check=False)
    del model.model.layers[0]
    assert is_accurate(model, torch.randint(29, (2, 9)), check=False)


def tie(model):
    model.model.layers[1] = model.model.layers[0]


def activate(model):
    model.model.layers[0].mlp.activation = torch.tanh


def order(model):
    model.model.layers[0].order = "branch"


def ungate(model):
    mixer = model.model.layers[0].mixer
    mixer.readout = tuple(stage for stage in mixer.readout if type(stage) is not Gate)


def doubled(mixer, *args, **more):
    y, state = type(mixer).run(mixer, *args, **more)
    return 2 * y, state


def double(model):
    mixer = model.model.layers[0].mixer
    mixer.run = MethodType(doubled, mixer)


@pytest.mark.parametrize("began", [False, True])
@pytest.mark.parametrize("change", [tie, activate, order, ungate, double])
def test_a_model_that_was_changed_decodes_as_it_is(change, began):
    model, ids = tiny.build("softmax-gla", style={"mlp": "swiglu"}).float(), torch.randint(29, (1, 9))
    if began:
        decoded(model, ids, 3)
    change(model)
    assert is_accurate(model, ids, check=False)
    other = copy.deepcopy(model.model.layers[0].mixer)
    x = torch.randn(2, 5, other.hidden_size)
    outputs, state = [], None
    for token in x.split(1, 1):
        y, state = other(token, state, in_place=True)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), other(x)[0], rtol=1e-4, atol=1e-5)


def halved(out):
    return (out[0] / 2, *out[1:]) if isinstance(out, tuple) else out / 2


@pytest.mark.parametrize("name", ["softmax-gla", "mamba"])
def test_what_stands_before_or_behind_a_module_is_in_every_token(name):
    """Once, also of modules that compute nothing in a model of this style."""
    model, ids = tiny.build(name).float(), torch.randint(29, (1, 9))
    for module in model.model.backbone.modules():
        if type(module).forward is not nn.Module.forward and not isinstance(module, nn.ModuleList):
            hook = module.register_forward_hook(lambda module, args, out: halved(out))
            for _ in range(2):
                exact, cache = model(ids, use_cache=False).logits, HeadraceCache()
                found = torch.cat([model(token, past_key_values=cache).logits for token in ids.split(1, 1)], 1)
                assert relative(found, exact.double()) < 1e-4, type(module)
                hook.remove()
                own = module.forward
                module.forward = lambda *args, own=own, **more: halved(own(*args, **more))
            del module.forward


@pytest.mark.parametrize("mlp", ["geglu-tanh", "gelu-tanh"])
def test_a_copy_has_the_activation_of_its_kind(mlp):
    model = copy.deepcopy(pickle.loads(pickle.dumps(tiny.build("gla", style={"mlp": mlp}).float())))
    assert model.engine.unsupported_reason(model) is None


def test_a_second_bias_of_a_decay_is_refused():
    model, ids = tiny.build("kda").float(), torch.randint(29, (2, 9))
    up = model.model.backbone.layers[0].mixer.decay.up
    up.bias = nn.Parameter(torch.randn(up.out_features))
    assert "the decay has two" in model.engine.unsupported_reason(model) and is_accurate(model, ids, check=False)


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_grows_is_noticed(tied):
    model = tiny.build("softmax-gla", tie_word_embeddings=tied).float()
    decoded(model, torch.randint(29, (2, 9)), 3)
    model.resize_token_embeddings(31, mean_resizing=False)
    assert is_accurate(model, torch.randint(31, (2, 9)))


def test_blocks_without_an_mlp_and_with_two_mixers_before_a_norm():
    bare = tiny.build(["gla", "transformer"], mlp="none", intermediate_size=None).float()
    assert is_accurate(bare, torch.randint(29, (2, 9)))
    both = Layer(zoo.get("gla"), parallel=zoo.get("mamba2"))
    model = tiny.build(Decoder((both,), BlockStyle(order="post"))).float()
    assert "two parallel mixers" in model.engine.unsupported_reason(model)
    assert is_accurate(model, torch.randint(29, (2, 9)), check=False)


def test_other_mixers_and_a_changed_forward_run_by_modules():
    other = tiny.build("qwen3-next").float()
    assert "mlp is a MixtureOfExperts" in other.engine.unsupported_reason(other)
    assert is_accurate(other, torch.randint(29, (2, 9)), check=False)
    model = tiny.build("gla").float()
    kind = type(model)
    model.__class__ = type(
        "Changed", (kind,), {"forward": lambda self, *args, **more: kind.forward(self, *args, **more)}
    )
    assert "forward of its own" in model.engine.unsupported_reason(model)
    model.__class__ = kind
    with torch.enable_grad():
        assert "no gradient" in model.engine.unsupported_reason(model)


def test_forward_of_one_token_takes_the_engine():
    model, ids = tiny.build("softmax-gla").float(), torch.randint(29, (2, 8))
    expected, calls = model(ids).logits[:, 7:], []
    cases = [({}, True), ({"attention_mask": torch.ones(2, 8)}, True), ({"logits_to_keep": 1}, True),
             ({"attention_mask": torch.tensor([[1] * 8, [1] * 7 + [0]])}, False), ({"use_cache": False}, False),
             ({"output_hidden_states": True}, False), ({"labels": ids[:, 7:]}, False)]  # fmt: skip
    for options, native in cases:
        cache, engine = read(model, ids[:, :7]), model.engine
        real = engine.read
        engine.read = lambda *args, real=real: calls.append(1) or real(*args)
        logits = model(ids[:, 7:], past_key_values=cache, **options).logits
        del engine.read
        assert len(calls) == native, options
        calls.clear()
        assert relative(logits[:1], expected[:1].double()) < 1e-5
        assert cache.columns == 8 or options.get("use_cache") is False


def test_states_are_updated_in_place_and_follow_the_batch():
    model, ids = tiny.build("gated-deltanet").float(), torch.randint(29, (3, 8))
    expected, cache = model(ids).logits, read(model, ids[:, :5])
    before = [state.memory.data_ptr() for state in cache.states]
    model.engine.step(model, ids[:, 5], cache)
    assert [state.memory.data_ptr() for state in cache.states] == before
    cache.reorder_cache(torch.tensor([2, 0]))
    logits = model.engine.step(model, ids[[2, 0], 6], cache)
    assert relative(logits[:, 0], expected[[2, 0], 6].double()) < 1e-5
    cache.append(read(model, ids[1:2, :7]))
    logits = model.engine.step(model, ids[[2, 0, 1], 7], cache)
    assert relative(logits[:, 0], expected[[2, 0, 1], 7].double()) < 1e-5


def test_copies_of_a_model_have_engines_of_their_own():
    model, ids = tiny.build("gla").float(), torch.randint(29, (1, 6))
    expected = decoded(model, ids, 2)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        model.lm_head.weight.zero_()
        assert relative(decoded(other, ids, 2), expected.double()) < 1e-5
        model.lm_head.weight.copy_(other.lm_head.weight)


def test_a_model_is_freed_with_its_last_user():
    model = tiny.build("softmax-gla").float()
    decoded(model, torch.randint(29, (1, 6)), 2, check=False)
    weight = weakref.ref(model.lm_head.weight)
    gc.collect()
    gc.disable()
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()


def test_a_norm_without_an_epsilon_is_computed_by_modules():
    model = tiny.build("gla").float()
    model.model.backbone.norm = nn.RMSNorm(model.config.hidden_size)
    assert "eps is None" in model.engine.unsupported_reason(model)
    assert is_accurate(model, torch.randint(29, (1, 6)), check=False)


def test_a_counter_of_operations_sees_those_of_a_token():
    """It is a dispatch mode. Another, of fake tensors, would give the library addresses of no memory."""
    model, ids, counts = tiny.build("softmax-gla").float(), torch.randint(29, (2, 9)), []
    for _ in range(2):
        cache = read(model, ids[:, :8])
        with FlopCounterMode(display=False) as counter:
            model(ids[:, 8:], past_key_values=cache)
        counts.append(counter.get_total_flops())
        model.lm_head.register_forward_hook(lambda *_: None)
    assert counts[0] == counts[1] > 0


def test_hooks_of_all_modules_see_a_token():
    model, ids, seen = tiny.build("softmax-gla").float(), torch.randint(29, (1, 9)), []
    cache = read(model, ids[:, :8])
    with register_module_forward_hook(lambda module, args, out: seen.append(module)):
        model(ids[:, 8:], past_key_values=cache)
        assert "a hook of all modules" in model.engine.unsupported_reason(model)
    assert model.lm_head in seen and model.model.backbone.layers[1].mlp in seen


def test_threads_share_a_model():
    """Each with a cache of its own."""
    model = tiny.build("softmax-gla").float()
    prompts = [torch.randint(29, (1 + i % 2, 40)) for i in range(4)]

    @torch.no_grad()  # which each thread has of its own
    def continued(ids, cache):
        return torch.cat([model.engine.step(model, token, cache) for token in ids[:, 3:].unbind(1)], 1)

    caches = [[read(model, ids[:, :3]) for _ in range(6)] for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        for ids, (first, *others) in zip(prompts, caches, strict=True):
            expected = continued(ids, first).double()
            for logits in pool.map(continued, [ids] * len(others), others):
                assert relative(logits, expected) < 1e-5


def test_wrong_tokens_and_states_are_refused():
    model, ids = tiny.build("gla").float(), torch.randint(29, (2, 6))
    size = model.config.vocab_size
    for token in (-1, size):
        with pytest.raises(InputError, match=f"below {size}, the size of the vocabulary"):
            model.engine.step(model, torch.tensor([1, token]), read(model, ids))
    for wrong in (ids[:, :1] + 0.7, ids[:, :1] > 9):
        with pytest.raises(RuntimeError, match="scalar types: Long, Int"):
            model(wrong, past_key_values=read(model, ids))
    with pytest.raises(InputError, match="attention_mask has the value 2; expected 0 for padding and 1 for tokens"):
        model(ids[:1], attention_mask=torch.tensor([[1, 1, 1, 2, 2, 2]]), past_key_values=HeadraceCache())
    cache = read(model, ids)
    cache.states[1] = cache.states[0]
    with pytest.raises(InputError, match="memory shares memory with memory"):
        model.engine.step(model, ids[:, 0], cache)
    other = read(tiny.build("retnet").float(), ids)
    with pytest.raises(InputError, match="state"):
        model.engine.step(model, ids[:, 0], other)


def test_threads_do_not_change_tokens():
    mixers = [*KINDS, "softmax-mamba2", "sliding-window(kv_heads=2, pattern.window=3, pattern.first=2)"]
    model, ids = tiny.build(mixers, num_hidden_layers=6, hidden_size=256).float(), torch.randint(29, (17, 9))
    cache, results = read(model, ids[:, :3]), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        own = copy.deepcopy(cache)
        results.append(torch.cat([model.engine.step(model, token, own) for token in ids[:, 3:].unbind(1)], 1))
    assert all(torch.equal(a, b) for a, b in pairwise(results))


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_tokens_of_one_sequence_in_one_call_are_those_one_by_one(name, dtype):
    model, ids = tiny.build(name).to(dtype), torch.randint(29, (1, 25))
    if model.engine.unsupported_reason(model) is not None:
        pytest.skip("modules compute it")
    cache = read(model, ids[:, :5])
    other = copy.deepcopy(cache)
    logits = torch.cat([model.engine.read(model, piece, cache) for piece in ids[:, 5:].split([1, 17, 2], 1)], 1)
    expected = torch.cat([model.engine.step(model, token, other) for token in ids[:, 5:].T], 1)
    assert cache.columns == 25
    exact = copy.deepcopy(model).double()(ids).logits[:, 5:]
    assert relative(logits, exact) <= MAX_ERROR_RATIO * max(relative(expected, exact), torch.finfo(dtype).eps)
    cache.rewind(3)
    assert cache.pending == 22 and cache.covered_states is None  # from where a sequence begins
    again = model.engine.read(model, ids[:, 22:], cache)
    assert relative(again, exact[:, -3:]) <= MAX_ERROR_RATIO * max(relative(expected, exact), torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", [*LINEAR, "gqa(kv_heads=2)", "sliding-window(pattern.window=4, pattern.first=2)"])
@torch.inference_mode()
def test_a_short_prompt_is_read_in_one_call(name):
    model, ids = tiny.build(name).float(), torch.randint(29, (1, MOST + 2))
    if model.engine.unsupported_reason(model) is not None:
        pytest.skip("modules compute it")
    error, exact = error_of_modules(model, ids)
    for tokens in (1, 7, MOST):
        cache = HeadraceCache()
        logits = model.engine.read(model, ids[:, :tokens], cache)
        after = model.model(ids[:, tokens:], past_key_values=cache, use_cache=True).last_hidden_state
        assert cache.columns == MOST + 2 and len(cache) == len(model.model.backbone.layers)
        assert relative(torch.cat([logits, model.logits(after)], 1), exact) <= MAX_ERROR_RATIO * error
    assert model.engine.read(model, ids, HeadraceCache()) is None
    several = model.engine.read(model, ids.view(-1, 1), HeadraceCache())  # one token of each of several sequences
    assert relative(several[0], exact[0, :1]) <= MAX_ERROR_RATIO * error
    native = model.generate(ids[:, :9], max_new_tokens=20, do_sample=False, pad_token_id=0)
    model.lm_head.register_forward_hook(lambda module, args, out: out)
    assert torch.equal(model.generate(ids[:, :9], max_new_tokens=20, do_sample=False, pad_token_id=0), native)


@torch.inference_mode()
def test_pending_tokens_are_read_in_one_call():
    model, ids = tiny.build("rwkv6").float(), torch.randint(29, (1, 16))
    cache = read(model, ids[:, :6])
    cache.snapshot()
    model(ids[:, 6:], past_key_values=cache)
    cache.rewind(4)
    assert cache.pending == 6
    logits = model(ids[:, 12:], past_key_values=cache).logits
    exact = copy.deepcopy(model).double()(ids).logits[:, 12:]
    assert logits.shape[1] == 4 and relative(logits, exact) < 1e-4 and cache.pending == 0
    cache.rewind(2)
    assert relative(model(ids[:, 14:], past_key_values=cache, logits_to_keep=1).logits, exact[:, 3:]) < 1e-4
