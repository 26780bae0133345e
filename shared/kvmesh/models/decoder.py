"""The frame that the decoder families share, and what some of them add to it (``decoder_family`` names that).

One pass over the layers, a fixed set of scratch buffers, and every operation writing into them: a decode step
allocates nothing, and its cost in Python is nine calls a layer for Llama, thirteen for Gemma 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec
from kvmesh.kernels import ops
from kvmesh.models.attention_windows import mask_windows
from kvmesh.models.base import ForwardBatch, GroupTables, KvPools, RankLinks
from kvmesh.models.decoder_family import DecoderFamily
from kvmesh.models.linear import Linear
from kvmesh.models.model_config import Activation, ModelConfig
from kvmesh.models.parameters import ModelWeights
from kvmesh.models.rope import cos_sin_tables
from kvmesh.models.scratch import Scratch
from kvmesh.models.sharding import ModelShard, shard_of

__all__ = ["Decoder"]

_GATES: Mapping[Activation, Callable[[Tensor, Tensor], None]] = {
    "silu": ops.silu_and_mul,
    "gelu_tanh": ops.gelu_tanh_and_mul,
}


class _Layer(NamedTuple):
    attention_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: Linear
    output: Linear
    attention_post_norm: Tensor | None
    ffn_norm: Tensor
    gate_up: Linear
    down: Linear
    ffn_post_norm: Tensor | None
    cos: Tensor
    sin: Tensor
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


class Decoder:
    """A :class:`kvmesh.models.base.CausalLM` of any family, or a rank's part of one.

    Args:
        config: the checkpoint's.
        weights: of the parameters that :func:`kvmesh.models.decoder_family.decoder_parameters` states.
        max_seq_len: longest sequence in tokens.
        cache_windows: by layer, how many latest tokens the cache keeps, None for all. Attention sees no more than
            these, and no more than the model's own window.
        shard: the rank's part; None: the whole model.
        links: to the other ranks, where there are any.
        family: what the architecture adds to the frame.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        max_seq_len: int,
        cache_windows: Sequence[int | None],
        shard: ModelShard | None = None,
        links: RankLinks | None = None,
        *,
        family: DecoderFamily,
    ) -> None:
        self.config = config
        self.max_seq_len = max_seq_len
        self._cache_windows = tuple(cache_windows)
        self._shard = shard = shard or shard_of(config)
        self._links = links
        dense = weights.dense
        # What a stage before or after has is not here.
        self._embedding = dense.get("embedding.weight")
        self._final_norm = dense.get("final_norm.weight")
        self._head = None
        if shard.is_last:
            self._head = weights.linear("head" if "head.weight" in dense else "embedding")
        sample = dense[f"{shard.layers[0]}.attention_norm.weight"]
        device, self._dtype = sample.device, sample.dtype
        self._embedding_scale = (
            float(torch.tensor(config.hidden_size**0.5, dtype=self._dtype)) if family.scales_embedding else 1.0
        )
        self._norm_offset = family.norm_offset
        self._gate = _GATES[config.activation]
        ropes = [config.rope_of_layer(index) for index in range(config.num_layers)]
        rotations = {rope: cos_sin_tables(rope, max_seq_len, device) for rope in dict.fromkeys(ropes)}
        masks = mask_windows(config.windows, self._cache_windows)
        self._layers = tuple(
            _Layer(
                attention_norm=dense[f"{index}.attention_norm.weight"],
                q_norm=dense.get(f"{index}.q_norm.weight"),
                k_norm=dense.get(f"{index}.k_norm.weight"),
                attention_post_norm=dense.get(f"{index}.attention_post_norm.weight"),
                ffn_norm=dense[f"{index}.ffn_norm.weight"],
                ffn_post_norm=dense.get(f"{index}.ffn_post_norm.weight"),
                qkv=weights.linear(f"{index}.qkv"),
                output=weights.linear(f"{index}.output"),
                gate_up=weights.linear(f"{index}.gate_up"),
                down=weights.linear(f"{index}.down"),
                cos=rotations[ropes[index]][0],
                sin=rotations[ropes[index]][1],
                window=masks[index] or 0,
            )
            for index in shard.layers
        )
        self._scratch = Scratch(device)

    def cache_requirements(self) -> CacheRequirements:
        """One attention cache a layer of the whole model, in its dtype, with the cache's window."""
        config, dtype = self.config, str(self._dtype).removeprefix("torch.")
        return CacheRequirements(
            tuple(
                LayerCacheSpec(
                    layer_index=index,
                    num_kv_heads=config.num_kv_heads,
                    head_dim=config.head_dim,
                    dtype=dtype,
                    window=window,
                )
                for index, window in enumerate(self._cache_windows)
            )
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KvPools) -> Tensor:
        """See :meth:`kvmesh.models.base.CausalLM.forward`; ``batch.embeddings`` are taken as they are, unscaled."""
        if batch.adapter_ids is not None or batch.state_slots is not None:
            raise ValueError(f"{self.config.architecture} models have neither adapters nor recurrent state here.")
        eps, offset, links, shard = self.config.rms_norm_eps, self._norm_offset, self._links, self._shard
        rows, wanted = batch.token_ids.shape[0], batch.logits_rows.shape[0]
        buffers = self._buffers(rows)
        if shard.is_first:
            self._embed(batch, buffers.residual)
        elif links is not None:
            links.receive(buffers.residual)
        last = len(self._layers) - 1 if shard.is_last else None
        for index, layer in enumerate(self._layers):
            if index == 0:
                ops.rms_norm(buffers.normed, buffers.residual, layer.attention_norm, eps, offset)
            else:
                ops.add_rms_norm(buffers.normed, buffers.residual, buffers.block, layer.attention_norm, eps, offset)
            layer.qkv(buffers.normed, buffers.qkv)
            self._attend(buffers, batch, layer, kv.layers[index], batch.groups[kv.table_of_layer[index]])
            if index == last and wanted < rows:
                # After the last attention no row sees another: go on with the wanted ones alone.
                buffers = buffers.only(batch.logits_rows)
            layer.output(buffers.attended, buffers.block)
            if links is not None:
                links.add_up(buffers.block)
            if layer.attention_post_norm is not None:
                ops.rms_norm(buffers.block, buffers.block, layer.attention_post_norm, eps, offset)
            ops.add_rms_norm(buffers.normed, buffers.residual, buffers.block, layer.ffn_norm, eps, offset)
            layer.gate_up(buffers.normed, buffers.gate_up)
            self._gate(buffers.activated, buffers.gate_up)
            layer.down(buffers.activated, buffers.block)
            if links is not None:
                links.add_up(buffers.block)
            if layer.ffn_post_norm is not None:
                ops.rms_norm(buffers.block, buffers.block, layer.ffn_post_norm, eps, offset)
        logits = self._finish(buffers, wanted).float()
        if cap := self.config.logits_soft_cap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def _finish(self, buffers: _Buffers, wanted: int) -> Tensor:
        """The logits of the last stage, or the residual on its way to the next one."""
        links = self._links
        if self._head is None or self._final_norm is None:
            assert links is not None, "only a rank has a part of the layers"
            buffers.residual.add_(buffers.block)
            links.send(buffers.residual)
            return links.collect(None, wanted)
        eps, offset = self.config.rms_norm_eps, self._norm_offset
        ops.add_rms_norm(buffers.normed, buffers.residual, buffers.block, self._final_norm, eps, offset)
        part = self._scratch.get("logits", wanted, self._head.out_features, self._dtype)
        self._head(buffers.normed, part)
        return part if links is None else links.collect(part, wanted)

    def _embed(self, batch: ForwardBatch, residual: Tensor) -> None:
        if batch.embeddings is not None:
            residual.copy_(batch.embeddings)
            return
        assert self._embedding is not None, "the first stage has the embedding"
        torch.index_select(self._embedding, 0, batch.token_ids, out=residual)
        if self._embedding_scale != 1.0:
            residual.mul_(self._embedding_scale)

    def _attend(
        self, buffers: _Buffers, batch: ForwardBatch, layer: _Layer, kv: ops.PagedKv, tables: GroupTables
    ) -> None:
        config = self.config
        if layer.q_norm is not None:
            ops.rms_norm(buffers.q, buffers.q, layer.q_norm, config.rms_norm_eps, self._norm_offset)
        if layer.k_norm is not None:
            ops.rms_norm(buffers.k, buffers.k, layer.k_norm, config.rms_norm_eps, self._norm_offset)
        ops.rope_store_kv(
            buffers.q, buffers.k, buffers.v, layer.cos, layer.sin, batch.positions, kv, tables.slot_mapping
        )
        ops.paged_attention(
            buffers.attended_heads,
            buffers.q,
            kv,
            tables.block_table,
            batch.query_start,
            batch.context_lens,
            config.attention_scale,
            layer.window,
            config.attention_soft_cap,
        )

    def _buffers(self, rows: int) -> _Buffers:
        config, shard, dtype = self.config, self._shard, self._dtype
        heads, kv_heads, head_dim = shard.num_heads, shard.kv_heads.length, config.head_dim
        hidden, ffn = config.hidden_size, shard.ffn.length
        qkv = self._scratch.get("qkv", rows, (heads + 2 * kv_heads) * head_dim, dtype)
        q, k, v = torch.split(qkv.view(rows, heads + 2 * kv_heads, head_dim), [heads, kv_heads, kv_heads], 1)
        attended = self._scratch.get("attended", rows, heads * head_dim, dtype)
        return _Buffers(
            residual=self._scratch.get("residual", rows, hidden, dtype),
            normed=self._scratch.get("normed", rows, hidden, dtype),
            block=self._scratch.get("block", rows, hidden, dtype)
            if self._links is None
            else self._links.buffer(rows, hidden),
            qkv=qkv,
            q=q,
            k=k,
            v=v,
            attended=attended,
            attended_heads=attended.view(rows, heads, head_dim),
            gate_up=self._scratch.get("gate_up", rows, 2 * ffn, dtype),
            activated=self._scratch.get("activated", rows, ffn, dtype),
        )
