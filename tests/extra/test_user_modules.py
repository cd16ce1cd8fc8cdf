"""Mixers whose layer is a user's module: state, padding, packs, weights and settings, and modules that break the
protocol."""

import copy
import pickle
from typing import Literal, NamedTuple

import pytest
import torch
from torch import nn

import headrace
from headrace import HeadraceForCausalLM, InputError, layers, load, zoo
from headrace.extra.module import examined
from headrace.spec import from_json, to_json
from headrace.training import recipes
from headrace.training.model import build, counted
from headrace.utils import plugins
from plugged import folder
from tiny import build as build_tiny
from tiny import config, tokens

__all__ = ["folder"]  # a fixture


def test_weights_are_those_of_the_constructor_and_buffers_come_back(folder):
    class Buffered(nn.Linear):
        def __init__(self, hidden_size, wide: bool = False):
            super().__init__(hidden_size, hidden_size)
            nn.init.constant_(self.weight, 0.25)
            self.register_buffer("rates", torch.linspace(0, 1, hidden_size), persistent=False)

        def forward(self, x, state=None):
            return super().forward(x) * self.rates, None

    headrace.register_mixer("mine", Buffered)
    model = HeadraceForCausalLM(config("mine"))
    module = model.model.backbone.layers[0].mixer.module
    assert (module.weight == 0.25).all() and zoo.get("mine").state_bytes(32, 4) == 0
    with torch.no_grad():
        module.weight.fill_(3.0)
    model.save_pretrained("model")
    module = load("model").model.backbone.layers[0].mixer.module
    assert (module.weight == 3).all() and torch.equal(module.rates, torch.linspace(0, 1, 32))


def test_sequences_of_a_module_without_a_state_are_joined(folder):
    class Stateless(nn.Linear):
        def __init__(self, hidden_size):
            super().__init__(hidden_size, hidden_size)

        def forward(self, x, state=None):
            return super().forward(x), None

    headrace.register_mixer("mine", Stateless)
    model, ids, following = build_tiny(["gla", "mine"]), tokens(3), tokens(3, 1)
    whole, first, others = (model(part, use_cache=True).past_key_values for part in (ids, ids[:1], ids[1:]))
    first.append(others)
    expected, joined = (model(following, past_key_values=cache).logits for cache in (whole, first))
    torch.testing.assert_close(joined, expected)


def test_padding_and_packs_of_a_module_equal_its_rows(folder):
    """With an empty row, whose state stays as it was, or is zeros at the beginning."""
    plugins.load(["leaky.py"])
    layer = layers.Mixer("leaky", hidden_size=8).double()
    x, mask = torch.randn(4, 7, 8, dtype=torch.float64), torch.ones(4, 7, dtype=torch.bool)
    mask[0, :3] = mask[1, 5:] = mask[2] = False
    y, state = layer(x, mask=mask)
    assert not y[~mask].any() and not state.state[2].any()
    again, later = layer(x, state, mask=mask)
    assert torch.equal(later.state[2], state.state[2])
    for i in (0, 1, 3):
        own, first = layer(x[i : i + 1][:, mask[i]])
        torch.testing.assert_close(y[i][mask[i]], own[0])
        torch.testing.assert_close(again[i][mask[i]], layer(x[i : i + 1][:, mask[i]], first)[0][0])
    packed, _ = layer(x[3:, :7], cu_seqlens=torch.tensor([0, 2, 2, 7]))
    torch.testing.assert_close(packed, torch.cat([layer(x[3:, :2])[0], layer(x[3:, 2:])[0]], 1))


def test_model_of_a_module_survives_pickle_and_copies(folder):
    plugins.load(["leaky.py"])
    model = HeadraceForCausalLM(config("leaky(slowest=0.7)"))
    again, ids = pickle.loads(pickle.dumps(model)), torch.arange(6)[None]
    assert again.config.mixers == model.config.mixers == copy.deepcopy(model).config.mixers
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_name_that_is_registered_anew_is_of_the_new_class(folder):
    """As in a notebook, where the JSON of both is the same."""
    for parent in (Right, Weighted):
        made = type("Mine", (parent,), {"__module__": "__main__"})
        headrace.register_mixer("mine", made)
        model = HeadraceForCausalLM(config("mine"))
        assert type(model.model.backbone.layers[0].mixer.module) is made
        recipe = recipes.load("laptop-1m", {"mixer": "mine"})[0]
        assert counted(recipe).blocks[0] == sum(p.numel() for p in build(recipe).model.backbone.layers[0].parameters())
        del zoo.OTHERS["mine"]


def test_setting_of_a_number_or_several_stays_a_number(folder):
    class Several(Right):
        def __init__(self, hidden_size, n: int | tuple[int, ...] = 3, size: Literal[1, 2, "auto"] = "auto"):
            super().__init__(hidden_size)

    headrace.register_mixer("mine", Several)
    assert [zoo.get(name).n for name in ("mine", "mine(n=2)")] == [3, 2]
    spec = from_json(to_json(zoo.get("mine")) | {"n": [4, 5]})
    assert spec.n == (4, 5) and from_json(to_json(spec)) == spec
    assert [zoo.get(name).size for name in ("mine", "mine(size=2)")] == ["auto", 2]
    with pytest.raises(InputError, match="size=3 is not allowed; expected one of 1, 2, auto"):
        zoo.get("mine(size=3)")


def test_expressions_set_settings_of_a_module(folder):
    plugins.load(["leaky.py"])
    spec = zoo.get("leaky(slowest=0.5)")
    assert spec.settings == {"slowest": 0.5} and from_json(to_json(spec)) == spec != zoo.get("leaky")
    assert layers.Mixer(spec, hidden_size=4).module.a.max() == 0.5
    told = {"leaky(slowest=fast)": "expected finite float", "leaky(speed=1)": "has no field 'speed'"}
    for wrong, sentence in told.items():
        with pytest.raises(InputError, match=sentence):
            zoo.get(wrong)
    with pytest.raises(InputError, match=r"'softmax-leaky' does not exist, because leaky is a module"):
        zoo.get("softmax-leaky")


# --- modules that break the protocol ---------------------------------------------------------------------------------
class Right(nn.Module):
    """Remembers the sum of all tokens, without a parameter."""

    def __init__(self, hidden_size):
        super().__init__()

    def forward(self, x, state=None):
        state = x.sum(1) if state is None else state + x.sum(1)
        return x, state


class Weighted(Right):
    def __init__(self, hidden_size):
        super().__init__(hidden_size)
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x, state=None):
        return super().forward(self.weight * x, state)


def biased(x, state):
    y = (1 if state is None else state[:, None]) + x.cumsum(1)
    return y, y[:, -1]


def writing(x, state):
    state = torch.zeros_like(x[:, 0]) if state is None else state
    y = state[:, None] + x.cumsum(1)
    return y, state.add_(x.sum(1))


WRONG = {  # what forward returns, and what is said of it; the check has three sequences
    "WrongShape": (
        lambda x, state: (x[..., :-1], x[:, 0]),
        r"returns y of shape \[3, 7, 7\] for x of shape \[3, 7, 8\]; expected the shape of x",
    ),
    "Wide": (
        lambda x, state: (x.double(), x[:, 0]),
        "returns y in torch.float64 for x in torch.float32; expected the dtype of x",
    ),
    "WritesInput": (
        lambda x, state: (x.mul_(2), x[:, 0]), "writes to x, which is needed after it; expected a new tensor"
    ),
    "NoState": (lambda x, state: x, r"returns a Tensor; expected a tuple \(y, state\)"),
    "ListState": (
        lambda x, state: (x, [x[:, 0]]),
        "returns a list as its state; expected a tensor, a NamedTuple of tensors, or None",
    ),
    "OneState": (
        lambda x, state: (x, x.sum((0, 1))[None]),
        r"has a state with torch.float32 of shape \[1, 8\] for N = 3 sequences; expected",
    ),
    "ThreeStates": (
        lambda x, state: (x, torch.zeros(3)),
        r"has a state with torch.float32 of shape \[3\] for N = 1 sequences; expected",
    ),
    "Growing": (
        lambda x, state: (x, x if state is None else torch.cat([state, x], 1)),
        r"has a state of \[\(7, 8\)\] after 7 tokens of 3 sequences, \[\(4, 8\)\] after 4 tokens",
    ),
    "Forgetful": (
        lambda x, state: (x.cumsum(1), x.sum(1)),
        "gives another y for x in two calls, the second with the state of the first than for x at once",
    ),
    "Looking": (
        lambda x, state: (x + x.mean(0), x[:, 0]), "gives another y for a sequence without the others"
    ),
    "Biased": (biased, "gives another y for x after a state of zeros, which is that before the first token"),
    "Writing": (writing, "writes to the state that it was given; expected a new one"),
    "Failing": (lambda x, state: (x @ torch.ones(3), None), r"cannot run on x \[3, 7, 8\]: size mismatch"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_module_that_breaks_the_protocol_is_refused_before_it_is_built(folder, name):
    forward, sentence = WRONG[name]
    headrace.register_mixer("mine", type(name, (Right,), {"forward": lambda self, x, state=None: forward(x, state)}))
    with pytest.raises(InputError, match=f"^mixer 'mine' {sentence}"):
        layers.Mixer("mine", hidden_size=8)


def test_module_that_cannot_be_built_is_refused(folder):
    class Unbuilt(Right):
        def __init__(self, hidden_size):
            raise ValueError("no luck")

    headrace.register_mixer("mine", Unbuilt)
    with pytest.raises(InputError, match=r"^mixer 'mine' cannot be built: Unbuilt\(hidden_size=8\) fails: no luck"):
        layers.Mixer("mine", hidden_size=8)


class Names(NamedTuple):
    seen: torch.Tensor
    memory: torch.Tensor


class Named(Right):
    def forward(self, x, state=None):
        before = torch.zeros_like(x[:, 0]) if state is None else state.memory
        y = torch.cat([before[:, None], x], 1).cumsum(1)[:, 1:]
        return y, Names(y[:, -1], y[:, -1])


def test_names_in_a_state_are_the_modules_own(folder):
    """Also those that headrace's states have, for integers and for what stays in float32."""
    headrace.register_mixer("mine", Named)
    layer, x = layers.Mixer("mine", hidden_size=8), torch.ones(2, 6, 8, dtype=torch.bfloat16)
    y, state = layer(x)
    again, _ = layer(x, state)
    assert again.dtype == torch.bfloat16 and torch.equal(again, y + 6)


def test_module_without_a_state_takes_none(folder):
    class Plain(Right):
        def forward(self, x, state=None):
            return x, None

    headrace.register_mixer("mine", Plain)
    x = torch.randn(2, 3, 8)
    with pytest.raises(InputError, match="state is given to a module that has none; expected state=None"):
        layers.Mixer("mine", hidden_size=8)(x, Names(x[:, 0], x[:, 0]))


def test_module_that_takes_packs_gets_them(folder):
    class Packs(Right):
        def forward(self, x, state=None, cu_seqlens=None):
            rows = x if cu_seqlens is None else x[0].split(cu_seqlens.diff().tolist())
            before = [0] * len(rows) if state is None else state
            y = [row.cumsum(0) + start for row, start in zip(rows, before, strict=True)]
            after = torch.stack([row.sum(0) + start for row, start in zip(rows, before, strict=True)])
            return torch.stack(y) if cu_seqlens is None else torch.cat(y)[None], after

    class Ignores(Right):
        def forward(self, x, state=None, cu_seqlens=None):
            return x.cumsum(1) + (0 if state is None else state[:, None]), x.sum(1) + (0 if state is None else state)

    class Exchanges(Packs):
        def forward(self, x, state=None, cu_seqlens=None):
            y, after = super().forward(x, state, cu_seqlens)
            return y, after if cu_seqlens is None else after.flip(0)

    headrace.register_mixer("mine", Packs)
    layer, x = layers.Mixer("mine", hidden_size=8), torch.randn(1, 7, 8)
    y, _ = layer(x, cu_seqlens=torch.tensor([0, 2, 2, 7]))
    torch.testing.assert_close(y, torch.cat([x[:, :2].cumsum(1), x[:, 2:].cumsum(1)], 1))
    for name, wrong in {"other": Ignores, "another": Exchanges}.items():
        headrace.register_mixer(name, wrong)
        with pytest.raises(InputError, match="gives another y for packed sequences, and tokens after them"):
            examined(zoo.get(name), 8, 1)


def test_constructor_without_the_protocol_is_refused(folder):
    class NoSize(Right):
        def __init__(self, width=3):
            super().__init__(width)

    class NoDefault(Right):
        def __init__(self, hidden_size, layout: dict):
            super().__init__(hidden_size)

    class Type(Right):
        def __init__(self, hidden_size, type=2):
            super().__init__(hidden_size)

    class Label(Right):
        def __init__(self, hidden_size, label="sum"):
            super().__init__(hidden_size)

    for module, sentence in {
        NoSize: r"mixer 'mine' cannot be registered: NoSize has .* expected __init__\(hidden_size, ...\)",
        NoDefault: r"mixer 'mine' cannot be registered: the argument .* cannot be a setting",
        Type: "'type=2' of Type cannot be a setting; expected .* a name that no spec has",
        Label: "cannot be a setting",
    }.items():
        with pytest.raises(InputError, match=sentence):
            headrace.register_mixer("mine", module)
