"""Checkpoints of transformers as others release them: small, of random weights, with a tokenizer of bytes."""

from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from families import delta, hybrid, recurrent
from headrace.data.tokenizer import byte_level
from tiny import perturbed, saved

FAMILIES = recurrent.FAMILIES | delta.FAMILIES | hybrid.FAMILIES
# Between them: experts, dense MLPs, gated and latent attention, norms of the branches' outputs, tied weights, no MLP.
HYBRIDS = {
    "qwen3_next": {}, "qwen3_5_text": {"tie_word_embeddings": True}, "kimi_linear": {}, "olmo_hybrid": {}, "mamba2": {},
}  # fmt: skip
# Parallel mixers, a shared block, layers of one mixer or one MLP, linear attention with fixed decays.
OTHERS = ("falcon_h1", "zamba2", "nemotron_h", "minimax")


def release(kind, folder, **changes):
    """Writes a checkpoint of a family, and returns the folder."""
    tokenizer = byte_level()
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    config = CONFIG_MAPPING[kind](**FAMILIES[kind].base | HYBRIDS.get(kind, {}) | tokens | changes)
    return saved(perturbed(AutoModelForCausalLM.from_config(config)), folder, tokenizer)
