"""A model's configuration from config.json of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvmesh.models.architectures import architecture_of
from kvmesh.models.checkpoint import int_set, read_json
from kvmesh.models.config_keys import Keys, local_layers, positive, unsupported_rope
from kvmesh.models.errors import ModelError
from kvmesh.models.model_config import Activation, ModelConfig, RopeConfig

__all__ = ["config_of_directory"]

_DTYPES = ("float32", "float16", "bfloat16")
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_FULL, _LOCAL = "full_attention", "sliding_attention"

_GEMMA = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "gemma2": {
        **_GEMMA,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window_pattern": 2,
    },
    "gemma3": {**_GEMMA, "rope_local_base_freq": 10_000.0, "rope_theta": 1_000_000.0, "sliding_window_pattern": 6},
}
"""By architecture: what transformers assumes where a published config.json says nothing. A null there is no silence."""


def config_of_directory(directory: Path) -> ModelConfig:
    """The configuration of the checkpoint in ``directory``.

    Raises:
        ModelError: a file is missing or damaged, or the model needs something that is not supported.
    """
    path = directory / "config.json"
    values = read_json(path)
    names = values.get("architectures") or ["(none named)"]
    architecture = architecture_of(str(names[0]))
    values = {**_DEFAULTS.get(architecture.name, {}), **values}
    keys = Keys(values, str(path))
    _refuse_unsupported(values, str(path))
    hidden, heads = keys.get("hidden_size", int), keys.get("num_attention_heads", int)
    head_dim = keys.get("head_dim", int, hidden // heads)
    max_seq_len = keys.get("max_position_embeddings", int)
    attention_bias = keys.get("attention_bias", bool, False)
    rope, local_rope = _ropes(values, keys, head_dim, max_seq_len)
    generation = read_json(directory / "generation_config.json", required=False)
    bos = values.get("bos_token_id")
    return ModelConfig(
        architecture=architecture.name,
        vocab_size=keys.get("vocab_size", int),
        hidden_size=hidden,
        ffn_size=keys.get("intermediate_size", int),
        num_layers=keys.get("num_hidden_layers", int),
        num_heads=heads,
        num_kv_heads=keys.get("num_key_value_heads", int, heads),
        head_dim=head_dim,
        rope=rope,
        rms_norm_eps=keys.get("rms_norm_eps", float),
        max_seq_len=max_seq_len,
        tie_word_embeddings=keys.get("tie_word_embeddings", bool, False),
        windows=_windows(architecture.name, values, keys),
        attention_scale=keys.get("query_pre_attn_scalar", float, float(head_dim)) ** -0.5,
        eos_token_ids=int_set(generation.get("eos_token_id")) or int_set(values.get("eos_token_id")),
        bos_token_id=bos if isinstance(bos, int) else None,
        local_rope=local_rope,
        activation=_activation(keys),
        attention_soft_cap=keys.get("attn_logit_softcapping", float, 0.0),
        logits_soft_cap=keys.get("final_logit_softcapping", float, 0.0),
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=keys.get("mlp_bias", bool, False),
        dtype=_dtype(values, str(path)),
    )


def _refuse_unsupported(values: Mapping[str, Any], where: str) -> None:
    if values.get("quantization_config") is not None:
        raise ModelError(f"{where} has a quantization_config; quantised checkpoints are read from GGUF only.")
    if values.get("use_bidirectional_attention"):
        raise ModelError(f"{where} has use_bidirectional_attention; only causal attention is supported.")


def _dtype(values: Mapping[str, Any], where: str) -> str:
    dtype = values.get("dtype") or values.get("torch_dtype") or "float32"
    if dtype not in _DTYPES:
        raise ModelError(f"{where} has dtype {dtype!r}; supported: {', '.join(_DTYPES)}.")
    return str(dtype)


def _activation(keys: Keys) -> Activation:
    # Gemma's files have both names; the newer one is what counts there, and no other family has it.
    name = keys.get("hidden_activation", str, keys.get("hidden_act", str, "silu"))
    if name not in _ACTIVATIONS:
        raise ModelError(f"{keys.where} uses the activation {name!r}; supported: {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]


def _windows(architecture: str, values: Mapping[str, Any], keys: Keys) -> tuple[int | None, ...]:
    """Llama has no windows, Mistral one for all layers or none, Gemma layers of both kinds."""
    layers = keys.get("num_hidden_layers", int)
    if architecture == "llama":
        return (None,) * layers
    if architecture == "mistral":
        return (keys.get("sliding_window", int, 0) or None,) * layers
    window = keys.get("sliding_window", positive)
    kinds = values.get("layer_types")
    if kinds is None:
        local = local_layers(layers, keys.get("sliding_window_pattern", positive))
        return tuple(window if is_local else None for is_local in local)
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {_FULL, _LOCAL}:
        raise ModelError(f"{keys.where} must name {_FULL} or {_LOCAL} for each of its {layers} layers in layer_types.")
    return tuple(window if kind == _LOCAL else None for kind in kinds)


def _ropes(
    values: Mapping[str, Any], keys: Keys, head_dim: int, max_seq_len: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary embedding of all layers, or of those without and with a window.

    transformers 5 writes ``rope_parameters``, by kind of layer where the kinds differ; earlier versions
    ``rope_scaling`` beside ``rope_theta``, and ``rope_local_base_freq`` for layers with a window.
    """
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = values.get("rope_theta")
    if "rope_local_base_freq" not in values:
        return _rope({"rope_theta": theta, **scaling}, keys.where, head_dim, max_seq_len), None
    by_kind = _FULL in scaling or _LOCAL in scaling
    whole = (scaling.get(_FULL) or {}) if by_kind else scaling
    local = (scaling.get(_LOCAL) or {}) if by_kind else {}
    local_theta = values["rope_local_base_freq"]
    return (
        _rope({"rope_theta": theta, **whole}, keys.where, head_dim, max_seq_len),
        _rope({"rope_theta": local_theta, **local}, keys.where, head_dim, max_seq_len),
    )


def _rope(values: Mapping[str, Any], where: str, head_dim: int, max_seq_len: int) -> RopeConfig:
    keys = Keys(values, f"{where} (rope)")
    theta = keys.get("rope_theta", float, 10_000.0)
    rotary_dim = int(head_dim * keys.get("partial_rotary_factor", float, 1.0))
    kind = keys.get("rope_type", str, keys.get("type", str, "default"))
    if kind == "default":
        return RopeConfig(theta, rotary_dim)
    if kind == "linear":
        return RopeConfig(theta, rotary_dim, "linear", factor=keys.get("factor", float))
    if kind != "llama3":
        raise unsupported_rope(kind)
    return RopeConfig(
        theta,
        rotary_dim,
        "llama3",
        factor=keys.get("factor", float),
        low_freq_factor=keys.get("low_freq_factor", float),
        high_freq_factor=keys.get("high_freq_factor", float),
        original_max_seq_len=keys.get("original_max_position_embeddings", int, max_seq_len),
    )
