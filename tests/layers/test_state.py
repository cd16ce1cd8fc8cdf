"""Who may write into a state: nobody without permission; with it, the same numbers, in the same memory.

And what a state may be: of this mixer, of these sequences, in any precision.
"""

import copy
from multiprocessing import get_context

import pytest
import torch

from equation import MAX_ERROR_RATIO, skip_if_missing
from headrace import HeadraceCache, HeadraceConfig, HeadraceForCausalLM, InputError, zoo
from headrace.layers.linear.token import find_program
from headrace.spec import MixerSpec
from headrace.verification.verify import relative
from tiny import by_state, covering, layer, perturbed

D, H = 32, 4
ZOO = covering(zoo.names())  # test_laws.py has all of them
KINDS = by_state(zoo.names())
pytestmark = pytest.mark.usefixtures("no_grad")


def model(name, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": D, "num_hidden_layers": 2, "num_heads": H, "intermediate_size": 16}
    return perturbed(HeadraceForCausalLM(HeadraceConfig(mixer=name, **sizes | changes)).eval())


def changed(state, function):
    """The function of each of its numbers that are no integers."""
    return type(state)(*(function(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in state))


def in_float64(state):
    """A copy of it, in memory of its own."""
    return changed(copy.deepcopy(state), torch.Tensor.double)


def tensors(state):
    return [x for x in state if isinstance(x, torch.Tensor)]


def storages(state):
    """Bytes of everything that a state's tensors may point into."""
    wholes = [torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()) for x in tensors(state)]
    return [whole.numpy().tobytes() for whole in wholes]


# --- a cache that may not be written into -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*KINDS, "jamba", "zamba", "gpt"])
def test_use_cache_false_does_not_change_the_cache(name):
    made, ids = model(name), torch.randint(1, 50, (2, 12))
    cache = made(ids[:, :8], use_cache=True).past_key_values
    made(ids[:, 8:9], past_key_values=cache)  # after which states are the cache's own
    before = [storages(state) for state in cache.states]
    for piece in (ids[:, 9:10], ids[:, 9:12]):
        first, again = (made(piece, past_key_values=cache, use_cache=False).logits for _ in range(2))
        assert torch.equal(first, again)
    assert [storages(state) for state in cache.states] == before and cache.get_seq_length() == 9


@torch.no_grad()
def precisions():
    for name in ("softmax-gated-deltanet", "mamba2", "rwkv6", "gqa"):
        made, ids = model(name), torch.randint(1, 50, (2, 40))
        exact, wide = model(name).double(), made(ids[:, :8], use_cache=True).past_key_values
        with torch.autocast("cpu", torch.bfloat16):
            cache = made(ids[:, :8], use_cache=True).past_key_values
        wide.states = [in_float64(state) for state in cache.states]
        for token in ids[:, 8:].split(1, 1):
            found, expected = (m(token, past_key_values=c).logits for m, c in ((made, cache), (exact, wide)))
            assert relative(found, expected) < 1e-5, name


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_bfloat16_prompt_then_float32_tokens():
    """In a process of its own: what writes where it should not may end it."""
    process = get_context("fork").Process(target=precisions)
    process.start()
    process.join()
    assert process.exitcode == 0


# --- a mixer that may write into its state, and one that may not ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in ZOO), *((name, torch.float64) for name in KINDS)], ids=str
)
def test_in_place_updates_change_no_result(name, dtype):
    """From the same state twice without permission, then with it, token by token and several at once."""
    made, x = layer(name, dtype), torch.randn(2, 18, D, dtype=dtype)
    kept = made(x[:, :6])[1]
    spent = copy.deepcopy(kept)
    for piece in x[:, 6:].split([1, 1, 4, 1, 1, 1, 2, 1], 1):
        before = storages(kept)
        (y, after), (again, _) = made(piece, kept), made(piece, kept)
        assert torch.equal(y, again) and storages(kept) == before
        found, spent = made(piece, spent, in_place=True)
        # Some float32 operations in another order: the fused step against separate ones (their errors: test_decode.py).
        tolerance = 1e-10 if dtype is torch.float64 else 1e-5
        assert relative(found, y) < tolerance
        for mine, theirs in zip(tensors(spent), tensors(after), strict=True):
            assert mine.dtype == theirs.dtype and relative(mine.double(), theirs.double()) < tolerance
        kept = after


@pytest.mark.parametrize("name", ZOO)
def test_padding_and_packing_do_not_write_into_the_state(name):
    made, x = layer(name), torch.randn(2, 9, D)
    state = made(x[:, :6])[1]
    before, mask = storages(state), torch.tensor([[True, True, False], [False, True, True]])
    for in_place in (False, True):
        padded = made(x[:, 6:], copy.deepcopy(state), mask=mask, in_place=in_place)[0]
        pack = x[:, 6:][mask][None]
        packed = made(pack, copy.deepcopy(state), cu_seqlens=torch.tensor([0, 2, 4]), in_place=in_place)[0]
        assert relative(padded[mask], packed[0]) < 1e-5
    made(x[:, 6:], state, mask=mask), made(pack, state, cu_seqlens=torch.tensor([0, 2, 4]))
    assert storages(state) == before


@pytest.mark.parametrize("name", [name for name in ZOO if isinstance(zoo.get(name), MixerSpec)])
def test_token_is_decoded_into_the_same_memory(name):
    skip_if_missing("native")
    made, x = layer(name), torch.randn(3, 12, D)
    if (reason := find_program(made, x[:, :1])[1]) is not None:
        pytest.skip(reason)
    state = made(x[:, :6])[1]
    kept = [y.data_ptr() for y in state if y is not None]
    for token in x[:, 6:].split(1, 1):
        state = made(token, state, in_place=True)[1]
        assert [y.data_ptr() for y in state if y is not None] == kept


# --- what a state may be ----------------------------------------------------------------------------------------------


STATES = {
    "in bfloat16": lambda state: changed(state, lambda x: x.bfloat16()),
    "in float64": lambda state: changed(state, lambda x: x.double()),
    "with gradients": lambda state: changed(state, lambda x: x.clone().requires_grad_()),
    "made in inference mode": lambda state: changed(state, inference),
    "in another order": lambda state: changed(state, lambda x: x.mT.contiguous().mT),
    "part of another": lambda state: changed(state, lambda x: torch.stack([x, x], -1)[..., 0]),
    "with tokens in int32": lambda state: state._replace(tokens=state.tokens.int()),
}


def inference(x):
    with torch.inference_mode():
        return x.clone()


@pytest.mark.parametrize(
    ("name", "how"),  # retnet alone counts tokens
    [(name, how) for name in ("gated-deltanet", "mamba2", "retnet", "rwkv6", "gqa", "mamba", "sliding-window")
     for how in STATES if name == "retnet" or "int32" not in how],
)  # fmt: skip
def test_state_in_another_layout_is_accepted(name, how):
    """It is as good as ever: next tokens are those of a float64 layer that goes on from the same numbers."""
    made, exact, x = layer(name), layer(name, torch.float64), torch.randn(2, 14, D)
    exact.load_state_dict(made.state_dict())
    given = made(x[:, :8])[1]
    state = STATES[how](given)
    before, expected, taken = storages(state), in_float64(state), state
    for token in x[:, 8:].split(1, 1):
        y, expected = exact(token.double(), expected)
        found, taken = made(token, taken, in_place=True)
        assert relative(found, y) < 1e-5
    if "gradients" in how or "int32" in how or "bfloat16" in how:
        assert storages(state) == before, "nothing could be written into it"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", KINDS)
def test_state_in_another_precision_is_accepted(name, dtype):
    """Every kind of state, by a token, by several and in a pack, goes on from the numbers that it is given."""
    made, exact, x = layer(name), layer(name, torch.float64), torch.randn(2, 11, D)
    exact.load_state_dict(made.state_dict())
    state = changed(made(x[:, :6])[1], lambda y: y.to(dtype))
    for piece, pack in ((x[:, 6:7], None), (x[:, 6:], None), (x[:, 6:].reshape(1, 10, D), torch.tensor([0, 5, 10]))):
        expected = exact(piece.double(), in_float64(state), cu_seqlens=pack)[0]
        found, after = made(piece, state, cu_seqlens=pack)
        assert found.dtype == x.dtype and relative(found, expected) < 1e-5
        assert relative(made(piece, copy.deepcopy(state), cu_seqlens=pack, in_place=True)[0], expected) < 1e-5
        assert all(torch.isfinite(y).all() for y in tensors(after) if y.is_floating_point())


def test_expanded_state_is_not_written_in_place():
    for name in ZOO:
        made, x = layer(name), torch.randn(1, 14, D).expand(3, -1, -1)
        one = made(x[:1, :8])[1]
        state = type(one)(*(y.expand(3, *y.shape[1:]) if isinstance(y, torch.Tensor) else y for y in one))
        before, taken, ys = storages(one), state, []
        for token in x[:, 8:].split(1, 1):
            y, taken = made(token, taken, in_place=True)
            ys.append(y)
        assert storages(one) == before
        assert relative(torch.cat(ys, 1), made(x)[0][:, 8:]) < 1e-5, name


def form(state):
    return type(state), [x.shape if isinstance(x, torch.Tensor) else None for x in state]


def test_state_of_another_mixer_is_refused():
    others = ("softmax-gated-deltanet", "rwkv6", "mamba", "s4", "gqa", "linear-attention", "retnet")
    x = torch.randn(2, 7, D)
    states = {name: layer(name)(x[:, :6])[1] for name in (*ZOO, *others)}
    for name in ZOO:
        made = layer(name)
        for in_place in (False, True):
            with pytest.raises(InputError, match=r"state\.\w+ has shape \[2, .*\]; expected \[1, "):
                made(x[:1, 6:], states[name], in_place=in_place)
            with pytest.raises(InputError, match="state is a tuple; expected a"):
                made(x[:, 6:], tuple(states[name]), in_place=in_place)
            with pytest.raises(InputError, match=r"state\.\w+ is on meta; expected cpu"):
                made(x[:, 6:], changed(states[name], lambda y: y.to("meta")), in_place=in_place)
            with pytest.raises(InputError, match=r"state\.\w+ has dtype torch.int64; expected a floating-point dtype"):
                made(x[:, 6:], changed(states[name], torch.Tensor.long), in_place=in_place)
            for other in others:
                if form(states[other]) != form(states[name]):
                    with pytest.raises(InputError, match="state"):
                        made(x[:, 6:], states[other], in_place=in_place)


def test_replaced_weights_are_used():
    skip_if_missing("native")
    made, x = layer("softmax-gla"), torch.randn(2, 8, D)
    state = made(x[:, :7])[1]
    expected = made(x[:, 7:], state)[0]
    weight = made.norm_weight
    made.norm_weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(InputError, match=r"norm_weight has shape \[3\]; expected shape \[8\]"):
        made(x[:, 7:], state, in_place=True)
    made.norm_weight = torch.nn.Parameter(torch.stack([weight, weight], 1)[:, 0])  # not contiguous: in separate steps
    assert relative(made(x[:, 7:], copy.deepcopy(state), in_place=True)[0], expected) < 1e-5
    made.norm_weight = torch.nn.Parameter(weight.to("meta"))
    assert "norm_weight is on meta" in find_program(made, x[:, 7:])[1]
    made.norm_weight = weight
    for other in (copy.deepcopy(made), copy.copy(made)):
        other.norm_eps = 10.0
        expected_of_other = other(x[:, 7:], state)[0]
        assert relative(other(x[:, 7:], copy.deepcopy(state), in_place=True)[0], expected_of_other) < 1e-5
    half = copy.deepcopy(made).half()
    assert relative(half(x[:, 7:].half(), copy.deepcopy(state), in_place=True)[0], expected) < 1e-2  # 8 · 2^-11, about


def test_in_place_state_shares_no_memory():
    skip_if_missing("native")
    made, x = layer("gated-deltanet"), torch.randn(2, 8, D)
    state = made(x[:, :7])[1]
    both = torch.zeros(state.memory.numel() + state.conv.numel() - 1)
    memory, conv = both[: state.memory.numel()].view_as(state.memory), both[-state.conv.numel() :].view_as(state.conv)
    with pytest.raises(InputError, match="conv shares memory with memory; expected separate memory for the state"):
        made(x[:, 7:], state._replace(memory=memory, conv=conv), in_place=True)
    both = torch.cat([made.norm_weight, state.conv.flatten()])
    made.norm_weight = torch.nn.Parameter(both[: len(made.norm_weight)], requires_grad=False)
    conv = both[1 : 1 + state.conv.numel()].view_as(state.conv)
    with pytest.raises(InputError, match="conv shares memory with norm_weight"):
        made(x[:, 7:], state._replace(conv=conv), in_place=True)


@pytest.mark.parametrize("name", ["gla", "transformer"])
@torch.enable_grad()
def test_state_is_not_written_while_gradients_are_recorded(name):
    """Though it may be. Attention has room behind its keys; `step` would write a memory, without a gradient."""
    torch.manual_seed(0)
    mixer, x = layer(name, torch.float64), torch.randn(2, 5, D, dtype=torch.float64)
    with torch.no_grad():
        _, state = mixer(x[:, :3])
        _, state = mixer(x[:, 3:4], state, in_place=True)
    before = storages(state)
    y, _ = mixer(x[:, 4:], state, in_place=True)
    assert y.requires_grad and storages(state) == before


@torch.enable_grad()
def test_overwritten_tensors_raise_in_the_backward():
    """What autograd keeps for a backward may be written into; then the backward says so."""
    skip_if_missing("native")
    made, x = layer("gated-deltanet"), torch.randn(2, 9, D)
    with torch.no_grad():
        state = made(x[:, :8])[1]
    loss = made(x[:, 8:], state)[0].sum()
    with torch.no_grad():
        made(x[:, 8:], state, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@torch.enable_grad()
def test_activation_checkpointing_does_not_write_into_the_state(reentrant):
    """A reentrant checkpoint runs without gradients first, and again from the same state later."""
    ids, found = torch.randint(1, 50, (2, 9)), {}
    for way in ("exact", "plain", "checkpoints"):
        made = model("softmax-gla").to(torch.float64 if way == "exact" else torch.float32)
        with torch.no_grad():
            cache = made(ids[:, :8], use_cache=True).past_key_values
        made.train()
        if way == "checkpoints":
            made.gradient_checkpointing_enable({"use_reentrant": reentrant})
            made.enable_input_require_grads()
        before = [storages(state) for state in cache.states]
        held = list(cache.states)
        made(ids[:, 8:], past_key_values=cache).logits.square().sum().backward()
        assert [storages(state) for state in held] == before
        found[way] = [p.grad for p in made.parameters()]
    for exact, plain, mine in zip(*found.values(), strict=True):
        # Some float32 sums in another order. A rounding of every number is the least error.
        assert relative(mine, exact) <= MAX_ERROR_RATIO * max(relative(plain, exact), torch.finfo(torch.float32).eps)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("name", ["softmax-gla", "transformer"])
@torch.enable_grad()
def test_states_of_a_reentrant_checkpoint_refuse_the_gradient_that_they_cut_off(name):
    ids = torch.randint(1, 50, (2, 9))

    def gradients(reentrant, detached):
        made, cache = model(name).train(), HeadraceCache()
        if reentrant is not None:
            made.gradient_checkpointing_enable({"use_reentrant": reentrant})
            made.enable_input_require_grads()
        made(ids[:, :5], past_key_values=cache)
        if detached:
            cache.states = [changed(state, torch.Tensor.detach) for state in cache.states]
        made(ids[:, 5:], past_key_values=cache).logits.square().sum().backward()
        return [p.grad for p in made.parameters()]

    whole, part = gradients(None, False), gradients(None, True)
    assert not all(map(torch.equal, whole, part))
    for expected, reentrant, detached in ((whole, False, False), (part, False, True), (part, True, True)):
        assert all(map(torch.equal, gradients(reentrant, detached), expected))
    with pytest.raises(InputError, match="use_reentrant=True gives no gradient to past_key_values"):
        gradients(True, False)


# --- in passes of different precision ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ZOO)
def test_states_stay_in_float32_across_precisions(name):
    made, exact, x = layer(name), layer(name, torch.float64), torch.randn(2, 14, D)
    exact.load_state_dict(made.state_dict())
    state = None
    for low, piece in zip([True, False, False, True, False], x.split([8, 1, 3, 1, 1], 1), strict=True):
        expected = exact(piece.double(), None if state is None else in_float64(state))[0]
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            found, state = made(piece, state, in_place=True)
        # A float32 pass is as right as ever, from whatever it goes on; in bfloat16 some ten products round by 2^-9.
        assert relative(found, expected) < (0.05 if low else 1e-5)
        held = [getattr(state, field, None) for field in ("memory", "before")]
        assert all(y is None or y.dtype == torch.float32 for y in held)


# --- caches -----------------------------------------------------------------------------------------------------------


def test_cache_of_another_model_is_refused():
    ids = torch.randint(1, 50, (2, 9))
    cache = model("softmax-gla")(ids[:, :8], use_cache=True).past_key_values
    twin = model("softmax-gla")
    twin.model.backbone.norm.weight.mul_(2)  # and so the logits
    first = model("softmax-gla")(ids[:, 8:], past_key_values=cache, use_cache=False).logits
    assert relative(twin(ids[:, 8:], past_key_values=cache).logits, 2 * first) < 1e-5
    with pytest.raises(InputError, match="states has 2 entries; expected 3"):
        model("softmax-gla", num_hidden_layers=3)(ids[:, 8:], past_key_values=cache)
    with pytest.raises(InputError, match="state"):
        model("retnet")(ids[:, 8:], past_key_values=cache)
