"""Language models: a config.json in, pure functions over a plain dict of weights out.

A family is a Decoder class with `from_hf(config)` (a ModelConfig, or a ValueError that says what is not supported),
`block` (one layer, an nnx module) and `hf_names(config)` (which tensors of the files fill which weight).  Adding one is
its file and its line here."""

from __future__ import annotations

from jaxserve.models.config import ModelConfig

__all__ = ["MODELS", "ModelConfig"]

MODELS: dict[str, str] = {
    "LlamaForCausalLM": "jaxserve.models.llama:Llama",
    "MistralForCausalLM": "jaxserve.models.llama:Llama",
    "Qwen2ForCausalLM": "jaxserve.models.llama:Llama",
    "Qwen3ForCausalLM": "jaxserve.models.llama:Llama",
    "Gemma2ForCausalLM": "jaxserve.models.gemma:Gemma",
    "Gemma3ForCausalLM": "jaxserve.models.gemma:Gemma",
}
