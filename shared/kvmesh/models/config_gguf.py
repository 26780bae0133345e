"""A model's configuration from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvmesh.models.architectures import architecture_of
from kvmesh.models.checkpoint import open_gguf
from kvmesh.models.config_keys import Keys, local_layers, positive, unsupported_rope
from kvmesh.models.errors import ModelError
from kvmesh.models.gguf_file import GgufFile
from kvmesh.models.model_config import Activation, ModelConfig, RopeConfig

__all__ = ["config_of_gguf"]

_GGML_F32 = 0
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


class _Family(NamedTuple):
    """What llama.cpp knows of an architecture and does not write into its files."""

    activation: Activation = "silu"
    local_period: int = 1
    """Every so-many-th layer attends to all tokens, the others to a window; 1: no layer differs from the others."""
    local_rope_theta: float | None = None
    attention_soft_cap: float = 0.0
    logits_soft_cap: float = 0.0
    wide_query_layers: int = 0
    """The size whose scores are scaled by the hidden width of a head, not by ``head_dim``, told by its layers."""


_FAMILIES = {
    "gemma2": _Family("gelu_tanh", 2, None, 50.0, 30.0, wide_query_layers=46),
    "gemma3": _Family("gelu_tanh", 6, 10_000.0, wide_query_layers=62),
}


def config_of_gguf(path: Path) -> ModelConfig:
    """The configuration of the GGUF file at ``path``.

    Raises:
        ModelError: the file is damaged, or the model needs something that is not supported.
    """
    file = open_gguf(path)
    name = file.metadata.get("general.architecture", "")
    architecture = architecture_of(name)
    family = _FAMILIES.get(architecture.name, _Family())
    keys = Keys(file.metadata, str(file.path))
    hidden, heads = keys.get(f"{name}.embedding_length", int), keys.get(f"{name}.attention.head_count", int)
    layers = keys.get(f"{name}.block_count", int)
    head_dim = keys.get(f"{name}.attention.key_length", int, hidden // heads)
    if (value_dim := keys.get(f"{name}.attention.value_length", int, head_dim)) != head_dim:
        raise ModelError(f"{file.path} has keys of {head_dim} and values of {value_dim} elements; they must be alike.")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} lacks the tensor token_embd.weight.")
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    local_rope = (
        None
        if family.local_rope_theta is None
        else RopeConfig(keys.get(f"{name}.rope.freq_base_swa", float, family.local_rope_theta), head_dim)
    )
    query_width = hidden // heads if layers == family.wide_query_layers else head_dim
    return ModelConfig(
        architecture=architecture.name,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        ffn_size=keys.get(f"{name}.feed_forward_length", int),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys.get(f"{name}.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        rope=_rope(file, keys, name, head_dim),
        rms_norm_eps=keys.get(f"{name}.attention.layer_norm_rms_epsilon", float),
        max_seq_len=keys.get(f"{name}.context_length", int),
        tie_word_embeddings="output.weight" not in file.tensors,
        windows=_windows(keys, name, layers, family),
        attention_scale=keys.get(f"{name}.attention.scale", float, query_width**-0.5),
        eos_token_ids=frozenset(int(file.metadata[key]) for key in _EOS_KEYS if key in file.metadata),
        bos_token_id=None if bos is None else int(bos),
        local_rope=local_rope,
        activation=family.activation,
        attention_soft_cap=keys.get(f"{name}.attn_logit_softcapping", float, family.attention_soft_cap),
        logits_soft_cap=keys.get(f"{name}.final_logit_softcapping", float, family.logits_soft_cap),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
    )


def _windows(keys: Keys, name: str, layers: int, family: _Family) -> tuple[int | None, ...]:
    if family.local_period == 1:
        window = keys.get(f"{name}.attention.sliding_window", int, 0) or None
        return (window,) * layers
    window = keys.get(f"{name}.attention.sliding_window", positive)
    local = keys.get(
        f"{name}.attention.sliding_window_pattern", _pattern(layers), local_layers(layers, family.local_period)
    )
    return tuple(window if is_local else None for is_local in local)


def _pattern(layers: int) -> Callable[[Any], tuple[bool, ...]]:
    """Reads a period, or whether each layer is local."""

    def read(value: Any) -> tuple[bool, ...]:
        if isinstance(value, int):
            return local_layers(layers, positive(value))
        local = tuple(bool(entry) for entry in value)
        if len(local) != layers:
            raise ValueError("one entry for each layer is needed")
        return local

    return read


def _rope(file: GgufFile, keys: Keys, name: str, head_dim: int) -> RopeConfig:
    theta = keys.get(f"{name}.rope.freq_base", float, 10_000.0)
    rotary_dim = keys.get(f"{name}.rope.dimension_count", int, head_dim)
    kind = keys.get(f"{name}.rope.scaling.type", str, "none")
    divisors = file.tensors.get("rope_freqs.weight")
    if divisors is not None:
        if divisors.type != _GGML_F32 or divisors.shape != (rotary_dim // 2,):
            raise ModelError(f"{file.path} has rope_freqs.weight of an unexpected type or shape.")
        values = file.bytes_of(divisors, 4 * divisors.num_elements).view("<f4")
        return RopeConfig(theta, rotary_dim, "divisors", divisors=tuple(values.astype(np.float64).tolist()))
    if kind == "none":
        return RopeConfig(theta, rotary_dim)
    if kind == "linear":
        return RopeConfig(theta, rotary_dim, "linear", factor=keys.get(f"{name}.rope.scaling.factor", float))
    raise unsupported_rope(kind)
