"""The native library around its kernels: tails, strides, threads, what it refuses, and how its absence is told."""

import itertools
import multiprocessing
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import fresh
from equation import DECAYS, KINDS, NATIVE, B, H, T, assert_same, detached, inputs, leaves, of_kind, weighted_gradients
from headrace import InputError, backends, linear_attention, step
from headrace.ops.backends.native import layer, structs
from headrace.ops.backends.native import library as native
from headrace.ops.backends.native.op import _kept_shapes
from headrace.ops.call import Call
from headrace.ops.reference import literal
from headrace.verification.verify import relative

pytestmark = pytest.mark.usefixtures("native")


def called(arguments, **settings):
    """(out, state, gradients by name) of a weighted sum."""
    result = linear_attention(**arguments, backend="native", **settings)
    given = {name: x for name, x in arguments.items() if x.requires_grad}
    return *result, dict(zip(given, weighted_gradients(result, list(given.values())), strict=True))


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rule", ["add", "delta"])
def test_sizes_that_are_no_multiple_of_a_vector(decay, rule):
    """A length of chunk for each size, all of them over the decays."""
    sizes = ((1, 1, 1), (3, 33, 17), (16, 1, 63), (17, 16, 65), (65, 3, 130))
    for n, (key, value, tokens) in enumerate(sizes, DECAYS.index(decay)):
        way = NATIVE._replace(settings={"backend": "native", "chunk_size": (None, 16, 128)[n % 3]})
        assert_same(inputs(decay, rows=1, tokens=tokens, groups=2, key=key, value=value), way, rule=rule)


@pytest.mark.parametrize("rule", ["add", "delta"])
def test_vector_decays_in_blocks_of_every_kind(rule):
    """Chunks of 64 tokens that are one block, or blocks of 16: gentle ones, steep ones, and both beside each other."""
    way = NATIVE._replace(settings={"backend": "native", "chunk_size": 64})
    x = inputs("vector", rows=1, tokens=130, key=17)
    mixed = torch.where(torch.arange(130) % 40 < 24, 0.3, 8.0)[:, None, None]
    for factor in (0.1, 1.0, 8.0, -0.1, mixed):
        decay = (factor * x["log_decay"].detach()).requires_grad_()
        assert_same(x | {"log_decay": decay}, way, check=False, rule=rule)


@pytest.mark.parametrize("rule", ["add", "delta"])
@pytest.mark.parametrize("decay", DECAYS)
def test_small_values_keep_their_digits(decay, rule):
    """Denormal numbers are zero in the kernels; factors on the way must not make such of what is not."""
    x = inputs(decay, rows=1, tokens=130, key=17)
    x |= {name: (1e-30 * x[name].detach()).requires_grad_() for name in ("v", "initial_state")}
    assert_same(x, NATIVE._replace(settings={"backend": "native", "chunk_size": 32}), check=False, rule=rule)


@pytest.mark.parametrize("kind", KINDS)
def test_thread_count_does_not_change_results(kind):
    options, settings = of_kind(kind)
    x = leaves(inputs("vector", rows=1, tokens=500, key=64, value=72, **options))  # 18 million products, for 16 threads
    torch.set_num_threads(1)
    out, state, gradients = called(x, **settings)
    for threads in (2, 3, 16):
        torch.set_num_threads(threads)
        result = called(x, **settings)
        assert max(relative(x, y) for x, y in zip(result[:2], (out, state), strict=True)) <= NATIVE.tolerance
        assert all(relative(result[2][name], gradients[name]) <= NATIVE.gradient_tolerance for name in gradients)


def test_concurrent_calls_agree():
    x = detached(inputs("scalar", tokens=300))
    expected = linear_attention(**x, backend="native")[0]
    with ThreadPoolExecutor(4) as pool:
        for out, _ in pool.map(lambda _: linear_attention(**x, backend="native"), range(20)):
            assert torch.equal(out, expected)


def _in_a_child(x, expected, answer):
    torch.set_num_threads(2)
    answer.put(torch.equal(linear_attention(**x, backend="native")[0], expected))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_process_starts_its_own_threads():
    """As the workers of a DataLoader: the parent's threads are not in the child."""
    torch.set_num_threads(2)
    x = detached(inputs("scalar", rows=1, tokens=80, key=64, value=64))  # 2 · 80 · 4 · 64² products, for two threads
    expected = linear_attention(**x, backend="native")[0]
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    child = context.Process(target=_in_a_child, args=(x, expected, answer))
    child.start()
    child.join(60)
    assert child.exitcode == 0 and answer.get()


@pytest.mark.parametrize("requested", [("v",), ("log_decay",), ("initial_state",), ("q", "beta"), ("k", "write_gate")])
def test_a_gradient_does_not_depend_on_which_others_are_requested(requested):
    x = leaves(inputs("scalar", groups=2))
    everything = called(x, rule="delta")[2]
    some = {name: y if name in requested else y.detach() for name, y in x.items()}
    result = called(some, rule="delta")[2]
    assert all(torch.equal(result[name], everything[name]) for name in requested)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_token_calls_equal_the_whole(decay, kind):
    """`step`, and a call of one token, with and without a gradient: the whole in pieces of one."""
    options, settings = of_kind(kind)
    arguments = leaves(inputs(decay, groups=2, key=17, value=20, **options))
    expected, final = linear_attention(**arguments, backend="native", **settings)
    first, fixed = arguments.pop("initial_state"), {"bonus", "log_decay"} if decay == "fixed" else {"bonus"}
    pieces = [{n: x if n in fixed else x[:, t : t + 1] for n, x in arguments.items()} for t in range(T)]
    state, stepped = first.detach(), first.detach()
    graph = first
    for t, now in enumerate(pieces):
        constant = detached(now)
        out, state = linear_attention(**constant, initial_state=state, backend="native", **settings)
        token = {n: x if n in fixed else x[:, 0] for n, x in constant.items()}
        step_out, stepped = step(**token, state=stepped, **settings)
        graph_out, graph = linear_attention(**now, initial_state=graph, backend="native", **settings)
        assert torch.equal(step_out, out[:, 0]) and torch.equal(stepped, state)
        assert all(relative(x, expected[:, t]) <= NATIVE.tolerance for x in (step_out, graph_out[:, 0]))
    assert relative(state, final) <= NATIVE.tolerance
    wanted = [first, *(x for n, x in arguments.items() if n in ("k", "log_decay"))]
    pairs = zip(torch.autograd.grad(graph.sum(), wanted), torch.autograd.grad(final.sum(), wanted), strict=True)
    assert all(relative(x, y.double()) < 1e-5 for x, y in pairs)


def faint(tokens=400):
    """A call of the op with denormal numbers: what every 50th token writes fades by e^−3 a token, and is read alone."""
    x = detached(inputs("scalar", rows=1, tokens=tokens))
    written = (torch.arange(tokens) % 50 == 0)[None, :, None, None]
    return x | {"v": x["v"] * written, "log_decay": torch.full((1, tokens, H), -3.0)}


def test_denormals_are_flushed_in_every_thread():
    """Whatever the caller's own thread does with them, which stays as it was."""
    x, tiny = faint(), torch.tensor([2.0**-126])
    expected = linear_attention(**x, backend="native")
    for threads, flush in itertools.product((1, 2, 5), (False, True)):
        torch.set_num_threads(threads)
        torch.set_flush_denormal(flush)
        try:
            actual = [linear_attention(**x, backend="native") for _ in range(5)]
            assert bool((tiny * 0.5 == 0).all()) == flush
        finally:
            torch.set_flush_denormal(False)
        assert all(torch.equal(a, b) for pair in actual for a, b in zip(pair, expected, strict=True))
    assert all(bool(((y == 0) | (y.abs() >= tiny)).all()) for y in expected)


FIRST_REGION = """
import torch
from headrace import linear_attention
torch.set_num_threads(4)
q = torch.zeros(1, 80, 4, 64)
linear_attention(q, q, q, backend="native")  # begins PyTorch's threads
assert torch.full((400_000,), 1e-40).mul(1.0).count_nonzero() == 400_000
"""

FIRST_PROGRAM = """
import torch
from headrace.hf import HeadraceCache, HeadraceConfig, HeadraceForCausalLM
torch.set_num_threads(1)  # no region is parallel
sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_heads": 4, "vocab_size": 4096}
model, cache = HeadraceForCausalLM(HeadraceConfig(mixer="gla", **sizes)).eval(), HeadraceCache()
with torch.inference_mode():
    model(torch.ones(1, 2, dtype=torch.long), past_key_values=cache, use_cache=True)
    torch.set_num_threads(4)
    assert model.engine.read(model, torch.ones(1, 1, dtype=torch.long), cache) is not None
assert torch.full((400_000,), 1e-40).mul(1.0).count_nonzero() == 400_000
"""


@pytest.mark.parametrize("first", [FIRST_REGION, FIRST_PROGRAM], ids=["op", "program"])
def test_pytorchs_threads_keep_denormals(first):
    """Also threads that a native call begins, of the op or of a model's token, in a new process."""
    fresh.output(first, before=fresh.TRANSFORMERS if "headrace.hf" in first else "")


def test_short_calls_do_not_wait_for_long_ones():
    """A token's call at any moment of the long call takes a small part of it; behind a lock one would take the rest.
    Its time is that of the process on the CPU, in which what else the machine does is not counted."""
    torch.set_num_threads(2)
    key, token = torch.randn(1, 20_000, 4, 256).expand(4, -1, -1, -1), torch.randn(1, 1, 2, 16)
    with ThreadPoolExecutor(1) as other:
        times = [time.process_time()]
        running = other.submit(linear_attention, key, key, key[..., :64], backend="native")
        while not running.done():
            linear_attention(token, token, token, backend="native")
            times.append(time.process_time())
    longest = max(later - earlier for earlier, later in itertools.pairwise(times))
    assert longest < (times[-1] - times[0]) / 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_working_memory_is_bounded_and_released():
    """16 tokens of large heads: at most ten states of 16 MiB for the backward, and none of them kept after it."""
    script = """
import re, torch
from pathlib import Path
from headrace import linear_attention
torch.set_num_threads(1)
mebibytes = lambda key: int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024
def run(size, tokens):
    q, k, v = torch.randn(3, 1, tokens, 1, size).unbind()
    out, state = linear_attention(q.requires_grad_(), k, v, log_decay=-torch.rand(1), rule="delta", backend="native")
    (out.sum() + state.sum()).backward()
run(64, 64)
before = mebibytes("VmSize")
run(2048, 16)
print(mebibytes("VmPeak") - before, mebibytes("VmSize") - before)
"""
    peak, left = map(float, fresh.output(script).split())
    assert peak < 10 * 16 and left < 3 * 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_defaults_of_pytorch_do_not_change_results(dtype, default_dtype):
    """The library reads and writes memory of the CPU, of its own dtypes."""
    x, ends = leaves(inputs("scalar", rows=1, n=2, bonus=True)), torch.tensor([0, 5, T])
    given, results = list(x.values()), []
    for device in ("cpu", "meta"):
        with torch.device(device):
            pair = linear_attention(**x, cu_seqlens=ends, backend="native")
            results.append([*pair, *torch.autograd.grad(pair, given, [*map(torch.ones_like, pair)])])
        default_dtype(dtype)
    assert all(map(torch.equal, *results))


GIVEN = ("q", "k", "v", "log_decay", "beta", "write_gate", "read_gate", "initial_state", "bonus")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("q", torch.zeros(B, T, H, 7)), ("q", torch.zeros(B, T, H, 6, dtype=torch.bfloat16)),
        ("k", torch.zeros(B, T - 1, H, 6)), ("log_decay", torch.zeros(B, T)), ("log_decay", torch.zeros(H + 1)),
        ("log_decay", torch.zeros(B, T, H, 5)), ("beta", torch.zeros(B, T)), ("write_gate", torch.zeros(B, T, H, 6)),
        ("read_gate", torch.zeros(T, B, H)), ("initial_state", torch.zeros(B, H, 5, 6)), ("bonus", torch.zeros(H, 7)),
    ],
)  # fmt: skip
def test_operator_checks_its_tensors(name, wrong):
    """The operator itself, as exported programs call it, without the checks of `linear_attention`."""
    x = detached(inputs("scalar", bonus=True))
    arguments = [x[n] for n in GIVEN]
    run = torch.ops.headrace.native
    rest = (None, False, 1.0, 0, False, False)
    run(*arguments, *rest)
    arguments[GIVEN.index(name)] = wrong
    with pytest.raises(ValueError, match=f"{name} has shape .* expected"):
        run(*arguments, *rest)


def test_backward_operator_checks_its_tensors():
    x = detached(inputs("scalar", rows=1, tokens=40, bonus=True))
    arguments, rest = [x[n] for n in GIVEN], (None, False, 1.0, 0, False, False)
    out, final, kept = torch.ops.headrace.native_kept(*arguments, *rest)
    good = {"d_out": torch.randn_like(out), "d_final": torch.randn_like(final), "kept": kept}

    def gradients(changed):
        d_out, d_final, kept = (good | changed).values()
        return torch.ops.headrace.native_backward(d_out, d_final, *arguments, *rest, kept, [True] * len(GIVEN))

    expected = gradients({})
    apart = {name: x.mT.contiguous().mT for name, x in good.items() if x.dim() == 4}
    assert all(torch.equal(a, b) for a, b in zip(gradients(apart), expected, strict=True))
    for name, x in good.items():
        for wrong in (x[..., 1:], x.bfloat16()) if x.numel() else (x.new_zeros(3),):
            with pytest.raises(ValueError, match=f"{name} has shape"):
                gradients({name: wrong})


@pytest.mark.parametrize("rule", ["add", "delta"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_reaches_no_earlier_token(dtype, decay, rule):
    x = detached(inputs(decay, tokens=40, key=17, value=20), torch.float64)
    for name, y in x.items():
        for t in (0, 5, 21, 39) if y.shape[:2] == (B, 40) else ():
            arguments = x | {name: y.clone()}
            arguments[name].view(B, 40, H, -1)[1, t, 1, -1] = torch.nan
            actual = linear_attention(**detached(arguments, dtype), rule=rule, backend="native")
            for ours, exact in zip(actual, literal(**arguments, rule=rule), strict=True):
                assert torch.equal(ours.isnan(), exact.isnan()), (name, t)


ISAS = ["avx512", "avx2", "portable"]


@pytest.mark.slow(seconds=25)
def test_every_instruction_set_gives_the_same_results():
    """Of calls, and of a layer's tokens. Less than the machine has can be asked for, once in a process: in three,
    forked before the library is loaded."""
    script = """
import os, sys, pytest, torch
isa = next((isa for isa in sys.argv[1:] if not (child := os.fork()) or os.waitpid(child, 0)[1]), None)
if isa is None:
    sys.exit()
os.environ["HEADRACE_ISA"] = isa
from equation import DECAYS, KINDS, NATIVE, assert_same, detached, inputs, of_kind
from headrace import linear_attention
from headrace.ops.backends.native import library as native
from headrace.verification.verify import relative
torch.manual_seed(0), torch.set_num_threads(1)
for decay in DECAYS:
    for kind in KINDS:
        options, settings = of_kind(kind)
        drawn = inputs(decay, tokens=NATIVE.tokens, groups=2, key=17, value=33, **options)
        assert_same(drawn, NATIVE, **settings)
        rounded = detached(drawn, torch.bfloat16)
        states = [linear_attention(**detached(rounded, dtype), backend="native", **settings)[1]
                  for dtype in (torch.bfloat16, torch.float32)]
        assert relative(states[0], states[1].double()) < 1e-6  # products in float32
sys.path.append("layers")
from test_decode import MAX_ERROR_RATIO, in_float64, layer, token_by_token
torch.set_grad_enabled(False)
for mixer in ("linear-attention", "retnet", "softmax-mamba2", "softmax-gla", "rwkv6", "softmax-kda"):
    made, x = layer(mixer), torch.randn(2, 8, 32)
    expected = in_float64(made, mixer, x)[0]
    assert relative(token_by_token(made, x, 2)[0], expected) <= MAX_ERROR_RATIO * relative(made(x)[0], expected), mixer
print(native.instructions)
"""
    said = fresh.output(script, *ISAS, folder=Path(__file__).parents[1], before=fresh.TRANSFORMERS)
    for isa, found in zip(ISAS, said.split(), strict=True):
        assert found in (isa, "avx2", "portable")  # the machine may have less


def test_an_empty_limit_of_the_instruction_set_is_none():
    script = "from headrace.ops.backends.native import library; print(library.instructions)"
    best, empty = (fresh.output(script, HEADRACE_ISA=isa) for isa in ("avx512bf16", ""))
    assert empty == best != ""


# --- what it refuses, and what is said of it -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "settings", "sentence"),
    [
        (torch.float64, {}, "computes in float32, from float32 or bfloat16, and v is torch.float64"),
        (torch.float16, {}, "and v is torch.float16"),
        (torch.float32, {"chunk_size": 5}, "multiples of 16 up to 128 tokens, and chunk_size is 5"),
        (torch.float32, {"form": "parallel"}, "chunk_size is 13"),
        (torch.float32, {"form": "recurrent"}, "it has no form='recurrent'; expected backend='torch' or 'auto'"),
    ],
)
def test_unsupported_calls_are_refused(dtype, settings, sentence):
    x = torch.randn(B, T, H, 4).to(dtype)
    with pytest.raises(InputError, match=f"backend='native' cannot run here: .*{sentence}"):
        linear_attention(x, x, x, backend="native", **settings)
    linear_attention(x, x, x, **settings)


def test_the_normalizer_is_one_more_column():
    q, v = torch.rand(1, 1, 1, 1), torch.randn(1, 1, 1, 2**16)
    with pytest.raises(InputError, match=r"K and V \(V \+ 1 with normalize\) from 1 to 65536, and .* 65537"):
        linear_attention(q, q, v, normalize=True, backend="native")
    torch.testing.assert_close(linear_attention(q, q, v, normalize=True)[0], v * q**2 / (q**2 + 1e-6))
    torch.testing.assert_close(step(q[0], q[0], v[0], normalize=True)[0], (v * q**2 / (q**2 + 1e-6))[0])


def test_native_is_the_first_choice_on_a_cpu():
    x = torch.randn(B, T, H, 4)
    assert backends(x, x, x) == backends(x.bfloat16(), x.bfloat16(), x.bfloat16()) == "native"
    assert backends(x.double(), x.double(), x.double()) == backends(x, x, x, chunk_size=5) == "torch"
    meta = x.to("meta")
    assert backends(meta, meta, meta) == "torch"


def test_failed_native_call_raises():
    for status, kind in ((1, RuntimeError), (2, RuntimeError), (native.NO_MEMORY, MemoryError)):
        with pytest.raises(kind, match="native kernels"):
            native.check(status)


def test_missing_library_has_a_reason(monkeypatch, tmp_path):
    built = native.ABI
    monkeypatch.delenv("HEADRACE_LIBRARY", raising=False)
    monkeypatch.setattr(native, "ABI", 99)
    assert f"has interface version {built}, not 99: install headrace again" in native._load()[1]
    monkeypatch.setattr(native, "files", lambda package: tmp_path)
    assert "installed without its native kernels: no C++ compiler" in native._load()[1]
    (tmp_path / "libheadrace.so").write_text("no library")
    assert "its library cannot be loaded" in native._load()[1]
    monkeypatch.setenv("HEADRACE_LIBRARY", torch._C.__file__)  # of another program
    assert "its library cannot be loaded" in native._load()[1]
    monkeypatch.setenv("HEADRACE_LIBRARY", "/nowhere.so")
    with pytest.raises(InputError, match=r"HEADRACE_LIBRARY='/nowhere\.so' is not a file"):
        native._load()
    monkeypatch.setenv("HEADRACE_ISA", "AVX512")
    with pytest.raises(InputError, match="HEADRACE_ISA='AVX512' is unknown; expected one of avx512bf16, avx512, avx2,"):
        native._load()
    monkeypatch.setattr(native, "missing", "it is broken")
    x = torch.randn(B, T, H, 4)
    with pytest.raises(InputError, match="backend='native' cannot run here: it is broken"):
        linear_attention(x, x, x, backend="native")
    assert backends(x, x, x) == "torch"


OTHER_LAYOUTS = {  # what a library lists of hr_layer instead
    " scale:f@64": "", "amplitude:f@96": "amplitude:i@96", " D:q@104 H:q@112": " H:q@104 D:q@112", "end@408": "end@416",
}  # fmt: skip


def test_a_struct_of_another_layout_is_one_error(monkeypatch):
    """A field less, of another type or in another place, another size; or a struct that Python has otherwise."""
    listed = native.library.hr_structs().decode()
    for old, new in OTHER_LAYOUTS.items():
        assert old in listed and "hr_layer has " in structs.fault(listed.replace(old, new))
    monkeypatch.setitem(structs.LAYOUTS, "hr_program", structs.Layout("i abi threads, q width rows"))
    with pytest.raises(RuntimeError, match=r"hr_program has rows:q@8 in the library, and width:q@8 in structs\.py"):
        native._load()


def test_a_layer_of_no_size_is_refused():
    """Before the library divides by a number of heads."""
    program, unsupported = structs.LAYOUTS["hr_program"].pack(native.ABI, 1, 1, 16, 0, 1, 0, 0, 0, 0), 2
    assert native.library.hr_run(program, b"", bytes(structs.LAYOUTS["hr_layer"].size), b"") == unsupported


def test_kinds_are_packed_in_the_order_of_their_fields():
    fields = structs.LAYOUTS["hr_layer"].fields.items()
    assert ["dtype", *layer.KINDS] == [name for name, (kind, _) in fields if kind == "i"]


@pytest.mark.parametrize("settings", [{}, {"delta": True}, {"normalize": True}, {"chunk_size": 48}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_graphs_know_how_much_is_kept(settings, dtype):
    """Before the library runs: few and many states, those of a head too large to find many again, packed sequences."""
    sizes = itertools.product(((2, 1), (2, 33), (1, 4096), (1, 300_000)), ((1, 1), (64, 64), (64, 65), (3000, 700)))
    for ((rows, tokens), (key, value)), decays, packed in itertools.product(sizes, range(4), (False, True)):
        x = torch.empty(1, 1, 1, max(key, value), dtype=dtype)
        k, v = (x[..., :n].expand(1 if packed else rows, tokens, 2, n) for n in (key, value))
        decay = (None, torch.empty(2), torch.empty(1).expand(v.shape[:3]), torch.empty(1, 1, 1, key).expand(k.shape))
        ends = torch.tensor([0, tokens // 3, tokens // 3, tokens]) if packed else None
        call = Call(k, k, v, decay[decays], cu_seqlens=ends, **settings)
        bonuses = [None] if decays == 1 or settings.keys() & {"delta", "normalize"} else [None, k[0, 0]]
        for each in (call._replace(bonus=bonus) for bonus in bonuses):
            problem = native.Problem(each)  # which owns what `packed` points to
            assert _kept_shapes(each) == ((native.library.hr_kept_floats(problem.packed),),)


@pytest.mark.parametrize("bonus", [False, True])
def test_states_at_the_end_of_a_run_have_room(bonus):
    """States of 6×6 are kept every 32 tokens; a bonus adds a row."""
    way = NATIVE._replace(settings={"backend": "native"})
    for tokens in (32, 33, 64, 65):
        assert_same(inputs("scalar", rows=2, tokens=tokens, key=6, value=6, bonus=bonus), way)
