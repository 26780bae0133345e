"""The shape of a model as plain data, whatever the checkpoint's format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Activation", "ModelConfig", "RopeConfig", "RopeKind"]

Activation = Literal["silu", "gelu_tanh"]
RopeKind = Literal["default", "linear", "llama3", "divisors"]


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
    attention_scale: float
    """Multiplies q . k."""
    eos_token_ids: frozenset[int]
    bos_token_id: int | None = None
    local_rope: RopeConfig | None = None
    """Of the layers that have a window; None: :attr:`rope` is every layer's."""
    activation: Activation = "silu"
    """Of the gated feed-forward part."""
    attention_soft_cap: float = 0.0
    """Attention scores become ``cap * tanh(score / cap)``; 0 leaves them alone."""
    logits_soft_cap: float = 0.0
    """The same for logits."""
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

    def rope_of_layer(self, layer: int) -> RopeConfig:
        """The rotary embedding of one layer."""
        return self.rope if self.local_rope is None or self.windows[layer] is None else self.local_rope
