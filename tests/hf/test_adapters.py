"""LoRA adapters of PEFT on the layers of every mixer."""

import warnings

import pytest
import torch

from headrace import HeadraceForCausalLM, InputError, quantize, zoo
from headrace.convert import export_checkpoint
from headrace.convert.linearize import linearize
from headrace.verification.verify import relative
from tiny import MIXERS, config, covering, tokens, trained

peft = pytest.importorskip("peft", reason="peft is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # its old name, in peft


def adapted(name, targets, **parameters):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of gates that cannot act
        sizes = {} if name in MIXERS else {"num_hidden_layers": 1}
        model = trained(HeadraceForCausalLM(config(name, **sizes)))
        settings = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=targets, **parameters)
        return peft.get_peft_model(model, settings)


@torch.no_grad()
def logits(model, ids):
    """Of all tokens at once, and of the last one again from a cache, as generation computes it."""
    first = model(input_ids=ids[:, :-1], use_cache=True)
    last = model(input_ids=ids[:, -1:], past_key_values=first.past_key_values, use_cache=True).logits
    return torch.cat([model(input_ids=ids).logits, last], 1)


def trains(model, ids):
    model.train()(input_ids=ids, labels=ids).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.eval()
    return gradients and all(grad is not None and grad.any() for grad in gradients.values())


@pytest.mark.parametrize("name", [*covering(zoo.names()), "qwen3-next", "ling"])
def test_adapters_equal_merged_weights(name):
    """In float32 too, which takes the fast paths: a path that read a layer's weight would leave the adapter out."""
    model, ids = adapted(name, "all-linear"), tokens(2)
    assert trains(model, ids)
    with model.disable_adapter():
        plain = logits(model, ids)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-4)):  # measured: 3e-15, 2e-6
        result = logits(model.to(dtype), ids)
        assert relative(result, plain) > 1e-3
        model.merge_adapter()
        assert relative(logits(model, ids), result) <= tolerance
        model.unmerge_adapter()
    assert relative(logits(model.merge_and_unload(), ids), result) <= tolerance


@pytest.mark.parametrize(
    ("name", "parameter"), [("mamba2", "conv.weight"), ("rwkv7", "mixer.mix"), ("mamba", "mixer.A_log")]
)
@torch.no_grad()
def test_adapters_of_parameters_equal_merged_weights(name, parameter):
    """PEFT wraps the module that has the parameter, and adapts the parameter while the module runs. In float32, which
    takes the fast paths."""
    model, ids = adapted(name, [], target_parameters=[parameter]).float(), tokens(2)
    result = logits(model, ids)
    with model.disable_adapter():
        assert relative(logits(model, ids), result) > 1e-3
    assert relative(logits(model.merge_and_unload(), ids), result) <= 1e-4


@pytest.mark.parametrize("name", ["transformer", "softmax-gla", "kda", "rwkv6", "mamba", "rwkv7"])
@torch.no_grad()
def test_each_row_of_a_padded_batch_has_an_adapter_of_its_own(name):
    model, ids = adapted(name, "all-linear").eval(), tokens(3)
    model.add_adapter("other", peft.LoraConfig(r=2, init_lora_weights=False, target_modules="all-linear"))
    mask = (torch.arange(ids.shape[1]) >= torch.tensor([[0], [3], [2]])).long()
    names = ["default", "other", "__base__"]
    mixed = model(input_ids=ids, attention_mask=mask, adapter_names=names).logits
    model.set_adapter("other")
    alone = model(input_ids=ids, attention_mask=mask).logits
    assert relative(mixed[1, 3:], alone[1, 3:]) < 1e-12
    model.set_adapter("default")
    assert relative(mixed[0], model(input_ids=ids, attention_mask=mask).logits[0]) < 1e-12
    with model.disable_adapter():
        assert relative(mixed[2, 2:], model(input_ids=ids, attention_mask=mask).logits[2, 2:]) < 1e-12


def test_model_with_adapters_is_neither_quantized_linearized_nor_exported(tmp_path):
    """PEFT would merge them into a copy of the weight, and they would be lost; the weights of layers that become linear
    were taken over without them."""
    model = adapted("transformer", ["q_proj"]).get_base_model()
    for call in (lambda: quantize(adapted("gla", ["in_proj"])), lambda: linearize(model, "hedgehog")):
        with pytest.raises(InputError, match=r"has adapters; expected model\.merge_and_unload"):
            call()
    with pytest.raises(InputError, match=r"differ in .*q_proj\..*; expected neither quantized layers nor adapters"):
        export_checkpoint(model, "llama", tmp_path)


@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig"])
def test_generation_has_a_tuned_prefix_once(kind):
    """Prefix tuning gives keys and values, which only softmax attention has; the other gives embeddings."""
    model = trained(HeadraceForCausalLM(config("transformer")))
    model = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    torch.nn.init.normal_(next(model.prompt_encoder.parameters()), std=2.0)
    ids = expected = tokens(2)
    for _ in range(4):
        last = model(input_ids=expected, attention_mask=torch.ones_like(expected)).logits[:, -1:]
        expected = torch.cat([expected, last.argmax(-1)], 1)
    setting = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 4, "eos_token_id": None}
    assert torch.equal(model.generate(input_ids=ids, **setting), expected)
    with model.disable_adapter():
        assert not torch.equal(model.generate(input_ids=ids, **setting), expected)
