"""Language models with all layers on the backend "triton" against PyTorch."""

import warnings

import pytest
import torch

from headrace import GateWarning, HeadraceConfig, HeadraceForCausalLM, set_backend
from headrace.verification.verify import worst
from tiny import perturbed

NEW = 3  # tokens that are generated
ROUNDING = 16 * 2**-24  # a few roundings of float32, which any order of sums may cost


def model(mixer):
    """With no weight at its first value, many of which are zero."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GateWarning)
        made = HeadraceForCausalLM(
            HeadraceConfig(
                mixer=mixer, vocab_size=29, hidden_size=32, num_hidden_layers=1, num_heads=2, intermediate_size=24,
                initializer_range=0.02,
            )
        )  # fmt: skip
    return perturbed(made)


def outputs(made, ids, mask):
    """The loss, its gradients to all parameters, and the logits of tokens that are generated after a padded prompt."""
    loss = made.train()(ids, labels=ids, attention_mask=mask, skip_logits=True).loss
    gradients = torch.autograd.grad(loss, [p for p in made.parameters() if p.requires_grad], allow_unused=True)
    out = made.eval().generate(
        ids[:, :6], attention_mask=mask[:, :6], max_new_tokens=NEW, do_sample=False, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return out.sequences, [loss.detach(), *(g for g in gradients if g is not None), *out.logits]


# A normalizer, a bonus, and the delta rule with convolutions: test_triton.py has all combinations, and all decays.
@pytest.mark.parametrize("mixer", ["linear-attention", "rwkv6", "kda"])
def test_model_trains_and_generates_as_on_pytorch(mixer):
    """With errors of at most eight times PyTorch's own in float32, which on some processors may be next to nothing."""
    made = model(f"softmax-{mixer}")
    ids, mask = torch.randint(1, 29, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    mask[0, :3] = 0
    results = {}
    for backend in ("triton", "torch"):
        set_backend(made, backend)
        results[backend] = outputs(made, ids, mask)
    expected, exact = outputs(made.double(), ids, mask)
    errors = {name: worst(numbers, exact) for name, (_, numbers) in results.items()}
    assert all(torch.equal(tokens, expected) for tokens, _ in results.values())
    assert errors["triton"] <= max(8 * errors["torch"], ROUNDING)
