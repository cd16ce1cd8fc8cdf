"""Log-linear Mamba-2 in the format of flash-linear-attention."""

import math

from ..spec.stack import BlockStyle
from .fields import Fields
from .flash import expanded_heads, fla, mlp_width
from .form import Format, Model, model_of
from .mamba import SILU, Mamba2, divisor
from .views import BACKBONE

LEVELS = 15  # for up to 2^14 tokens


def log_linear_mamba2(c: Fields) -> Model:
    """Blocks of a mixer and an MLP, whose width no field sets."""
    D, V, H = c["hidden_size"], c["head_dim"], expanded_heads(c)
    order = "norm-gate" if c["norm_before_gate"] else "gate-norm"
    layer = Mamba2(
        H, c["state_size"], V, divisor(c, "n_groups", H), c.count("conv_kernel", 2), c["use_conv_bias"],
        (c["use_bias"],) * 2, norm=order if c["rmsnorm"] else "none", levels=LEVELS,
    )  # fmt: skip
    norms = {name: name for name in ("mixer_norm", "mlp_norm")}
    width = mlp_width({"hidden_size": D, "hidden_ratio": 4, "intermediate_size": None})
    mixer = layer.spec(D, H), layer.views("mixer")
    return model_of(c, [mixer], BlockStyle(), norms, names=BACKBONE, num_heads=H, intermediate_size=width)


FORMATS: dict[str, Format] = {
    "log_linear_mamba2": fla(
        "LogLinearMamba2ForCausalLM", log_linear_mamba2,
        {"state_size": 128, "head_dim": 64, "expand": 2, "n_groups": 1, "conv_kernel": 4, "num_hidden_layers": 48,
         "norm_eps": 1e-5, "pad_token_id": 0, "use_bias": False, "use_conv_bias": True, "rmsnorm": True,
         "norm_before_gate": False, "D_has_hdim": False, "dt_limit": [0.0, math.inf], "residual_in_fp32": False},
        {"hidden_act": SILU, "D_has_hdim": (False,), "dt_limit": ([0.0, math.inf],), "residual_in_fp32": (False,),
         "attn": (None,)},
        "fuse_norm", "rescale_prenorm_residual", "dt_min", "dt_max", "dt_init_floor", "chunk_size", "conv_init",
        "A_init_range", "hidden_ratio", "intermediate_size", "max_position_embeddings",  # the last three: of others
    ),
}  # fmt: skip
