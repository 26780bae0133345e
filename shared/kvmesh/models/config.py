"""What a model is, read from GGUF metadata or config.json without loading weights. Never imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from kvmesh.models.architectures import architecture_of
from kvmesh.models.checkpoint import int_set, open_gguf, read_json
from kvmesh.models.errors import ModelError
from kvmesh.models.gguf_file import GgufFile
from kvmesh.models.store import ModelSource

__all__ = ["ModelConfig", "RopeConfig", "RopeKind", "read_config"]

T = TypeVar("T")
RopeKind = Literal["default", "linear", "llama3", "divisors"]
_DTYPES = ("float32", "float16", "bfloat16")
_GGML_F32 = 0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: base, rotated width and how frequencies are scaled for long contexts."""

    theta: float
    rotary_dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_seq_len: int = 0
    divisors: tuple[float, ...] = ()
    """``kind="divisors"``: one divisor per frequency, as GGUF stores Llama 3.1's scaling."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer; every size that code elsewhere derives buffers from."""

    architecture: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    rms_norm_eps: float
    max_seq_len: int
    """Longest sequence in tokens, prompt and output together."""
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]
    """Per layer: how many latest tokens (itself included) a token attends to; None is all."""
    eos_token_ids: frozenset[int]
    bos_token_id: int | None = None
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "float32"
    """Of the checkpoint's weights; ``float32`` for quantised ones, which are dequantised to it."""

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim


def read_config(source: ModelSource) -> ModelConfig:
    """The configuration of a checkpoint.

    Raises:
        ModelError: a file is missing or damaged, or the model needs something that is not supported.
    """
    config = _from_gguf(open_gguf(source.path)) if source.format == "gguf" else _from_directory(source)
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{source.path} has {config.num_heads} query heads, which {config.num_kv_heads} KV heads do not divide."
        )
    return config


class _Keys:
    """Typed access to a checkpoint's settings, with an error that names the file and the key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def get(self, key: str, kind: Callable[[Any], T], default: T | None = None) -> T:
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self._where} lacks {key!r}.")
            return default
        try:
            return kind(value)
        except (TypeError, ValueError) as error:
            raise ModelError(f"{self._where} has an unusable {key!r}: {value!r}.") from error


def _from_gguf(file: GgufFile) -> ModelConfig:
    name = file.metadata.get("general.architecture", "")
    architecture = architecture_of(name)
    keys = _Keys(file.metadata, str(file.path))
    hidden, heads = keys.get(f"{name}.embedding_length", int), keys.get(f"{name}.attention.head_count", int)
    layers = keys.get(f"{name}.block_count", int)
    head_dim = keys.get(f"{name}.attention.key_length", int, hidden // heads)
    max_seq_len = keys.get(f"{name}.context_length", int)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} lacks the tensor token_embd.weight.")
    window = keys.get(f"{name}.attention.sliding_window", int, 0) or None
    eos = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    return ModelConfig(
        architecture=architecture.name,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        ffn_size=keys.get(f"{name}.feed_forward_length", int),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys.get(f"{name}.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        rope=_gguf_rope(file, keys, name, head_dim),
        rms_norm_eps=keys.get(f"{name}.attention.layer_norm_rms_epsilon", float),
        max_seq_len=max_seq_len,
        tie_word_embeddings="output.weight" not in file.tensors,
        windows=(window,) * layers,
        eos_token_ids=frozenset(int(file.metadata[key]) for key in eos if key in file.metadata),
        bos_token_id=None if bos is None else int(bos),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
    )


def _gguf_rope(file: GgufFile, keys: _Keys, name: str, head_dim: int) -> RopeConfig:
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
    raise _unsupported_rope(kind)


def _from_directory(source: ModelSource) -> ModelConfig:
    path = source.path / "config.json"
    values = read_json(path)
    names = values.get("architectures") or ["(none named)"]
    architecture = architecture_of(str(names[0]))
    keys = _Keys(values, str(path))
    if (activation := keys.get("hidden_act", str, "silu")) not in ("silu", "swish"):
        raise ModelError(f"{path} uses the activation {activation!r}; only 'silu' is supported.")
    if values.get("quantization_config") is not None:
        raise ModelError(f"{path} has a quantization_config; quantised checkpoints are read from GGUF only.")
    hidden, heads = keys.get("hidden_size", int), keys.get("num_attention_heads", int)
    layers = keys.get("num_hidden_layers", int)
    head_dim = keys.get("head_dim", int, hidden // heads)
    max_seq_len = keys.get("max_position_embeddings", int)
    window = keys.get("sliding_window", int, 0) or None
    attention_bias = keys.get("attention_bias", bool, False)
    dtype = values.get("dtype") or values.get("torch_dtype") or "float32"
    if dtype not in _DTYPES:
        raise ModelError(f"{path} has dtype {dtype!r}; supported: {', '.join(_DTYPES)}.")
    generation = read_json(source.path / "generation_config.json", required=False)
    bos = values.get("bos_token_id")
    return ModelConfig(
        architecture=architecture.name,
        vocab_size=keys.get("vocab_size", int),
        hidden_size=hidden,
        ffn_size=keys.get("intermediate_size", int),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys.get("num_key_value_heads", int, heads),
        head_dim=head_dim,
        rope=_directory_rope(values, str(path), head_dim, max_seq_len),
        rms_norm_eps=keys.get("rms_norm_eps", float),
        max_seq_len=max_seq_len,
        tie_word_embeddings=keys.get("tie_word_embeddings", bool, False),
        windows=(window,) * layers,
        eos_token_ids=int_set(generation.get("eos_token_id")) or int_set(values.get("eos_token_id")),
        bos_token_id=bos if isinstance(bos, int) else None,
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=keys.get("mlp_bias", bool, False),
        dtype=dtype,
    )


def _directory_rope(values: Mapping[str, Any], where: str, head_dim: int, max_seq_len: int) -> RopeConfig:
    # transformers 5 writes rope_parameters; earlier versions rope_scaling beside rope_theta.
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    keys = _Keys({"rope_theta": values.get("rope_theta"), **scaling}, f"{where} (rope)")
    theta = keys.get("rope_theta", float, 10_000.0)
    rotary_dim = int(head_dim * keys.get("partial_rotary_factor", float, 1.0))
    kind = keys.get("rope_type", str, keys.get("type", str, "default"))
    if kind == "default":
        return RopeConfig(theta, rotary_dim)
    if kind == "linear":
        return RopeConfig(theta, rotary_dim, "linear", factor=keys.get("factor", float))
    if kind != "llama3":
        raise _unsupported_rope(kind)
    return RopeConfig(
        theta,
        rotary_dim,
        "llama3",
        factor=keys.get("factor", float),
        low_freq_factor=keys.get("low_freq_factor", float),
        high_freq_factor=keys.get("high_freq_factor", float),
        original_max_seq_len=keys.get("original_max_position_embeddings", int, max_seq_len),
    )


def _unsupported_rope(kind: str) -> ModelError:
    return ModelError(f"Rotary scaling {kind!r} is not supported yet; supported: default, linear, llama3.")
