"""Decoding token by token, against the same model in float64."""

import copy

import torch

from equation import MAX_ERROR_RATIO
from headrace.hf.cache import HeadraceCache
from headrace.verification.verify import relative


def read(model, ids, **options):
    """A cache that has read tokens."""
    cache = HeadraceCache()
    model(ids, past_key_values=cache, use_cache=True, **options)
    return cache


def decoded(model, ids, first, check=True):
    """Logits [B, ·, vocabulary] of all tokens from `first` on, one by one."""
    cache, logits = read(model, ids[:, :first]), []
    for token in ids[:, first:].unbind(1):
        assert not check or model.engine.unsupported_reason(model) is None
        logits.append(model.engine.step(model, token, cache))
    assert cache.columns == ids.shape[1]
    return torch.cat(logits, 1)


def error_of_modules(model, ids):
    """The largest relative error of a token's logits in a whole forward, and the logits in float64."""
    exact = copy.deepcopy(model).double()(ids).logits
    whole = model(ids).logits
    return max(relative(a, b) for a, b in zip(whole.unbind(1), exact.unbind(1), strict=True)), exact


def is_accurate(model, ids, first=3, **options):
    error, exact = error_of_modules(model, ids)
    found = decoded(model, ids, first, **options)
    assert found.dtype is model.dtype
    ratio = 2 if model.dtype is torch.bfloat16 else MAX_ERROR_RATIO  # measured: 0.2 to 0.5, as modules round more often
    return relative(found, exact[:, first:]) <= ratio * error
