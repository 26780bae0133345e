"""Writes a model of transformers as a GGUF file, in any block format that the gguf package can quantise to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

__all__ = ["write_gguf"]

Q = gguf.GGMLQuantizationType
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def gguf_name(name: str, names: dict[str, str]) -> str:
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in fixed or name == "lm_head.weight":
        return fixed.get(name, "output.weight")
    _, _, layer, rest = name.split(".", 3)
    block, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{names[block]}.{kind}"


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's convert_hf_to_gguf.py orders q and k."""
    shape = values.shape
    return values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_gguf(path: Path, model: Any, kind: Q, *, divisors: np.ndarray | None = None, **changes: Any) -> None:
    """Write ``model``; its weights become what the quantised file means, so that logits can be compared."""
    config = model.config
    gemma = config.model_type.startswith("gemma")
    writer = gguf.GGUFWriter(path, config.model_type.removesuffix("_text"))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_eos_token_id(3)
    if gemma:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
    for add in changes.get("settings", ()):
        add(writer)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    drop, extra = changes.get("drop", ()), changes.get("extra", {})
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if gemma and "norm" in name:
            values = values + 1  # as the conversion does
        if values.ndim == 2:
            rows = gguf.quants.quantize(values, kind)
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(rows, kind).astype(np.float32)))
            stored = rows
        else:
            stored = values.astype(np.float32)
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name and not gemma:
                stored = permuted(stored, heads)
        if name not in drop:
            writer.add_tensor(
                gguf_name(name, GEMMA_NAMES if gemma else NAMES),
                np.ascontiguousarray(stored),
                raw_dtype=kind if values.ndim == 2 else None,
            )
    for name, values in extra.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
