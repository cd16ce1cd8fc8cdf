"""Random calls of the op, its step, the short convolution, int8 products, layers and models, good and bad: each gives
what the float64 reference gives, or raises one InputError. `make sanitize` runs them over a library built with
AddressSanitizer and UndefinedBehaviorSanitizer; a case is repeated by its number.

    python tests/fuzz.py --cases 10000
    python tests/fuzz.py --only 4711
"""

import argparse
import copy
import random
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headrace import InputError, layers, linear_attention, step, zoo
from headrace.layers.linear.convolution import convolve
from headrace.layers.quantized import QuantizedLinear
from headrace.ops.backends.native import library as native
from headrace.ops.call import accumulator
from headrace.ops.reference import literal
from headrace.ops.sequences import Sequences

DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float64]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of what random sizes and decays leave
MIXERS = [name for name in zoo.names() if "+" not in name]


class Dice(random.Random):
    """What a case draws, torch's numbers included."""

    def size(self, most: int, least: int = 1) -> int:
        """Small sizes, and those beside a multiple of 16, most often."""
        sizes = [self.randint(0, 4), self.randint(0, most), 16 * self.randint(0, 4) + self.randint(-1, 1)]
        return max(least, min(most, self.choice(sizes)))

    def likely(self, share: float) -> bool:
        return self.random() < share

    def laid_out(self, x: Tensor) -> Tensor:
        """The same numbers with other strides, at another address."""
        way = self.randint(0, 4)
        if way == 0 and x.dim() > 1:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        if way == 1 and x.dim() > 2:
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if way == 2:
            return torch.cat([x, x], -1)[..., : x.shape[-1]]
        if way == 3:
            return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
        return x

    def spoiled(self, x: Tensor) -> Tensor:
        """With a wrong size, dimension or dtype."""
        return self.choice([
            lambda: x[..., :-1], lambda: x[None], lambda: x.flatten(), lambda: torch.cat([x, x], 0), lambda: x.long(),
            lambda: x.half(), lambda: x.to("meta"), lambda: x.mT if x.dim() > 1 else x[:0],
        ])()  # fmt: skip


def near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within the dtype's tolerance, where the reference is finite."""
    found, expected = found.detach().double(), expected.detach().double()
    assert found.shape == expected.shape, (found.shape, expected.shape)
    finite = expected.isfinite()
    if bool(finite.any()):
        scale, error = (float(x[finite].abs().max()) for x in (expected, found - expected))
        assert error <= TOLERANCE[dtype] * max(scale, 1e-3), (error, scale)


def arguments(dice: Dice, dtype: torch.dtype, B: int, T: int, rule: str) -> dict[str, Any]:
    H, K, V = dice.size(6), dice.size(70), dice.size(70)
    Hk = dice.choice([h for h in range(1, H + 1) if H % h == 0])
    Hq = H * dice.choice([1, 2, 3]) if Hk == H else Hk  # grouped queries, or shared keys
    decay = dice.choice([None, (H,), (B, T, H), (B, T, H, K)])
    strength = dice.choice([0.01, 1.0, 5.0, 100.0])
    optional = lambda x: x if dice.likely(0.5) else None  # noqa: E731
    x = {
        "q": torch.randn(B, T, Hq, K), "k": nn.functional.normalize(torch.randn(B, T, Hk, K), dim=-1),
        "v": torch.randn(B, T, H, V), "log_decay": None if decay is None else -strength * torch.rand(decay),
        "beta": optional(torch.rand(B, T, H)), "read_gate": optional(torch.rand(B, T, max(Hq, H))),
        "write_gate": optional(torch.rand(B, T, H)),
        "initial_state": optional(torch.randn(B, H, K, V)),
        "bonus": optional(torch.randn(H, K)) if rule == "add" else None,
    }  # fmt: skip
    return {name: y if y is None else dice.laid_out(y.to(dtype)) for name, y in x.items()}


def read_shape(x: dict[str, Any]) -> tuple[int, ...]:
    """The shape of what is read: the heads of q, where they are more than those of v."""
    *rows, heads, size = x["v"].shape
    return *rows, max(heads, x["q"].shape[-2]), size


def doubled(x: dict[str, Any]) -> dict[str, Any]:
    """As the literal loop takes them: in float64, a head of k, and one of q or more, for each of v."""
    exact = {name: y.detach().double() if isinstance(y, Tensor) else y for name, y in x.items()}
    H = exact["v"].shape[2]
    return exact | {n: exact[n].repeat_interleave(max(H // exact[n].shape[2], 1), 2) for n in ("q", "k")}


def op(dice: Dice) -> None:
    dtype, rule = dice.choice(DTYPES), dice.choice(["add", "delta"])
    B, T = dice.choice([0, 1, 1, 2, 3]), dice.size(150)
    x = arguments(dice, dtype, B, T, rule)
    normalize = rule == "add" and x["bonus"] is None and dice.likely(0.4)
    if normalize:
        state = x["initial_state"]
        x |= {"q": x["q"].abs(), "k": x["k"].abs()}
        x["initial_state"] = None if state is None else nn.functional.pad(state, (0, 1), value=1.0)
    if bad := dice.likely(0.15):
        name = dice.choice([n for n, y in x.items() if y is not None])
        x[name] = dice.spoiled(x[name])
    row, token = B, T  # something is not finite in this row from this token on
    if not bad and dice.likely(0.2) and B:
        name, row, token = dice.choice(["q", "k", "v"]), dice.randrange(B), dice.randrange(T)
        x[name] = x[name].contiguous().clone()
        x[name][row, token].view(-1)[0] = dice.choice([torch.nan, torch.inf])
    wanted = [n for n, y in x.items() if y is not None and y.is_floating_point() and dice.likely(0.3)]
    x |= {n: x[n].detach().requires_grad_() for n in wanted}
    try:
        backend = dice.choice(["auto", "auto", "torch"])
        out, state = linear_attention(**x, rule=rule, normalize=normalize, backend=backend)
    except InputError:
        assert bad
        return
    if wanted and out.requires_grad:
        torch.autograd.grad(out.double().sum() + state.double().sum(), [x[n] for n in wanted], allow_unused=True)
    if T < 80 and not bad:
        expected, final = literal(**doubled(x), rule=rule, normalize=normalize)
        others = [n for n in range(B) if n != row]
        near(out[others], expected[others], dtype)
        near(state[others], final[others], dtype)
        near(out[:, :token], expected[:, :token], dtype)


def packed(dice: Dice) -> None:
    """Sequences of any length in one row, some of them empty; and ends that are not ends."""
    dtype, rule, T = dice.choice(DTYPES), dice.choice(["add", "delta"]), dice.size(120)
    x = arguments(dice, dtype, 1, T, rule)
    ends = sorted(dice.choices(range(T + 1), k=dice.randint(0, 5)))
    ends = [0, *ends, T] if not (bad := dice.likely(0.2)) else [dice.randint(-3, T + 3) for _ in range(3)]
    if x["initial_state"] is not None:
        x["initial_state"] = x["initial_state"].expand(len(ends) - 1, -1, -1, -1)
    cu_seqlens = torch.tensor(ends, dtype=dice.choice([torch.int32, torch.int64]))
    try:
        out, state = linear_attention(**x, rule=rule, cu_seqlens=cu_seqlens)
    except ValueError:
        assert bad
        return
    assert out.shape == read_shape(x) and len(state) == len(ends) - 1
    exact, n = doubled(x), dice.randrange(len(ends) - 1)
    if ends[n + 1] - ends[n] in range(1, 80):
        own = {m: y[:, ends[n] : ends[n + 1]] if y is not None and y.dim() > 2 else y for m, y in exact.items()}
        own["initial_state"] = None if exact["initial_state"] is None else exact["initial_state"][n : n + 1]
        expected, final = literal(**own, rule=rule)
        near(out[:, ends[n] : ends[n + 1]], expected, dtype)
        near(state[n : n + 1], final, dtype)


def one_token(dice: Dice) -> None:
    dtype, rule, B = dice.choice(DTYPES), dice.choice(["add", "delta"]), dice.choice([0, 1, 2, 3, 4])
    x = arguments(dice, dtype, B, 1, rule)
    now = {n: y if y is None or n in ("bonus", "initial_state") or y.dim() == 1 else y[:, 0] for n, y in x.items()}
    now["state"] = now.pop("initial_state")
    if now["state"] is not None:
        now["state"] = now["state"].to(dice.choice(DTYPES))
    if bad := dice.likely(0.3):
        name = dice.choice([n for n, y in now.items() if y is not None])
        now[name] = dice.spoiled(now[name])
    written = {}
    if not bad and dice.likely(0.5):
        state = now["state"] if now["state"] is None else now["state"].to(accumulator(now["v"]), copy=True).contiguous()
        written = {"state": state, "in_place": True, "out": torch.empty(read_shape(now), dtype=dtype)}
    try:
        with torch.set_grad_enabled(not written):
            out, state = step(**now | written, rule=rule)
    except InputError:
        assert bad
        return
    if not bad:
        assert not written or (out is written["out"] and (written["state"] is None or written["state"] is state))
        before = None if now["state"] is None else now["state"].double()
        expected, final = literal(**doubled(x) | {"initial_state": before}, rule=rule)
        near(out[:, None], expected, dtype)
        near(state, final, dtype)


def convolution(dice: Dice) -> None:
    channels, width, B, T = dice.size(80), dice.randint(2, 9), dice.choice([0, 1, 2]), dice.size(60)
    dtype = dice.choice(DTYPES)
    conv = nn.Conv1d(channels, channels, width, groups=channels, bias=dice.likely(0.5)).to(dtype)
    x = dice.laid_out(torch.randn(B, T, channels).to(dtype)).detach().requires_grad_(dice.likely(0.5))
    history = torch.randn(B, width - 1, channels).to(dice.choice(DTYPES))
    history = None if dice.likely(0.3) else dice.laid_out(history)
    y, last = convolve(conv, x, history, Sequences(x, None))
    exact = copy.deepcopy(conv).double()
    before = history.to(dtype).double() if history is not None else None
    expected, expected_last = convolve(exact, x.double(), before, Sequences(x.double(), None))
    near(y, expected, dtype)
    near(last, expected_last, dtype)
    if y.requires_grad:
        y.sum().backward()


def int8(dice: Dice) -> None:
    linear, dtype = nn.Linear(dice.size(200), dice.size(200), bias=dice.likely(0.5)), dice.choice(DTYPES)
    small = QuantizedLinear(linear)
    exact = nn.functional.linear(torch.eye(linear.in_features), small.weight.float()).T
    x = dice.laid_out(torch.randn(dice.choice([0, 1, 2, 8, 9, 30]), linear.in_features).to(dtype))
    if bad := dice.likely(0.2):
        x = dice.spoiled(x)
    try:
        with torch.no_grad():
            y = small(x)
    except InputError:
        assert bad
        return
    if not bad:
        expected = nn.functional.linear(x.float(), exact, linear.bias)
        near(y, expected, dtype if dtype == torch.bfloat16 else torch.float32)


def changed(dice: Dice, state: Any, B: int) -> Any:
    """A layer's state in another dtype, or of another batch."""
    dtype, rows = dice.choice([*DTYPES, None, None]), B if dice.likely(0.8) else dice.choice([1, B + 1])

    def other(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x if rows == B else x[:1].expand(rows, *x.shape[1:])
        return x.to(dtype) if dtype is not None and x.is_floating_point() else x

    return type(state)(*map(other, state)) if isinstance(state, tuple) else state


def layer(dice: Dice) -> None:
    """A prefill, perhaps in another precision, and tokens one by one from its state, perhaps changed."""
    torch.manual_seed(dice.randrange(2**31))
    D, H, B, dtype = 32, 4, dice.choice([1, 2, 3]), dice.choice([torch.float32, torch.bfloat16])
    spec = zoo.mixer(dice.choice(MIXERS))
    mixer = layers.build(spec, hidden_size=D, num_heads=H, layer_idx=0, num_layers=2).to(dtype)
    x = torch.randn(B, dice.size(40), D).to(dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dice.likely(0.4)):
        _, state = mixer(x)
    state = changed(dice, state, B)
    for _ in range(dice.randint(1, 3)):
        with torch.set_grad_enabled(dice.likely(0.2)):
            y, state = mixer(torch.randn(B, dice.choice([1, 1, 1, 5]), D).to(dtype), state)
        assert bool(y.isfinite().all())


def model(dice: Dice) -> None:
    """A language model with padding anywhere, a cache or none, and a token more."""
    from headrace import HeadraceConfig, HeadraceForCausalLM
    from headrace.hf.cache import NAME

    torch.manual_seed(dice.randrange(2**31))
    names = [dice.choice(MIXERS), dice.choice(MIXERS)]
    config = HeadraceConfig(mixer=names, vocab_size=17, hidden_size=32, num_hidden_layers=2, num_heads=4)
    lm, B, T = HeadraceForCausalLM(config).eval(), dice.choice([1, 2]), dice.size(30)
    ids, mask = torch.randint(17, (B, T)), (torch.rand(B, T) < dice.choice([0.0, 0.5, 1.0])).long()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dice.likely(0.2)):
        out = lm(ids, attention_mask=mask if dice.likely(0.7) else None, use_cache=True)
    with torch.no_grad():
        for use_cache in dice.choices([True, False], k=2):
            logits = lm(ids[:, -1:], past_key_values=out[NAME], use_cache=use_cache).logits
            assert bool(logits.isfinite().all())


KINDS: dict[Callable[[Dice], None], int] = {op: 8, packed: 4, one_token: 4, convolution: 3, int8: 2, layer: 6, model: 1}


def run(number: int) -> tuple[str, str | None]:
    """(the kind of a case, what went wrong)."""
    dice = Dice(number)
    torch.manual_seed(number)
    torch.set_num_threads(dice.choice([1, 1, 2, 3]))
    (kind,) = dice.choices(list(KINDS), list(KINDS.values()))
    try:
        kind(dice)
    except InputError as refused:
        return kind.__name__, None if kind is layer else f"InputError: {refused}"
    except Exception:
        return kind.__name__, traceback.format_exc()
    return kind.__name__, None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="one case")
    given = parser.parse_args()
    numbers = range(given.first, given.first + given.cases) if given.only is None else [given.only]
    warnings.simplefilter("ignore")
    counts, wrong = Counter[str](), 0
    for number in numbers:
        kind, found = run(number)
        counts[kind] += 1
        if found is not None:
            wrong += 1
            print(f"case {number} ({kind}): {found}", flush=True)
    where = native.instructions or "no native library"
    print(f"{where}: {wrong} of {sum(counts.values())} cases wrong; {dict(counts)}")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
