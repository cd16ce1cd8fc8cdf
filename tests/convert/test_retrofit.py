"""Competition for a model that is trained: the same outputs to the bit, and gates that learn."""

import pytest
import torch

from headrace import HeadraceConfig, HeadraceForCausalLM, InputError, load, zoo
from headrace.convert import export_checkpoint
from headrace.convert.retrofit import retrofit
from headrace.spec import Competition, MixerSpec
from headrace.spec.stack import BlockStyle, Decoder, Experts, Layer
from headrace.training.parameters import gate_parameters
from headrace.verification.verify import relative
from released import HYBRIDS, OTHERS, release
from tiny import covering, in_memory


def checkpoint(folder, mixer, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4}
    HeadraceForCausalLM(HeadraceConfig(mixer=mixer, **sizes | changes)).save_pretrained(folder)
    return folder


def both(folder, competition=None, dtype=torch.float32):
    ids = torch.randint(64, (2, 30), generator=torch.Generator().manual_seed(1))
    models = load(folder), retrofit(folder, competition)
    before, after = (in_memory(model.to(dtype)) for model in models)
    return before(ids).logits, after(ids).logits, after


PARALLEL = Decoder((Layer(zoo.get("gqa(kv_heads=2)"), parallel=zoo.get("gla")), Layer(zoo.get("retnet"))))


@pytest.mark.parametrize("mixer", [*covering(list(zoo.LINEAR)), "gla+sliding-window", PARALLEL])
def test_retrofit_keeps_outputs_bit_exact(tmp_path, mixer):
    before, after, model = both(checkpoint(tmp_path, mixer))
    assert torch.equal(before, after)
    assert all(not p.any() for p in gate_parameters(model)) and list(gate_parameters(model))
    assert all(spec.competition is not None for spec in model.config.mixers if isinstance(spec, MixerSpec))


@pytest.mark.parametrize("kind", [*HYBRIDS, *OTHERS])
def test_retrofit_of_a_released_model(tmp_path, kind):
    """The same logits to the bit, gates that learn, and no way back to a format without them."""
    before, after, model = both(release(kind, tmp_path))
    assert torch.equal(before, after)
    after.square().sum().backward()
    gates = list(gate_parameters(model))
    assert gates and all(not p.any() and p.grad.abs().max() > 0 for p in gates)
    with pytest.raises(InputError, match=f"--to '{kind}' cannot represent this model: no other library has"):
        export_checkpoint(model, kind, tmp_path / "back")


def test_the_router_of_a_bfloat16_checkpoint_is_not_rounded(tmp_path):
    path = checkpoint(tmp_path, Decoder((Layer(zoo.get("gla"), "experts"),), BlockStyle(experts=Experts(4, 2))))
    model = load(path)
    model.bfloat16().model.backbone.layers[0].mlp.router.float().weight.data.normal_()
    model.save_pretrained(path)
    plain, gated = (each.state_dict() for each in (load(path), retrofit(path)))
    assert plain["model.backbone.layers.0.mlp.router.weight"].dtype == torch.float32
    assert all(torch.equal(gated[name], x) and gated[name].dtype == x.dtype for name, x in plain.items())


def test_joint_gate_keeps_outputs(tmp_path):
    before, after, _ = both(checkpoint(tmp_path, "gla"), Competition(memories_per_head=2), torch.float64)
    assert relative(after, before) < 1e-10  # two memories are summed in another order


def test_saved_retrofit_loads_the_same(tmp_path):
    plain = load(checkpoint(tmp_path / "plain", "gla"))
    plain.generation_config.eos_token_id = [1, 7]  # the ends of a text and of a turn
    plain.save_pretrained(tmp_path / "plain")
    _, after, model = both(tmp_path / "plain")
    model.save_pretrained(tmp_path / "gated")
    again = in_memory(HeadraceForCausalLM.from_pretrained(tmp_path / "gated").eval())
    ids = torch.randint(64, (2, 30), generator=torch.Generator().manual_seed(1))
    assert torch.equal(again(ids).logits, after) and all(spec.competition is not None for spec in again.config.mixers)
    assert again.generation_config.eos_token_id == [1, 7]


@pytest.mark.parametrize(
    ("mixer", "competition", "message"),
    [
        ("softmax-gla", None, "has competition already"),
        ("transformer", None, "no layer of linear attention"),
        ("jamba", None, "no layer of linear attention"),
        ("gla", Competition(scale="one"), "scale='one' changes the initial outputs"),
    ],
)
def test_user_errors_are_refused(tmp_path, mixer, competition, message):
    with pytest.raises(InputError, match=message):
        retrofit(checkpoint(tmp_path, mixer), competition)
