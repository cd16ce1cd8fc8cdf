"""Blocks of other people's models: orders of norms, parallel mixers, MLPs, routers, shared blocks, scales.

Each against transformers' own module or the literal computation, in float64.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import FalconH1Config, KimiLinearConfig, NemotronHConfig, Qwen3NextConfig, RwkvConfig, Zamba2Config
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.granitemoehybrid.configuration_granitemoehybrid import GraniteMoeHybridConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMLP, GraniteMoeHybridMoE
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearMoE
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMLP, NemotronHMoE
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock
from transformers.models.rwkv.modeling_rwkv import RwkvFeedForward
from transformers.models.zamba2.modeling_zamba2 import Zamba2AttentionDecoderLayer

from headrace import zoo
from headrace.convert.retrofit import retrofit
from headrace.export.graph import check_exportable
from headrace.layers.blocks.block import Adapters, Block, Shared, Sizes, build_mlp
from headrace.layers.blocks.moe import shares_of, within_groups
from headrace.spec.attention import AttentionSpec
from headrace.spec.stack import BlockStyle, Decoder, Experts, Layer
from headrace.studies.inspect.recorder import record
from headrace.utils.errors import InputError
from tiny import MIXERS, build, close, gradients_agree, tokens

D, W, T = 8, 6, 9
GLA = zoo.get("gla")


def randomized(module):
    for value in module.state_dict().values():
        if value.is_floating_point():
            nn.init.normal_(value)
    return module.double().eval()


def sample(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def mlp(kind="one", width=W, **style):
    return build_mlp(kind, Sizes(D, 2, width, style=BlockStyle(**style))).double().eval()


def agree(ours, theirs, names, x):
    """Outputs and all gradients. names: from a dict of their tensors to one of ours."""
    ours.load_state_dict(names(dict(theirs.state_dict())), strict=True)
    (y, z) = (ours(x), theirs(x))
    close(y, z)
    weight = torch.randn_like(z)
    mine, their = dict(ours.named_parameters()), dict(theirs.named_parameters())
    gradients = torch.autograd.grad((z * weight).sum(), [x, *their.values()])
    expected = names(dict(zip(their, gradients[1:], strict=True)))
    actual = torch.autograd.grad((y * weight).sum(), [x, *mine.values()])
    gradients_agree(dict(zip(mine, actual[1:], strict=True)), expected, 1e-10)
    close(actual[0], gradients[0])


def renamed(rules):
    """Ours from theirs: parts of names replaced in turn, those that are not ours left out."""

    def names(theirs):
        ours = {}
        for name, value in theirs.items():
            for old, new in rules.items():
                name = name.replace(old, new)
            if "DROP" not in name:
                ours[name] = value
        return ours

    return names


# --- orders of norms, parallel mixers --------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("order", ["pre", "post", "branch"])
def test_order_of_norms_equals_its_equation(order, own):
    style = BlockStyle() if own else BlockStyle(order=order)
    layer = Layer(GLA, parallel=zoo.get("mamba2"), order=order if own else None)
    block, x = randomized(Block(layer, Sizes(D, 2, W, style=style))), sample(2, T, D)
    n, m = block.mixer_norm, block.mlp_norm
    both = lambda u: block.mixer(u)[0] + block.parallel(u)[0]  # noqa: E731
    if order == "pre":
        y = x + both(n(x))
        y = y + block.mlp(m(y))
    elif order == "post":
        y = n(x + both(x))
        y = m(y + block.mlp(y))
    else:
        y = x + n(both(x))
        y = y + m(block.mlp(y))
    states = []
    close(block(x, next_states=states), y)
    assert [type(state).__name__ for state in states] == ["MixerState", "MixerState"]


# --- MLPs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_mlps_equal_transformers(bias):
    config = FalconH1Config(hidden_size=D, intermediate_size=W, mlp_bias=bias, hidden_act="gelu_pytorch_tanh",
                            mlp_multipliers=[1.0, 1.0])  # fmt: skip
    agree(mlp(mlp="geglu-tanh", bias=bias), randomized(FalconH1MLP(config)), dict, sample(2, T, D))
    config = NemotronHConfig(hidden_size=D, intermediate_size=W, mlp_bias=bias, mlp_hidden_act="relu2")
    agree(mlp(mlp="relu2", bias=bias), randomized(NemotronHMLP(config)), dict, sample(2, T, D))


CHANNEL = renamed({"time_mix_receptance": "mix.0", "time_mix_key": "mix.1", "receptance": "gate_proj",
                   "key": "up_proj", "value": "down_proj"})  # fmt: skip


def test_channel_mixing_equals_transformers():
    theirs = randomized(RwkvFeedForward(RwkvConfig(hidden_size=D, intermediate_size=W)))
    ours, x = mlp(mlp="rwkv4", norm="layer", bias=True), sample(2, T, D)

    def names(tensors):
        ours = CHANNEL(tensors)
        return ours | {"mix": torch.stack([ours.pop("mix.0").flatten(), ours.pop("mix.1").flatten()])}

    theirs.forward, forward = lambda x: forward(x)[0], theirs.forward
    ours.forward, mixed = lambda x: mixed(x)[0], ours.forward
    agree(ours, theirs, names, x)
    whole, states = mixed(x)
    first, state = mixed(x[:, :4])
    close(torch.cat([first, mixed(x[:, 4:], state)[0]], 1), whole)
    close(states.shift, x[:, -1:])


# --- mixtures of experts ---------------------------------------------------------------------------------------------

EXPERTS = {"gate_up_proj": "up", "experts.up_proj": "up", "experts.down_proj": "down", "experts.": ""}
NEMOTRON = {"gate.weight": "router.weight", "gate.e_score_correction_bias": "choice_bias", "fc1_latent_proj": "inner",
            "fc2_latent_proj": "outer", "shared_experts.": "shared/", **EXPERTS, "shared/": "shared."}  # fmt: skip
KIMI = {"gate.weight": "router.weight", "gate.e_score_correction_bias": "choice_bias",
        "shared_experts.": "shared/", **EXPERTS, "shared/": "shared."}  # fmt: skip
QWEN = {"shared_expert_gate.weight": "shared_gate/", "gate.weight": "router.weight", "shared_expert.": "shared/",
        **EXPERTS, "shared/": "shared.", "shared_gate/": "shared_gate.weight"}  # fmt: skip
GROUPS = {"scores": "sigmoid", "biased": True, "groups": 4, "chosen_groups": 2, "scale": 2.5, "count": 8, "chosen": 3}
SMALL = {"hidden_size": D, "num_experts_per_tok": 3, "moe_intermediate_size": 5, "num_local_experts": 8}
ROUTED = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, **SMALL}


def nemotron(latent, bias, norm):
    config = {"moe_latent_size": latent, "mlp_bias": bias, "norm_topk_prob": norm, "mlp_hidden_act": "relu2"}
    sizes = {"moe_shared_expert_intermediate_size": 7, "n_routed_experts": 8}
    theirs = NemotronHMoE(NemotronHConfig(**ROUTED, **config, **sizes, experts_implementation="eager"))
    experts = Experts(**GROUPS, normalized=norm, width=5, shared=7, latent=latent)
    return mlp("experts", mlp="relu2", bias=bias, experts=experts), theirs, renamed(NEMOTRON)


def kimi(norm):
    config = KimiLinearConfig(**ROUTED, norm_topk_prob=norm, n_shared_experts=2, experts_implementation="eager")
    experts = Experts(**GROUPS, normalized=norm, width=5, shared=10)
    return mlp("experts", experts=experts), KimiLinearMoE(config), renamed(KIMI)


def qwen(norm):
    config = Qwen3NextConfig(**SMALL, num_experts=8, norm_topk_prob=norm, shared_expert_intermediate_size=7,
                             experts_implementation="eager")  # fmt: skip
    experts = Experts(8, 3, normalized=norm, width=5, shared=7, shared_gate=True)
    return mlp("experts", experts=experts), Qwen3NextSparseMoeBlock(config), renamed(QWEN)


class Granite(nn.Module):
    def __init__(self):
        super().__init__()
        config = GraniteMoeHybridConfig(
            hidden_size=D, num_local_experts=8, num_experts_per_tok=3, intermediate_size=5, shared_intermediate_size=7,
            experts_implementation="eager", mamba_n_heads=2, mamba_d_head=8,
        )  # fmt: skip
        self.moe, self.shared = GraniteMoeHybridMoE(config), GraniteMoeHybridMLP(config)

    def forward(self, x):
        return self.moe(x) + self.shared(x)


def granite():
    def names(theirs):
        ours = renamed({"moe.": "", "output_linear": "down_proj", **EXPERTS})(theirs)
        gate, up = ours.pop("shared.input_linear.weight").chunk(2)
        return ours | {"shared.gate_proj.weight": gate, "shared.up_proj.weight": up}

    return mlp("experts", experts=Experts(8, 3, normalized=True, width=5, shared=7)), Granite(), names


FAMILIES = {
    "nemotron": lambda: nemotron(None, False, True), "nemotron, latent": lambda: nemotron(4, True, False),
    "kimi": lambda: kimi(True), "kimi, not normalized": lambda: kimi(False), "qwen": lambda: qwen(True),
    "qwen, not normalized": lambda: qwen(False), "granite": granite,
}  # fmt: skip


class Exact(torch.overrides.TorchFunctionMode):
    """Their routers and norms compute in float32, whatever the model's precision."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.float:
            return args[0]
        if function in (torch.Tensor.type, torch.Tensor.to) and args[1:] == (torch.float32,):
            return args[0]
        if kwargs.get("dtype") is torch.float32:
            kwargs = kwargs | {"dtype": None}
        return function(*args, **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_equal_transformers(family):
    ours, theirs, names = FAMILIES[family]()
    with Exact():
        agree(ours, randomized(theirs), names, sample(2, T, D))


def test_groups_without_choice_are_minus_infinity():
    merits = torch.tensor([5.0, 0.0, 3.0, 3.0, 4.0, 1.5])
    kept = within_groups(merits, 3, 1)
    assert kept.isfinite().tolist() == [False, False, True, True, False, False], "two of 3 are better than 5 and 0"
    close(shares_of(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_routers_stay_in_float32(tmp_path):
    """Where the other weights are in bfloat16, in which two experts may be chosen the other way round."""
    experts = {"experts": Experts(4, 2, scores="sigmoid", biased=True)}
    model = build([Layer(GLA, "experts")], style=experts).float()
    model.model.backbone.layers[0].mlp.choice_bias.normal_()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    before, after = (m.model.backbone.layers[0].mlp for m in (model, again))
    assert torch.equal(after.choice_bias, before.choice_bias)
    assert torch.equal(after.router.weight, before.router.weight)
    x = torch.randn(1, T, 32, dtype=torch.bfloat16)
    assert torch.equal(after.route(x)[0].chosen, before.route(x.float())[0].chosen)
    assert after.up.dtype is again(tokens(1)).logits.dtype is torch.bfloat16


# --- shared blocks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention_rank", [None, 3])
def test_shared_blocks_with_adapters_equal_transformers(attention_rank):
    config = Zamba2Config(
        hidden_size=D, num_attention_heads=2, intermediate_size=W, num_hidden_layers=3, adapter_rank=3,
        layers_block_type=["hybrid"] * 3, num_mem_blocks=2, use_shared_attention_adapter=attention_rank is not None,
        attn_implementation="eager",
    )  # fmt: skip
    theirs = randomized(Zamba2AttentionDecoderLayer(config, block_id=0))
    style = BlockStyle(mlp="geglu", shared=AttentionSpec(rotary=False, scale="half-key"), shared_count=2,
                       shared_mlp_rank=3, shared_attention_rank=attention_rank)  # fmt: skip
    sizes = Sizes(D, 2, W, norm_eps=1e-5, style=style)
    shared, tensors = Shared(sizes).double(), theirs.state_dict()
    gate, up = tensors["feed_forward.gate_up_proj.weight"].chunk(2)
    weights = {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up,
               "mlp.down_proj.weight": tensors["feed_forward.down_proj.weight"],
               "mixer_norm.weight": tensors["input_layernorm.weight"],
               "mlp_norm.weight": tensors["pre_ff_layernorm.weight"]}  # fmt: skip
    weights |= {f"mixer.{n}_proj.weight": tensors[f"self_attn.{n}_proj.weight"] for n in "qkvo"}
    shared.load_state_dict(weights)
    x, embedded = sample(2, T, D), sample(2, T, D)
    causal = torch.full((T, T), -torch.inf).triu(1)[None, None].double()
    for use in (0, 2):
        adapters = Adapters(sizes).double()
        own = {f"mlp.{i}.weight": tensors[f"feed_forward.gate_up_proj_adapter_list.{use}.{i}.weight"] for i in (0, 1)}
        if attention_rank is not None:
            own |= {f"attention.{n}_proj.{i}.weight": tensors[f"self_attn.linear_{n}_adapter_list.{use}.{i}.weight"]
                    for n in "qkv" for i in (0, 1)}  # fmt: skip
        adapters.load_state_dict(own)
        with Exact():
            expected = theirs(x, embedded, use, attention_mask=causal)
        close(shared(x, embedded, adapters, next_states=[]), expected)


def test_layers_use_shared_blocks_in_turn():
    style = {"shared": AttentionSpec(), "shared_count": 2, "shared_mlp_rank": 3}
    layers = [Layer(GLA, "none", shared=i > 0) for i in range(4)]
    model, ids = build(layers, num_hidden_layers=4, style=style), tokens(1)
    calls = []
    for i, block in enumerate(model.model.backbone.shared_blocks):
        block.register_forward_pre_hook(lambda m, args, i=i: calls.append(i))
    model(ids)
    assert calls == [0, 1, 0]


# --- scales ----------------------------------------------------------------------------------------------------------


def test_embeddings_are_scaled_and_logits_bounded():
    style = {"embedding_scale": 5.0, "logits_cap": 2.0}
    model, plain, ids = build("gla", style=style), build("gla"), tokens(2)
    plain.load_state_dict(model.state_dict())
    hidden = plain(inputs_embeds=5.0 * plain.model.embed_tokens(ids), output_hidden_states=True)
    expected = 2 * torch.tanh(hidden.logits / 2)
    close(model(ids).logits, expected)
    loss = F.cross_entropy(expected[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).float()
    close(model(ids, labels=ids).loss, loss, 1e-6)  # transformers' loss is in float32
    close(model(ids, labels=ids, skip_logits=True).loss, loss, 1e-6)


@torch.no_grad()
def test_generation_is_bounded_too():
    """A capped logit changes the probabilities of sampling, in the short loop and in transformers' own."""
    model, ids = build("gla", style={"logits_cap": 0.5}), tokens(1)
    settings = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    logits = torch.stack(model.generate(ids, **settings).logits)
    assert logits.abs().max() <= 0.5
    assert torch.equal(model.generate(ids, **settings).sequences, copy.deepcopy(model).generate(ids, max_new_tokens=3))


@torch.no_grad()
def test_parallel_mixers_are_known_everywhere(tmp_path):
    """inspect has a record of each under the index of its layer, retrofit adds gates beside attention, and the graph of
    ONNX, which has one state per layer, refuses both kinds of layers with more."""
    model, ids = build("parallel", tie_word_embeddings=False), tokens(1)
    records = record(model, ids)[1]
    assert [(r.layer, type(r.mixer.spec).__name__) for r in records] == [
        (0, "MixerSpec"), (0, "AttentionSpec"), (1, "MixerSpec"),
    ]  # fmt: skip
    assert zoo.plain(zoo.each_mixer(MIXERS["parallel"], zoo.compete)) == MIXERS["parallel"]
    assert [type(spec).__name__ for spec in model.config.mixers] == ["MixerSpec", "AttentionSpec", "MixerSpec"]
    model.float().save_pretrained(tmp_path)
    assert torch.equal(retrofit(tmp_path)(ids).logits, model(ids).logits)
    for name in ("parallel", "channel mixing"):
        with pytest.raises(InputError, match="several states"):
            check_exportable(build([MIXERS[name].layers[0]], style=MIXERS[name].style))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Experts(8, 2, groups=3), "experts.groups=3 for experts.count=8"),
    (lambda: Experts(8, 2, groups=8), "expected equal groups of 2 or more experts"),
    (lambda: Experts(8, 2, groups=2, chosen_groups=3), "experts.chosen_groups=3 exceeds experts.groups=2"),
    (lambda: Experts(8, 5, groups=2), "experts.chosen=5 exceeds the 4 experts of chosen_groups=1"),
    (lambda: Experts(8, 2, shared_gate=True), "experts.shared_gate=True without experts.shared"),
    (lambda: BlockStyle(mlp="rwkv4", experts=Experts()), "mlp='rwkv4' has a state"),
    (lambda: BlockStyle(shared_count=2), "shared_count=2 without a shared block"),
    (lambda: zoo.get("bert(style.mlp=rwkv4)"), "style.mlp='rwkv4' is for decoders alone"),
    (lambda: Decoder((Layer(GLA, parallel=AttentionSpec(kv_heads=3)),)).head_dims(D, 4), "kv_heads=3 does not divide"),
])  # fmt: skip
def test_contradictions_are_refused(make, message):
    with pytest.raises(InputError) as error:
        make()
    assert message in str(error.value)
