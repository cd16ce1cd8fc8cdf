"""Whole language models against transformers', weights copied: logits and every gradient. Styles of blocks. Models that
are converted: tests/convert/test_families.py."""

import pytest
import torch
from transformers import GPT2Config, JambaConfig, OpenAIGPTConfig, OpenAIGPTLMHeadModel, ZambaConfig, ZambaForCausalLM

from attention_layers import randomized
from headrace import HeadraceCache, HeadraceConfig, HeadraceForCausalLM, InputError
from headrace.convert import FORMATS
from headrace.layers.blocks.block import MLP, Sizes
from headrace.spec.stack import BlockStyle
from headrace.verification.verify import relative
from tiny import build, close, gradients_agree, tokens

VOCABULARY, D, H, LAYERS, T = 29, 32, 4, 2, 9
EXACT = 1e-10
IN_FLOAT32 = 1e-5  # theirs computes its norms and scans in float32: over seeds the gradients are at most 2e-6 apart
SIZES = {"vocab_size": VOCABULARY, "hidden_size": D, "num_heads": H, "num_hidden_layers": LAYERS}
BIASED = "transformer(rotary=false, bias=true)"


def ours(mixer, **settings):
    return HeadraceForCausalLM(HeadraceConfig(mixer=mixer, **SIZES | settings)).eval()


def agree(ours, theirs, names, tolerance):
    """In float64. names: of each of our parameters (and where they are stacked or turned, how) from theirs. Ours are
    set from theirs; logits agree, and so do the gradients, carried over by the same names."""
    theirs, ours = theirs.double(), ours.double()
    values = dict(theirs.named_parameters())
    ids = torch.randint(VOCABULARY, (2, T))
    logits = theirs(ids).logits
    weight = torch.randn_like(logits)
    (logits * weight).sum().backward()
    expected = names({name: p.grad for name, p in values.items()})
    ours.load_state_dict(names({name: p.detach() for name, p in values.items()}), strict=True)
    actual = ours(ids).logits
    (actual * weight).sum().backward()
    assert relative(actual, logits) <= tolerance
    gradients_agree({name: p.grad for name, p in ours.named_parameters()}, expected, tolerance)


NAMED = {
    "gpt": GPT2Config(vocab_size=VOCABULARY, n_embd=D, n_layer=LAYERS, n_head=H),
    "jamba(style.experts.count=4)": JambaConfig(
        vocab_size=VOCABULARY, hidden_size=D, intermediate_size=24, num_hidden_layers=8, num_attention_heads=H,
        num_key_value_heads=2, num_experts=4, pad_token_id=None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
@torch.no_grad()
def test_named_model_is_the_converted_one(name):
    config, ids = NAMED[name], torch.randint(VOCABULARY, (2, T))
    settings = FORMATS[config.model_type].model(config.to_dict())[0].arguments
    converted = randomized(HeadraceForCausalLM(HeadraceConfig(**settings)))
    named = ours(name, **{field: value for field, value in settings.items() if field not in ("mixer", "style")})
    named.load_state_dict(converted.state_dict())
    close(named(ids).logits, converted(ids).logits)


# --- GPT -------------------------------------------------------------------------------------------------------------


def renamed(path, rules):
    for old, new in rules.items():
        path = path.replace(old, new)
    return path


def from_gpt(theirs):
    """GPT's parameters under our names: its matrices are [in, out], and q, k and v are one of them."""
    mine, rules = {}, {
        "transformer.h": "model.backbone.layers", "transformer.tokens_embed": "model.embed_tokens",
        "transformer.positions_embed": "model.backbone.positions.table", "ln_1": "mixer_norm", "ln_2": "mlp_norm",
        "attn.c_proj": "mixer.o_proj", "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj",
    }  # fmt: skip
    for path, value in theirs.items():
        path = renamed(path, rules)
        value = value.mT if value.dim() == 2 and ".layers." in path else value
        if "attn.c_attn" in path:
            parts = zip("qkv", value.chunk(3), strict=True)
            mine |= {path.replace("attn.c_attn", f"mixer.{name}_proj"): part for name, part in parts}
        else:
            mine[path] = value
    mine["lm_head.weight"] = mine["model.embed_tokens.weight"]
    return mine


def test_post_norm_gpt_equals_the_first_gpt():
    sizes = {"n_positions": 12, "n_embd": D, "n_layer": LAYERS, "n_head": H}
    theirs = randomized(OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=VOCABULARY, **sizes)))
    gpt = ours("gpt(style.order=post)", max_position_embeddings=12, norm_eps=1e-5)
    agree(gpt, theirs, from_gpt, EXACT)


# --- hybrids ---------------------------------------------------------------------------------------------------------


def from_zamba(theirs):
    """Their shared block is the first one's; x and z of a Mamba layer alternate, ours come one after the other."""
    mine, rules = {}, {
        "model.layers": "model.backbone.layers", "final_layernorm": "backbone.norm", ".mamba_decoder.": ".",
        "input_layernorm": "mixer_norm", "pre_ff_layernorm": "mlp_norm", "self_attn": "mixer", "feed_forward": "mlp",
        "layers.2.shared_transf": "shared", ".linear.": ".link.", "mamba.conv1d": "mixer.conv", "mamba.D": "mixer.skip",
        "mamba.dt_proj_": "mixer.dt_", "mamba.x_proj_": "mixer.x_proj.", "mamba.": "mixer.",
    }  # fmt: skip
    for path, value in theirs.items():
        path, value = renamed(path, rules), value.squeeze(0)  # a head of Mamba
        value = value.mT if path.endswith("A_log") else value
        mine[path] = torch.cat([value[::2], value[1::2]]) if path.endswith("in_proj.weight") else value
    mine["lm_head.weight"] = mine["model.embed_tokens.weight"]
    return mine


def test_zamba_equals_transformers():
    kinds = ["hybrid" if i % 6 == 2 else "mamba" for i in range(12)]
    config = ZambaConfig(
        vocab_size=VOCABULARY, hidden_size=D, intermediate_size=24, num_hidden_layers=12, num_attention_heads=H,
        num_key_value_heads=H, layers_block_type=kinds, n_mamba_heads=1, pad_token_id=None, rms_norm_eps=1e-6,
    )  # fmt: skip
    theirs = randomized(ZambaForCausalLM(config))
    agree(ours("zamba", num_hidden_layers=12, intermediate_size=24), theirs, from_zamba, IN_FLOAT32)


# --- positions -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_positions_beyond_the_table_are_refused():
    gpt = build("gpt", max_position_embeddings=8)
    cache = HeadraceCache()
    gpt(tokens(2, 6), past_key_values=cache)
    gpt(tokens(2, 2), past_key_values=cache)
    for call in (lambda: gpt(tokens(1, 9)), lambda: gpt(tokens(2, 1), past_key_values=cache)):
        with pytest.raises(InputError, match="a sequence has 9 tokens; expected at most 8, the learned positions"):
            call()
    mask = torch.tensor([[0] * 5 + [1] * 8])
    assert gpt(tokens(1, 13), attention_mask=mask).logits.isfinite().all(), "padding takes no position"
    mask = torch.tensor([[1] * 8 + [0], [0] * 3 + [1] * 6])
    gpt(tokens(2, 8), attention_mask=mask[:, :8], past_key_values=(cache := HeadraceCache()))
    after = gpt(tokens(2, 1), attention_mask=mask, past_key_values=cache).logits
    assert after.isfinite().all(), "nor the one after all"
    assert gpt(tokens(0, 3)).logits.shape[:2] == (0, 3)


# --- styles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["swiglu", "geglu", "gelu", "gelu-tanh", "relu"])
def test_mlps_equal_their_equations(kind):
    sizes = Sizes(8, 2, 24, style=BlockStyle(mlp=kind, bias=True))
    mlp, x = MLP(sizes).double(), torch.randn(5, 8, dtype=torch.float64)
    cube = 0.044715
    functions = {
        "swiglu": lambda z: z / (1 + (-z).exp()),
        "gelu": lambda z: z * (1 + (z / 2**0.5).erf()) / 2,
        "gelu-tanh": lambda z: z * (1 + ((2 / torch.pi) ** 0.5 * (z + cube * z**3)).tanh()) / 2,
        "relu": lambda z: z * (z > 0),
    }
    f = functions[kind.replace("geglu", "gelu")]
    up = x @ mlp.up_proj.weight.T + mlp.up_proj.bias
    gated = up if mlp.gate_proj is None else f(x @ mlp.gate_proj.weight.T + mlp.gate_proj.bias) * up
    hidden = gated if sizes.style.gated else f(up)
    close(mlp(x), hidden @ mlp.down_proj.weight.T + mlp.down_proj.bias)


def test_block_style_is_saved_and_checked(tmp_path):
    config = HeadraceConfig(mixer=BIASED, style=BlockStyle(order="post", mlp="relu"), **SIZES)
    config.save_pretrained(tmp_path)
    again = HeadraceConfig.from_pretrained(tmp_path)
    assert again.sizes == config.sizes
    assert (again.sizes.style, again.intermediate_size) == (BlockStyle(order="post", mlp="relu"), 4 * D)
    assert HeadraceConfig(style={"norm": "layer"}, mlp="none", **SIZES).sizes.style == BlockStyle("layer", mlp="none")
    shared = HeadraceConfig(mixer="zamba", style={"shared_count": 2}, **SIZES).stack.style  # of the zoo's, one changed
    assert shared.shared is not None and (shared.shared_count, shared.mlp) == (2, "geglu")
    for wrong in ({"order": "sideways"}, {"norms": "rms"}, "post"):
        with pytest.raises(InputError, match=r"style"):
            HeadraceConfig(style=wrong, **SIZES)
