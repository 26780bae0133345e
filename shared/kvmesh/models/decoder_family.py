"""How the families of decoders differ from their common frame, and the parameters that follow from it.

The frame is a pre-norm decoder with grouped-query attention, rotary positions and a gated feed-forward part. A family
is named by its norms and a few switches; sizes, windows, scales and caps are the configuration's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvmesh.models.model_config import ModelConfig
from kvmesh.models.parameters import ParameterSpec
from kvmesh.models.sharding import Cut, ModelShard, Span
from kvmesh.models.weights import GgufName

__all__ = ["DecoderFamily", "Norm", "decoder_cuts", "decoder_gguf_names", "decoder_parameters"]


class Norm(NamedTuple):
    """An RMS norm of a layer as checkpoints name it."""

    huggingface: str
    gguf: str


class DecoderFamily(NamedTuple):
    """What one family has that others do not."""

    attention_norm: Norm
    """Of attention's input."""
    ffn_norm: Norm
    """Of the feed-forward part's input."""
    attention_post_norm: Norm | None = None
    """Of attention's output, before it is added to the residual."""
    ffn_post_norm: Norm | None = None
    """The same for the feed-forward part."""
    q_norm: Norm | None = None
    """Of every query head, before rotation."""
    k_norm: Norm | None = None
    """Of every key head."""
    norm_offset: float = 0.0
    """Norms multiply by this and their weight; GGUF's weights have it added already."""
    scales_embedding: bool = False
    """Embeddings are multiplied by the square root of their width, rounded to the model's dtype."""
    gguf_permutes_heads: bool = False
    """GGUF has the rows of q and k in the order of interleaved rotation."""

    def norms(self, config: ModelConfig) -> dict[str, tuple[Norm, int]]:
        """A layer's norms by the name of their parameter, with their widths."""
        hidden, head = config.hidden_size, config.head_dim
        candidates = {
            "attention_norm": (self.attention_norm, hidden),
            "ffn_norm": (self.ffn_norm, hidden),
            "attention_post_norm": (self.attention_post_norm, hidden),
            "ffn_post_norm": (self.ffn_post_norm, hidden),
            "q_norm": (self.q_norm, head),
            "k_norm": (self.k_norm, head),
        }
        return {name: (norm, width) for name, (norm, width) in candidates.items() if norm is not None}


def decoder_parameters(config: ModelConfig, family: DecoderFamily) -> Sequence[ParameterSpec]:
    """Every parameter, with the projections that read the same input fused into one matrix."""
    hidden, ffn = config.hidden_size, config.ffn_size
    qkv_rows = config.q_size + 2 * config.kv_size
    fused = (
        ("qkv", ("q_proj", "k_proj", "v_proj"), "self_attn", qkv_rows, hidden, config.qkv_bias),
        ("output", ("o_proj",), "self_attn", hidden, config.q_size, config.attention_output_bias),
        ("gate_up", ("gate_proj", "up_proj"), "mlp", 2 * ffn, hidden, config.mlp_bias),
        ("down", ("down_proj",), "mlp", hidden, ffn, config.mlp_bias),
    )
    specs = [ParameterSpec("embedding.weight", (config.vocab_size, hidden), ("model.embed_tokens.weight",), True)]
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        for name, (norm, width) in family.norms(config).items():
            specs.append(ParameterSpec(f"{index}.{name}.weight", (width,), (f"{prefix}.{norm.huggingface}.weight",)))
        for name, parts, block, rows, columns, has_bias in fused:
            names = [f"{prefix}.{block}.{part}" for part in parts]
            weights = tuple(f"{part}.weight" for part in names)
            specs.append(ParameterSpec(f"{index}.{name}.weight", (rows, columns), weights, True))
            if has_bias:
                specs.append(ParameterSpec(f"{index}.{name}.bias", (rows,), tuple(f"{part}.bias" for part in names)))
    specs.append(ParameterSpec("final_norm.weight", (hidden,), ("model.norm.weight",)))
    if not config.tie_word_embeddings:
        specs.append(ParameterSpec("head.weight", (config.vocab_size, hidden), ("lm_head.weight",), True))
    return specs


def decoder_cuts(config: ModelConfig, shard: ModelShard, family: DecoderFamily) -> Mapping[str, Cut]:
    """A rank's parameters, by name, as parts of those that :func:`decoder_parameters` states.

    Products whose sums the ranks add up have their bias on the first tensor rank alone. The embedding is whole: it is
    looked up, not multiplied with, and only the rows of a step's tokens are read.
    """
    heads = Span(shard.tensor_rank * shard.num_heads, (shard.tensor_rank + 1) * shard.num_heads)
    kv_heads = Span(shard.kv_heads.first, shard.kv_heads.first + shard.kv_heads.length)
    q, kv = (Span(span.start * config.head_dim, span.stop * config.head_dim) for span in (heads, kv_heads))
    qkv = (q, kv.shifted(config.q_size), kv.shifted(config.q_size + config.kv_size))
    gate_up = (shard.ffn, shard.ffn.shifted(config.ffn_size))
    cuts: dict[str, Cut] = {}
    if shard.is_first:
        cuts["embedding.weight"] = Cut("embedding.weight")
    for index in shard.layers:
        for name in family.norms(config):
            cuts[f"{index}.{name}.weight"] = Cut(f"{index}.{name}.weight")
        for name, rows, has_bias in (("qkv", qkv, config.qkv_bias), ("gate_up", gate_up, config.mlp_bias)):
            for kind in ("weight", "bias") if has_bias else ("weight",):
                cuts[f"{index}.{name}.{kind}"] = Cut(f"{index}.{name}.{kind}", rows)
        for name, columns, has_bias in (
            ("output", q, config.attention_output_bias),
            ("down", shard.ffn, config.mlp_bias),
        ):
            cuts[f"{index}.{name}.weight"] = Cut(f"{index}.{name}.weight", columns=columns)
            if has_bias and shard.tensor_rank == 0:
                cuts[f"{index}.{name}.bias"] = Cut(f"{index}.{name}.bias")
    if shard.is_last:
        cuts["final_norm.weight"] = Cut("final_norm.weight")
        tied = config.tie_word_embeddings
        cuts["head.weight"] = Cut("embedding.weight" if tied else "head.weight", (shard.vocabulary,))
    return cuts


def decoder_gguf_names(config: ModelConfig, family: DecoderFamily) -> Mapping[str, GgufName]:
    """llama.cpp's tensor names by Hugging Face's."""
    offset, permuted = family.norm_offset, family.gguf_permutes_heads
    names = {
        "model.embed_tokens.weight": GgufName("token_embd.weight"),
        "model.norm.weight": GgufName("output_norm.weight", offset=offset),
        "lm_head.weight": GgufName("output.weight"),
    }
    projections = {
        "self_attn.q_proj": ("attn_q", config.num_heads if permuted else None),
        "self_attn.k_proj": ("attn_k", config.num_kv_heads if permuted else None),
        "self_attn.v_proj": ("attn_v", None),
        "self_attn.o_proj": ("attn_output", None),
        "mlp.gate_proj": ("ffn_gate", None),
        "mlp.up_proj": ("ffn_up", None),
        "mlp.down_proj": ("ffn_down", None),
    }
    for index in range(config.num_layers):
        ours, theirs = f"model.layers.{index}", f"blk.{index}"
        for norm, _ in family.norms(config).values():
            names[f"{ours}.{norm.huggingface}.weight"] = GgufName(f"{theirs}.{norm.gguf}.weight", offset=offset)
        for name, (gguf_name, heads) in projections.items():
            for kind in ("weight", "bias"):
                names[f"{ours}.{name}.{kind}"] = GgufName(f"{theirs}.{gguf_name}.{kind}", heads)
    return names
