"""A saved model in the hands of others: fast whatever its config says, and read where headrace is not known."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import fresh
import tiny
from headrace import HeadraceForCausalLM, load
from headrace.utils.integrity import CHECKSUMS

PROMPT, NEW = 5, 4


def counted(model, **options):
    """How many tokens pass through a mixer at each of its calls while the model generates."""
    seen = []
    model.model.backbone.layers[1].mixer.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    ids = torch.randint(1, tiny.SIZES["vocab_size"], (1, PROMPT))
    model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None, **options)
    return seen


WITH, WITHOUT = [PROMPT, *[1] * (NEW - 1)], [*range(PROMPT, PROMPT + NEW)]


@pytest.fixture(params=["with generation_config.json", "without"])
def uncached(request, tmp_path):
    """A folder as the Trainer wrote it, with use_cache=False in its files."""
    tiny.build("gla", use_cache=False).save_pretrained(tmp_path / "model")
    generation = tmp_path / "model" / "generation_config.json"
    generation.unlink() if request.param == "without" else generation.write_text(json.dumps({"use_cache": False}))
    return tmp_path / "model"


@pytest.mark.parametrize("read", [load, HeadraceForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained])
def test_saved_use_cache_false_does_not_disable_the_cache(uncached, read):
    assert counted(read(uncached)) == WITH


def test_explicit_use_cache_false_disables_the_cache(uncached):
    assert counted(load(uncached), use_cache=False) == WITHOUT
    off = GenerationConfig(use_cache=False)
    assert counted(load(uncached), generation_config=off) == WITHOUT
    assert counted(HeadraceForCausalLM.from_pretrained(uncached, generation_config=off)) == WITHOUT


def test_unsaved_model_decodes_with_the_cache():
    assert counted(tiny.build("hybrid", use_cache=False)) == WITH


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.saved(tiny.build("softmax-gla", vocab_size=257).float(), tmp_path_factory.mktemp("folder") / "model")


def in_a_fresh_process(code, folder, cache, before):
    return fresh.output(code, str(folder), before=before, HF_HUB_OFFLINE="1", HF_MODULES_CACHE=str(cache))


# Each way in a process of its own, forked from one that has imported torch and what the way imports first; headrace is
# imported first in every process that has imported it with much else.
WAYS = {
    "import torch, transformers": {
        "transformers first": "from transformers import AutoModelForCausalLM; import headrace.hf; "
        "model = AutoModelForCausalLM.from_pretrained(folder)",
        "headrace unknown": "from transformers import AutoModelForCausalLM; "
        "model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True); model.save_pretrained(again)",
    },
    "import torch, headrace.hf, transformers": {
        "headrace first": "import headrace.hf; from transformers import AutoModel, AutoModelForCausalLM; "
        "model = AutoModelForCausalLM.from_pretrained(folder); "
        "assert type(AutoModel.from_pretrained(folder)).__name__ == 'HeadraceModel'; "
        "torch.save(model(torch.arange(9)[None]).logits, again)",
        "in the middle": "from transformers import LlamaForCausalLM, AutoModelForCausalLM; "
        "model = AutoModelForCausalLM.from_pretrained(folder)",
        "from a config": "from transformers import AutoConfig, AutoModelForCausalLM; "
        "model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))",
        "for a model type": "from transformers import AutoConfig, AutoModelForCausalLM; "
        "config = AutoConfig.for_model('headrace', hidden_size=32, num_hidden_layers=2); "
        "model = AutoModelForCausalLM.from_config(config)",
        "a pipeline": "from transformers import pipeline; model = pipeline('text-generation', model=folder).model",
    },
}
FORKED = """
import os, sys, torch
torch.set_num_threads(1)

folder, again = sys.argv[1], {again!r}
{first}
for way, code in {ways!r}.items():
    if not (child := os.fork()):
        exec(code)
        print(way, "reads", type(model).__module__, type(model).__name__, flush=True)
        os._exit(0)
    assert not os.waitpid(child, 0)[1], way
"""


@pytest.fixture(scope="module", params=WAYS)
def read(request, folder, tmp_path_factory):
    """What the ways that begin alike have printed, and where one has saved what it read or computed."""
    ways, place = WAYS[request.param], tmp_path_factory.mktemp("read")
    code = FORKED.format(first=request.param, ways=ways, again=str(place / "again"))
    before = None if "headrace" in request.param else fresh.TRANSFORMERS
    return ways, in_a_fresh_process(code, folder, place / "modules", before), place / "again"


def test_transformers_loads_a_folder_in_a_new_process(read):
    ways, output, _ = read
    assert all(f"{way} reads headrace.hf.model HeadraceForCausalLM\n" in output for way in ways)


@pytest.mark.parametrize("read", ["import torch, headrace.hf, transformers"], indirect=True)
def test_loaded_model_gives_the_same_logits(folder, read):
    _, _, logits = read
    tiny.close(torch.load(logits), load(folder)(torch.arange(9)[None]).logits)


@pytest.mark.parametrize("read", ["import torch, transformers"], indirect=True)
def test_model_loaded_by_remote_code_is_saved_unchanged(folder, read):
    _, _, again = read
    written = {file.name for file in again.iterdir()}
    assert written == {"config.json", "generation_config.json", "model.safetensors", "modeling_headrace.py", CHECKSUMS}
    one, two = (json.loads((path / "config.json").read_text()) for path in (folder, again))
    assert one == two and one["auto_map"]["AutoModelForCausalLM"] == "modeling_headrace.HeadraceForCausalLM"
