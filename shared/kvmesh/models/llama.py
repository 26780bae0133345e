"""Llama and its near relatives: pre-norm, grouped-query attention with rotary positions, SwiGLU.

One pass over the layers, a fixed set of scratch buffers, and every operation writing into them: a decode step
allocates nothing, and its cost in Python is nine calls a layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec
from kvmesh.kernels import ops
from kvmesh.models.base import ForwardBatch, GroupTables, KvPools
from kvmesh.models.config import ModelConfig
from kvmesh.models.linear import Linear
from kvmesh.models.parameters import ModelWeights, ParameterSpec
from kvmesh.models.rope import cos_sin_tables
from kvmesh.models.scratch import Scratch
from kvmesh.models.weights import GgufName

__all__ = ["IGNORED_TENSORS", "Llama", "create", "gguf_names", "parameters"]

# Buffers that old checkpoints carry, a copy of the tied embedding, and the rope divisors, which the configuration has.
IGNORED_TENSORS = re.compile(r".*\.rotary_emb\.inv_freq|lm_head\.weight|rope_freqs\.weight")


def parameters(config: ModelConfig) -> Sequence[ParameterSpec]:
    """Every parameter, with the projections that read the same input fused into one matrix."""
    hidden, ffn = config.hidden_size, config.ffn_size
    specs = [ParameterSpec("embedding.weight", (config.vocab_size, hidden), ("model.embed_tokens.weight",), True)]
    for index in range(config.num_layers):
        fused = (
            (
                "qkv",
                ("q_proj", "k_proj", "v_proj"),
                "self_attn",
                config.q_size + 2 * config.kv_size,
                hidden,
                config.qkv_bias,
            ),
            ("output", ("o_proj",), "self_attn", hidden, config.q_size, config.attention_output_bias),
            ("gate_up", ("gate_proj", "up_proj"), "mlp", 2 * ffn, hidden, config.mlp_bias),
            ("down", ("down_proj",), "mlp", hidden, ffn, config.mlp_bias),
        )
        prefix = f"model.layers.{index}"
        for norm, source in (("attention_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
            specs.append(ParameterSpec(f"{index}.{norm}.weight", (hidden,), (f"{prefix}.{source}.weight",)))
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


def gguf_names(config: ModelConfig) -> Mapping[str, GgufName]:
    """llama.cpp's tensor names. Its conversion permutes the rows of q and k for interleaved rotation."""
    names = {
        "model.embed_tokens.weight": GgufName("token_embd.weight"),
        "model.norm.weight": GgufName("output_norm.weight"),
        "lm_head.weight": GgufName("output.weight"),
    }
    layer = {
        "input_layernorm": ("attn_norm", None),
        "self_attn.q_proj": ("attn_q", config.num_heads),
        "self_attn.k_proj": ("attn_k", config.num_kv_heads),
        "self_attn.v_proj": ("attn_v", None),
        "self_attn.o_proj": ("attn_output", None),
        "post_attention_layernorm": ("ffn_norm", None),
        "mlp.gate_proj": ("ffn_gate", None),
        "mlp.up_proj": ("ffn_up", None),
        "mlp.down_proj": ("ffn_down", None),
    }
    for index in range(config.num_layers):
        for name, (gguf_name, heads) in layer.items():
            for kind in ("weight", "bias"):
                names[f"model.layers.{index}.{name}.{kind}"] = GgufName(f"blk.{index}.{gguf_name}.{kind}", heads)
    return names


def create(config: ModelConfig, weights: ModelWeights, max_seq_len: int) -> Llama:
    """The model over its weights."""
    return Llama(config, weights, max_seq_len)


class _Layer(NamedTuple):
    attention_norm: Tensor
    qkv: Linear
    output: Linear
    ffn_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int


class _Buffers(NamedTuple):
    """One step's scratch; every layer writes over the same memory."""

    residual: Tensor
    """``[T, hidden]``: the sum that runs through the layers."""
    normed: Tensor
    block: Tensor
    """``[T, hidden]``: output of attention or of the feed-forward part, not yet added to the residual."""
    qkv: Tensor
    q: Tensor
    """``[T, heads, head_dim]``, a view of ``qkv``; so are k and v."""
    k: Tensor
    v: Tensor
    attended: Tensor
    attended_heads: Tensor
    gate_up: Tensor
    activated: Tensor

    def only(self, rows: Tensor) -> _Buffers:
        """Buffers for what follows the last attention, holding the given rows."""
        count = rows.shape[0]
        return self._replace(
            residual=self.residual.index_select(0, rows),
            attended=self.attended.index_select(0, rows),
            normed=self.normed[:count],
            block=self.block[:count],
            gate_up=self.gate_up[:count],
            activated=self.activated[:count],
        )


class Llama:
    """A :class:`kvmesh.models.base.CausalLM`."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, max_seq_len: int) -> None:
        self.config = config
        self.max_seq_len = max_seq_len
        dense = weights.dense
        self._embedding = dense["embedding.weight"]
        self._head = weights.linear("embedding" if config.tie_word_embeddings else "head")
        self._final_norm = dense["final_norm.weight"]
        self._layers = tuple(
            _Layer(
                attention_norm=dense[f"{index}.attention_norm.weight"],
                qkv=weights.linear(f"{index}.qkv"),
                output=weights.linear(f"{index}.output"),
                ffn_norm=dense[f"{index}.ffn_norm.weight"],
                gate_up=weights.linear(f"{index}.gate_up"),
                down=weights.linear(f"{index}.down"),
                window=config.windows[index] or 0,
            )
            for index in range(config.num_layers)
        )
        self._scale = config.head_dim**-0.5
        self._cos, self._sin = cos_sin_tables(config.rope, max_seq_len, self._embedding.device)
        self._scratch = Scratch(self._embedding.device)

    def cache_requirements(self) -> CacheRequirements:
        """One attention cache a layer, in the model's dtype."""
        config, dtype = self.config, str(self._embedding.dtype).removeprefix("torch.")
        return CacheRequirements(
            tuple(
                LayerCacheSpec(
                    layer_index=index,
                    num_kv_heads=config.num_kv_heads,
                    head_dim=config.head_dim,
                    dtype=dtype,
                    window=config.windows[index],
                )
                for index in range(config.num_layers)
            )
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KvPools) -> Tensor:
        """See :meth:`kvmesh.models.base.CausalLM.forward`."""
        if batch.adapter_ids is not None or batch.state_slots is not None:
            raise ValueError("Llama models have neither adapters nor recurrent state here.")
        eps, rows, wanted = self.config.rms_norm_eps, batch.token_ids.shape[0], batch.logits_rows.shape[0]
        buffers = self._buffers(rows)
        if batch.embeddings is None:
            torch.index_select(self._embedding, 0, batch.token_ids, out=buffers.residual)
        else:
            buffers.residual.copy_(batch.embeddings)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            if index == 0:
                ops.rms_norm(buffers.normed, buffers.residual, layer.attention_norm, eps)
            else:
                ops.add_rms_norm(buffers.normed, buffers.residual, buffers.block, layer.attention_norm, eps)
            layer.qkv(buffers.normed, buffers.qkv)
            self._attend(buffers, batch, layer.window, kv.layers[index], batch.groups[kv.group_of_layer[index]])
            if index == last and wanted < rows:
                # After the last attention no row sees another: go on with the wanted ones alone.
                buffers = buffers.only(batch.logits_rows)
            layer.output(buffers.attended, buffers.block)
            ops.add_rms_norm(buffers.normed, buffers.residual, buffers.block, layer.ffn_norm, eps)
            layer.gate_up(buffers.normed, buffers.gate_up)
            ops.silu_and_mul(buffers.activated, buffers.gate_up)
            layer.down(buffers.activated, buffers.block)
        ops.add_rms_norm(buffers.normed, buffers.residual, buffers.block, self._final_norm, eps)
        logits = self._scratch.get("logits", wanted, self.config.vocab_size, self._embedding.dtype)
        return self._head(buffers.normed, logits).float()

    def _attend(
        self, buffers: _Buffers, batch: ForwardBatch, window: int, kv: ops.PagedKv, tables: GroupTables
    ) -> None:
        ops.rope_store_kv(
            buffers.q, buffers.k, buffers.v, self._cos, self._sin, batch.positions, kv, tables.slot_mapping
        )
        ops.paged_attention(
            buffers.attended_heads,
            buffers.q,
            kv,
            tables.block_table,
            batch.query_start,
            batch.context_lens,
            self._scale,
            window,
        )

    def _buffers(self, rows: int) -> _Buffers:
        config, dtype = self.config, self._embedding.dtype
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = self._scratch.get("qkv", rows, (heads + 2 * kv_heads) * head_dim, dtype)
        q, k, v = torch.split(qkv.view(rows, heads + 2 * kv_heads, head_dim), [heads, kv_heads, kv_heads], 1)
        attended = self._scratch.get("attended", rows, heads * head_dim, dtype)
        return _Buffers(
            residual=self._scratch.get("residual", rows, config.hidden_size, dtype),
            normed=self._scratch.get("normed", rows, config.hidden_size, dtype),
            block=self._scratch.get("block", rows, config.hidden_size, dtype),
            qkv=qkv,
            q=q,
            k=k,
            v=v,
            attended=attended,
            attended_heads=attended.view(rows, heads, head_dim),
            gate_up=self._scratch.get("gate_up", rows, 2 * config.ffn_size, dtype),
            activated=self._scratch.get("activated", rows, config.ffn_size, dtype),
        )
