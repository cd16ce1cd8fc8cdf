"""The vLLM plugin: `register` is an entry point of the group `vllm.general_plugins`."""


def register() -> None:
    """Registers headrace's language model with vLLM, and its configuration with transformers. vLLM calls this function
    in each of its processes."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, MambaModelConfig

    from ...hf import model  # noqa: F401  registers HeadraceConfig with AutoConfig

    ModelRegistry.register_model("HeadraceForCausalLM", "headrace.export.vllm.model:HeadraceForCausalLM")
    MODELS_CONFIG_MAP["HeadraceForCausalLM"] = MambaModelConfig  # a cache with one state for each sequence
