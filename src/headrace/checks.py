"""What `linear_attention` refuses, each with a sentence. Shapes and dtypes are always looked at, values on request."""

from torch import Tensor

from .errors import InputError


def require(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)


def check_shapes(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Tensor | None], normalise: bool) -> None:
    """options: the optional tensors of `linear_attention` by name."""
    for name, x in {"q": q, "k": k, "v": v}.items():
        require(x.dim() == 4, f"{name} has shape {list(x.shape)}; expected four dimensions, [B, T, heads, ·]")
        require(x.is_floating_point(), f"{name} has dtype {x.dtype}; expected a floating-point dtype")
        require(x.dtype == q.dtype, f"{name} has dtype {x.dtype} and q has {q.dtype}; expected the same")
        require(x.device == q.device, f"{name} is on {x.device} and q on {q.device}; expected the same")
    (B, T, H, V), (Hq, K) = v.shape, k.shape[2:]
    require(T > 0, f"v has shape {list(v.shape)}; expected at least one token")
    require(k.shape[:2] == v.shape[:2], f"k has shape {list(k.shape)}; expected [B, T] = {[B, T]} as v has")
    require(q.shape == k.shape, f"q has shape {list(q.shape)}; expected that of k, {list(k.shape)}")
    require(Hq > 0 and H % Hq == 0, f"q and k have {Hq} heads; expected a number that divides v's {H}")
    cu_seqlens = options.get("cu_seqlens")
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    expected = {
        "log_decay": [[H], [B, T, H], [B, T, H, K]],
        "beta": [[B, T, H]],
        "read_gate": [[B, T, H]],
        "write_gate": [[B, T, H]],
        "bonus": [[H, K]],
        "initial_state": [[N, H, K, V + normalise]],
    }
    for name, given in options.items():
        if given is not None and name in expected:
            wanted = " or ".join(map(str, expected[name]))
            require(list(given.shape) in expected[name], f"{name} has shape {list(given.shape)}; expected {wanted}")
            require(given.is_floating_point(), f"{name} has dtype {given.dtype}; expected a floating-point dtype")
            require(given.device == q.device, f"{name} is on {given.device} and q on {q.device}; expected the same")
    if cu_seqlens is not None:
        require(B == 1, f"cu_seqlens packs sequences into one row; expected B=1, got B={B}")
        require(
            cu_seqlens.dim() == 1 and N >= 1 and not cu_seqlens.is_floating_point(),
            f"cu_seqlens has shape {list(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}; expected integers [N + 1]",
        )


def check_combination(rule: str, form: str, chunk_size: int | None, bonus: Tensor | None, normalise: bool) -> None:
    require(rule in ("add", "delta"), f"rule={rule!r} is unknown; expected 'add' or 'delta'")
    forms = ("chunkwise", "recurrent", "parallel")
    require(form in forms, f"form={form!r} is unknown; expected one of {', '.join(forms)}")
    require(chunk_size is None or chunk_size >= 1, f"chunk_size={chunk_size}; expected at least 1")
    require(
        rule == "add" or (bonus is None and not normalise),
        "rule='delta' has no bonus and no normaliser; expected bonus=None and normalise=False",
    )
    require(bonus is None or not normalise, "bonus and normalise=True exclude each other: z would need its own bonus")


def check_values(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Tensor | None], rule: str, normalise: bool
) -> None:
    tensors = {"q": q, "k": k, "v": v, **{name: x for name, x in options.items() if x is not None}}
    tensors = {name: x.detach() for name, x in tensors.items()}
    cu_seqlens = tensors.pop("cu_seqlens", None)
    for name, x in tensors.items():
        require(not bool(x.isnan().any()), f"{name} contains NaN; expected finite numbers")
        require(bool(x.isfinite().all()), f"{name} contains an infinity; expected finite numbers")
    log_decay, beta = tensors.get("log_decay"), tensors.get("beta")
    if log_decay is not None:
        require(bool((log_decay <= 0).all()), f"log_decay reaches {log_decay.max():.4g}; expected values ≤ 0")
    if beta is not None:
        require(bool((beta >= 0).all()), f"beta reaches {beta.min():.4g}; expected values ≥ 0")
    if rule == "delta":
        norms = tensors["k"].square().sum(-1).repeat_interleave(v.shape[2] // k.shape[2], 2)
        strength = float((norms if beta is None else norms * beta).max())
        require(strength <= 2 * (1 + 1e-5), f"β‖k‖² reaches {strength:.4g}; expected ≤ 2, else rule='delta' diverges")
    for name in ("q", "k") if normalise else ():
        least = float(tensors[name].min())
        require(least >= 0, f"{name} reaches {least:.4g} with normalise=True; expected values ≥ 0")
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        require(
            ends[0] == 0 and ends[-1] == v.shape[1] and ends == sorted(ends),
            f"cu_seqlens={ends}; expected 0 = c_0 ≤ … ≤ c_N = T = {v.shape[1]}",
        )
