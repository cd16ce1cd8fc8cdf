"""The vLLM plugin: the engine of vLLM generates what headrace generates, for streams that begin at different times."""

import importlib
import os
import tomllib
from pathlib import Path

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
