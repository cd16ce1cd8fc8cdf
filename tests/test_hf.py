"""The model on Hugging Face's interfaces. Weights are far from where they begin, and float64, so that a state that is
lost, stale, rounded or put in the wrong row shows in every comparison."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from headrace import zoo
from headrace.errors import InputError
from headrace.gates import HeadCompetition, SelfInitialised
from headrace.hf import HeadraceCache, HeadraceConfig, HeadraceForCausalLM, HeadracePreTrainedModel, load
from headrace.spec import AttentionSpec, to_json

MIXERS = {
    "retnet": "retnet",
    "gla": "gla",
    "mamba2": "mamba2",
    "rwkv6": "rwkv6",
    "gated-deltanet": "gated-deltanet",
    "softmax-gla": "softmax-gla",
    "hybrid": ["softmax-gated-deltanet", "transformer"],
}
SIZES = {"vocab_size": 29, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "intermediate_size": 16}
T = 9


def config(mixer, **changes):
    return HeadraceConfig(
        **{"mixer": MIXERS.get(mixer, mixer) if isinstance(mixer, str) else mixer, **SIZES, **changes}
    )


@torch.no_grad()
def trained(model):
    """Weights as training might leave them: no gate at 1, no norm at 1, no flat prediction."""
    for name, p in model.named_parameters():
        p.add_(torch.randn_like(p), alpha=1.0 if "competition" in name else 0.3)
    return model.double().eval()


def build(mixer, **changes):
    return trained(HeadraceForCausalLM(config(mixer, **changes)))


@pytest.fixture(params=MIXERS)
def model(request):
    return build(request.param)


def tokens(B, length=T):
    return torch.randint(1, SIZES["vocab_size"], (B, length))  # 0 is for padding: generate looks for it


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# --- the state: traps 1 to 5 of other caches -----------------------------------------------------------------------


@torch.no_grad()
def test_decoding_is_the_full_forward(model):
    ids, cache, steps = tokens(2), HeadraceCache(), []
    assert cache.get_seq_length() == 0
    for t, piece in enumerate(ids.split([4, 1, 1, 3], 1)):
        steps.append(model(piece, past_key_values=cache).logits)
        assert cache.get_seq_length() == sum([4, 1, 1, 3][: t + 1])
    full = model(ids).logits
    close(torch.cat(steps, 1), full)
    forgetful = model(ids[:, 4:5]).logits
    assert (forgetful - full[:, 4:5]).abs().max() > 1e-2, "the state does not matter: this test has no teeth"


@torch.no_grad()
def test_states_are_replaced_and_never_written_into(model):
    cache = model(tokens(2)).past_key_values
    before = [[None if x is None else x.clone() for x in state] for state in cache.states]
    held = cache.states
    model(tokens(2, 1), past_key_values=cache)
    assert held is not cache.states
    for old, copy in zip(held, before, strict=True):
        assert all(x is y is None or torch.equal(x, y) for x, y in zip(old, copy, strict=True))


def test_gradients_flow_through_the_cache(model):
    """In training a cache passed on is one computation, cut anywhere."""
    ids = tokens(2)
    gradients = []
    for cut in (T, 4):
        cache, logits = HeadraceCache(), []
        for piece in (ids[:, :cut], ids[:, cut:]):
            if piece.shape[1]:
                logits.append(model.train()(piece, past_key_values=cache).logits)
        model.zero_grad()
        torch.cat(logits, 1).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for whole, parts in zip(*gradients, strict=True):
        close(parts, whole, 1e-8)


@pytest.mark.parametrize("mixer", ["gla", "mamba2", "hybrid"])
@torch.no_grad()
def test_a_half_precision_model_keeps_its_memory_in_float32(mixer):
    model = build(mixer).bfloat16()
    cache = model(tokens(2)).past_key_values
    for _ in range(3):
        assert model(tokens(2, 1), past_key_values=cache).logits.dtype == torch.bfloat16
        memory = cache.states[0].memory
        assert memory.dtype == torch.float32
        assert not torch.equal(memory, memory.bfloat16().float())


@torch.no_grad()
def test_rows_of_a_cache_are_moved_together(model):
    ids, last = tokens(3), tokens(4, 1)
    operations = {
        "reorder_cache": torch.tensor([2, 0, 0, 1]),
        "batch_select_indices": torch.tensor([1, 2, 0, 2]),
    }
    for name, rows in operations.items():
        cache = model(ids).past_key_values
        getattr(cache, name)(rows)
        close(model(last, past_key_values=cache).logits[:, 0], model(torch.cat([ids[rows], last], 1)).logits[:, -1])
    cache = model(ids[:2]).past_key_values
    cache.batch_repeat_interleave(2)
    twice = ids[[0, 0, 1, 1]]
    close(model(last, past_key_values=cache).logits[:, 0], model(torch.cat([twice, last], 1)).logits[:, -1])


@torch.no_grad()
def test_the_rest_of_the_cache():
    model = build("gla")
    cache = model(tokens(2)).past_key_values
    assert (len(cache), cache.batch_size, cache.is_initialized) == (2, 2, True)
    assert not cache.is_compileable
    assert not cache.is_croppable
    with pytest.raises(InputError, match="a recurrent state keeps no past"):
        cache.crop(1)
    with pytest.raises(InputError, match="holds 2 sequences; expected 3"):
        model(tokens(3, 1), past_key_values=cache)
    with pytest.raises(InputError, match="is a DynamicCache; expected a HeadraceCache"):
        model(tokens(2), past_key_values=DynamicCache())
    ids = tokens(2)
    cache.reset()
    assert (len(cache), cache.batch_size, cache.is_initialized, cache.get_seq_length()) == (0, -1, False, 0)
    close(model(ids, past_key_values=cache).logits, model(ids).logits)
    frozen = model(tokens(2, 1), past_key_values=cache, use_cache=False)
    assert frozen.past_key_values is None
    assert cache.get_seq_length() == T


# --- generate -------------------------------------------------------------------------------------------------------

STRATEGIES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True},
    "beams": {"do_sample": False, "num_beams": 4},
    "sampled beams": {"do_sample": True, "num_beams": 4},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "several of the beams": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
}


def generate(model, ids, **options):
    torch.manual_seed(1)
    return model.generate(ids, max_new_tokens=6, pad_token_id=0, **options)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_generation_with_the_cache_is_generation_without(model, strategy):
    ids = tokens(2)
    with_cache = generate(model, ids, **STRATEGIES[strategy])
    assert torch.equal(with_cache, generate(model, ids, use_cache=False, **STRATEGIES[strategy]))
    assert with_cache[:, T:].unique().numel() > 1


def test_beams_depend_on_the_order_of_the_cache(monkeypatch):
    model, ids = build("gla"), tokens(4)
    ordered = generate(model, ids, **STRATEGIES["beams"])
    monkeypatch.setattr(HeadraceCache, "reorder_cache", lambda self, beam_idx: None)
    assert not torch.equal(generate(model, ids, **STRATEGIES["beams"]), ordered)


@pytest.mark.parametrize("strategy", ["greedy", "beams"])
def test_a_padded_prompt_generates_what_it_does_alone(model, strategy):
    short, long = tokens(1, 3), tokens(1, 7)
    together = torch.cat([F.pad(short, (4, 0), value=5), long])
    mask = torch.tensor([[0] * 4 + [1] * 3, [1] * 7])
    out = generate(model, together, attention_mask=mask, **STRATEGIES[strategy])
    assert torch.equal(out[0, 7:], generate(model, short, **STRATEGIES[strategy])[0, 3:])
    assert torch.equal(out[1, 7:], generate(model, long, **STRATEGIES[strategy])[0, 7:])


def test_a_second_turn_continues_from_the_first(model):
    """The cache of a padded first turn serves a second one; also when its rows are multiplied."""
    ids, mask = tokens(2), torch.ones(2, T, dtype=torch.long)
    mask[0, :3] = 0
    first = generate(model, ids, attention_mask=mask, return_dict_in_generate=True)
    cache, so_far = first.past_key_values, first.sequences
    assert cache.get_seq_length() == so_far.shape[1] - 1
    ids = torch.cat([so_far, tokens(2, 4)], 1)
    mask = F.pad(mask, (0, ids.shape[1] - T), value=1)
    cache.batch_repeat_interleave(2)
    options = {"attention_mask": mask, **STRATEGIES["sampling"], "num_return_sequences": 2}
    continued = generate(model, ids, past_key_values=cache, **options)
    assert torch.equal(continued, generate(model, ids, **options))


def test_other_ways_into_generate():
    model, ids = build("hybrid"), tokens(2)
    expected = generate(model, ids)
    assert torch.equal(generate(model, ids, prefill_chunk_size=4), expected)
    embedded = model.get_input_embeddings()(ids)
    assert torch.equal(generate(model, None, inputs_embeds=embedded), expected[:, T:])
    with pytest.raises(InputError, match="cache_implementation='static' is not available"):
        generate(model, ids, cache_implementation="static")


# --- padding and packs ------------------------------------------------------------------------------------------------

MASKS = {
    "left": [[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9],
    "right": [[1, 1, 1, 1, 0, 0, 0, 0, 0], [1] * 9],
    "middle": [[1, 1, 0, 1, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 0, 0]],
}


@pytest.mark.parametrize("side", MASKS)
@torch.no_grad()
def test_padding_changes_nothing(model, side):
    """Logits and what comes after, in turns of 9, 2, 1 and 1 columns with padding: as each row's own tokens alone."""
    later = torch.tensor([[0, 1, 0, 1], [1, 0, 1, 1]])
    mask, ids = torch.cat([torch.tensor(MASKS[side]), later], 1), tokens(2, T + 4)
    cache, logits, end = HeadraceCache(), [], 0
    for piece in ids.split([T, 2, 1, 1], 1):
        end += piece.shape[1]
        logits.append(model(piece, attention_mask=mask[:, :end], past_key_values=cache).logits)
    for row, kept in enumerate(mask.bool()):
        close(torch.cat(logits, 1)[row, kept], model(ids[row, kept][None]).logits[0])


@torch.no_grad()
def test_a_pack_is_its_sequences(model):
    lengths = [4, 1, 4]
    ids, last = tokens(1), tokens(3, 1)
    ends = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    packed = model(ids, cu_seqlens=ends)
    after = model(last, past_key_values=packed.past_key_values).logits
    pieces = zip(ids[0].split(lengths), packed.logits[0].split(lengths), last, after, strict=True)
    for sequence, logits, one_more, its_logits in pieces:
        alone = model(torch.cat([sequence, one_more])[None]).logits[0]
        close(torch.cat([logits, its_logits]), alone)


# --- training -----------------------------------------------------------------------------------------------------


def gradients(model, ids):
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")  # its successor's name is new
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_gradient(model, reentrant):
    ids = tokens(2)
    model.train()
    kept = gradients(model, ids)
    calls = []
    for layer in model.model.backbone.layers:
        layer.mixer.register_forward_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    again = gradients(model, ids)
    assert len(calls) == 2 * len(model.model.backbone.layers), "nothing was computed again"
    for name, gradient in kept.items():
        assert torch.equal(again[name], gradient), name


def test_losses():
    model, ids = build("gla"), tokens(2)
    labels = ids.clone()
    labels[0, :4] = -100
    out = model(ids, labels=labels)
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum")
    count = (labels[:, 1:] != -100).sum()
    close(out.loss, expected / count, 1e-6)
    close(model(ids, labels=labels, num_items_in_batch=torch.tensor(7)).loss, expected / 7, 1e-6)
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    close(model(ids, shift_labels=shifted).loss, out.loss)
    with pytest.raises(TypeError, match="unexpected argument 'label'"):
        model(ids, label=labels)


def test_outputs():
    model, ids = build("hybrid"), tokens(2)
    out = model(ids, output_hidden_states=True)
    assert [h.shape for h in out.hidden_states] == [(2, T, SIZES["hidden_size"])] * 3
    close(model.lm_head(out.hidden_states[-1]), out.logits)
    close(model(ids, logits_to_keep=2).logits, out.logits[:, -2:])
    close(model(ids, logits_to_keep=torch.tensor([1, 4])).logits, out.logits[:, [1, 4]])
    close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, out.logits)
    assert torch.equal(model(ids, return_dict=False)[0], out.logits)
    assert model.train()(ids).past_key_values is None
    for wrong in ({}, {"input_ids": ids, "inputs_embeds": out.hidden_states[0]}):
        with pytest.raises(InputError, match="either input_ids or inputs_embeds"):
            model(**wrong)
    with pytest.raises(InputError, match="no attention maps"):
        model(ids, output_attentions=True)


# --- beginnings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.LINEAR)
def test_a_softmax_version_begins_as_its_backbone(name):
    """Gates draw no random numbers and begin at exactly 1: every other weight and every logit is as it was."""
    models = []
    for mixer in (name, f"softmax-{name}"):
        torch.manual_seed(3)
        models.append(HeadraceForCausalLM(config(mixer, num_heads=2 if name == "gla" else 4)).eval())
    plain, gated = (m.state_dict() for m in models)
    for key in plain:
        assert torch.equal(plain[key], gated[key]), key
    new = gated.keys() - plain.keys()
    assert len(new) == 4
    assert all("competition" in key and not gated[key].any() for key in new)
    ids = tokens(2)
    assert torch.equal(models[0](ids).logits, models[1](ids).logits)


def test_initial_values():
    model = HeadraceForCausalLM(config("mamba2", hidden_size=128, initializer_range=0.05))
    mixer = model.model.backbone.layers[0].mixer
    for weight in (mixer.q_proj.weight, model.get_input_embeddings().weight):
        assert abs(weight.std().item() - 0.05) < 0.005
    assert mixer.conv.weight.std() > 0.2
    assert mixer.norm_weight.eq(1).all()
    assert all(p.is_leaf and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", zoo.names())
def test_every_parameter_has_an_initial_value(name):
    """Also in storage that was never written: how a model begins that was built on the meta device."""
    with torch.device("meta"):
        model = HeadraceForCausalLM(config(name))
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.constant_(p, torch.nan)
    for module in model.modules():
        module._is_hf_initialized = False
    model.init_weights()
    assert [name for name, p in model.named_parameters() if not p.isfinite().all()] == []


def test_buffers_that_are_not_saved_are_made_again(tmp_path):
    """transformers builds a model without storage: what is not in the checkpoint is whatever was in memory, unless
    `reset_parameters` sets it. And it must set nothing that was loaded."""

    class Table(SelfInitialised):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.empty(1000), persistent=False)
            self.weight = nn.Parameter(torch.empty(3))
            self.reset_parameters()

        def reset_parameters(self):
            self.table.copy_(torch.arange(1000))
            nn.init.zeros_(self.weight)

    class Model(HeadracePreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.part = Table()
            self.post_init()

    model = Model(config("gla"))
    nn.init.ones_(model.part.weight)
    model.save_pretrained(tmp_path)
    part = Model.from_pretrained(tmp_path).part
    assert torch.equal(part.table, torch.arange(1000.0))
    assert part.weight.eq(1).all()


# --- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mixer", [*zoo.names(), "hybrid"])
def test_save_and_load_to_the_bit(tmp_path, mixer, dtype):
    model = build(mixer).to(dtype)
    model.save_pretrained(tmp_path)
    again, ids = load(tmp_path), tokens(2)
    assert again.dtype == dtype
    assert not again.training
    assert again.config.mixers == model.config.mixers
    assert all(torch.equal(x, again.state_dict()[key]) for key, x in model.state_dict().items())
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_one_tensor_and_saved_once(tmp_path, tied):
    build("gla", tie_word_embeddings=tied).save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied
    again = load(tmp_path)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied


def test_gates_can_be_added_to_a_trained_backbone(tmp_path):
    build("gated-deltanet").save_pretrained(tmp_path)
    gated = HeadraceForCausalLM.from_pretrained(tmp_path, config=config("softmax-gated-deltanet"))
    ids = tokens(2)
    assert torch.equal(gated(ids).logits, load(tmp_path)(ids).logits)
    assert sum(isinstance(m, HeadCompetition) for m in gated.modules()) == 4


def test_a_checkpoint_means_what_it_meant(tmp_path, monkeypatch):
    """Whatever becomes of a name in the zoo."""
    before = config(["gla", "softmax-gla(competition.activation=sigmoid)"])
    before.save_pretrained(tmp_path)
    monkeypatch.setitem(zoo.LINEAR, "gla", zoo.LINEAR["retnet"])
    assert HeadraceConfig.from_pretrained(tmp_path).mixers == before.mixers
    assert json.loads((tmp_path / "config.json").read_text())["mixer"] == [to_json(spec) for spec in before.mixers]


def test_a_new_process_loads_it_through_the_auto_classes(tmp_path):
    model = build("hybrid")
    model.save_pretrained(tmp_path)
    ids = tokens(2)
    torch.save(ids, tmp_path / "ids.pt")
    program = """
        import sys, torch, headrace
        assert "transformers" not in sys.modules, "import headrace imports transformers"
        import headrace.hf
        from transformers import AutoModel, AutoModelForCausalLM
        folder = sys.argv[1]
        ids = torch.load(folder + "/ids.pt", weights_only=True)
        torch.save(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, folder + "/logits.pt")
        assert AutoModel.from_pretrained(folder).__class__.__name__ == "HeadraceModel"
    """
    program = "\n".join(line.strip() for line in program.splitlines())
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, env=environment, capture_output=True)
    close(torch.load(tmp_path / "logits.pt", weights_only=True), model(ids).logits)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is HeadraceForCausalLM


def without(key):
    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        del tensors[key]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return damage


def configured(**changes):
    def damage(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


DAMAGE = {
    "no folder": lambda f: [p.unlink() for p in f.iterdir()],
    "no weights": lambda f: (f / "model.safetensors").unlink(),
    "cut weights": lambda f: os.truncate(f / "model.safetensors", 5000),
    "cut header": lambda f: os.truncate(f / "model.safetensors", 4),
    "no weights in the file": lambda f: (f / "model.safetensors").write_bytes(b"x" * 999),
    "a pickle": lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
    "a tensor is missing": without("model.backbone.norm.weight"),
    "cut config": lambda f: os.truncate(f / "config.json", 100),
    "binary config": lambda f: (f / "config.json").write_bytes(b"\xff\x00"),
    "a list for config": lambda f: (f / "config.json").write_text("[]"),
    "another width": configured(hidden_size=64),
    "no width": configured(hidden_size="wide"),
    "another depth": configured(num_hidden_layers=1),
    "unknown mixer": configured(mixer={"type": "linear", "decay": {"kind": "forgetful"}}),
    "another model": configured(model_type="llama"),
    "no model": configured(model_type="headrice"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_broken_checkpoint_is_one_clear_sentence(tmp_path, damage):
    build("gla").save_pretrained(tmp_path)
    DAMAGE[damage](tmp_path)
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    sentence = str(caught.value)
    assert str(tmp_path) in sentence
    assert "\n" not in sentence
    assert len(sentence) < 400


# --- configuration ------------------------------------------------------------------------------------------------


def test_mixers_of_the_layers():
    gla, full = zoo.get("gla"), zoo.get("transformer")
    assert config(gla, num_hidden_layers=3).mixers == [gla] * 3
    assert config(to_json(gla)).mixers == [gla] * 2
    assert config(["gla", "transformer"], num_hidden_layers=4).mixers == [gla, full, gla, full]
    assert config("gla", num_attention_heads=8).num_heads == 8
    assert config("gla", mlp="none", intermediate_size=None).sizes.intermediate_size is None
    assert config("gla", intermediate_size=None).intermediate_size == 96


WRONG = {
    "mixer 'glaa' is unknown; the nearest names are": {"mixer": "glaa"},
    "mixer=3; expected a name": {"mixer": 3},
    "lists 2 mixers for num_hidden_layers=3; expected a number that divides it": {
        "mixer": ["gla", "gla"],
        "num_hidden_layers": 3,
    },
    "lists 0 mixers": {"mixer": []},
    "num_heads=5 does not divide": {"num_heads": 5},
    "num_heads=0; expected a positive integer": {"num_heads": 0},
    "hidden_size='wide'; expected a positive integer": {"hidden_size": "wide", "intermediate_size": None},
    "mlp='relu' is unknown; expected 'swiglu' or 'none'": {"mlp": "relu"},
    "mlp='none' has no width": {"mlp": "none", "intermediate_size": 3},
    "no field 'num_layers'; did you mean 'num_hidden_layers'": {"num_layers": 3},
}


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_configurations(sentence):
    with pytest.raises(InputError) as caught:
        HeadraceConfig(**{**SIZES, "mixer": "gla", **WRONG[sentence]})
    assert sentence in str(caught.value)


# --- foreign truth ------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_transformer_is_llama():
    shape = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 29}
    theirs = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=6, num_key_value_heads=2)).eval()
    for p in theirs.parameters():
        p.add_(0.2 * torch.randn_like(p))
    ours = HeadraceForCausalLM(
        HeadraceConfig(**shape, mixer=AttentionSpec(kv_heads=2), num_heads=6, tie_word_embeddings=False)
    ).eval()
    names = {
        "layers": "backbone.layers", "self_attn": "mixer", "input_layernorm": "mixer_norm",
        "post_attention_layernorm": "mlp_norm", "model.norm": "model.backbone.norm",
    }  # fmt: skip
    weights = theirs.state_dict()
    for old, new in names.items():
        weights = {key.replace(old, new): x for key, x in weights.items()}
    ours.load_state_dict(weights)
    ids = tokens(2, 40)
    expected = theirs(ids).logits
    assert ((ours(ids).logits - expected).norm() / expected.norm()).item() < 1e-5
