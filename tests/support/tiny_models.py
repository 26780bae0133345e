"""Random models of transformers, one of each architecture, small enough to run in milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

__all__ = ["FAMILIES", "build"]

TINY = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # the default makes logits too small to tell a bug from rounding
    "tie_word_embeddings": False,
}
TINY_GEMMA = {
    **TINY,
    "num_hidden_layers": 3,
    "head_dim": 24,
    "query_pre_attn_scalar": 40,
    "sliding_window": 7,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, TINY),
    "mistral": (MistralConfig, MistralForCausalLM, {**TINY, "sliding_window": 7}),
    # Caps near the size of what they bound, so that a missing one shows.
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {**TINY_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, {**TINY_GEMMA, "num_hidden_layers": 7}),
}


def build(family: str = "llama", **overrides: Any) -> PreTrainedModel:
    """A random model; arguments override its configuration. The same arguments give the same weights."""
    config_class, model_class, settings = FAMILIES[family]
    torch.manual_seed(5)
    config = config_class(**{**settings, **overrides})
    config._attn_implementation = "eager"  # the one that knows soft caps
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias") or "norm" in name:  # transformers starts them at 0 and 1
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
