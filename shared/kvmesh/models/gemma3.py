"""Gemma 3 (text): Gemma 2 with normed query and key heads instead of soft caps, five local layers to a global one."""

from __future__ import annotations

import re
from functools import partial

from kvmesh.models.decoder import Decoder
from kvmesh.models.decoder_family import DecoderFamily, Norm, decoder_cuts, decoder_gguf_names, decoder_parameters

__all__ = ["IGNORED_TENSORS", "create", "cuts", "gguf_names", "parameters"]

# A copy of the tied embedding, and buffers that old checkpoints carry.
IGNORED_TENSORS = re.compile(r".*\.rotary_emb\.inv_freq|lm_head\.weight")

_FAMILY = DecoderFamily(
    attention_norm=Norm("input_layernorm", "attn_norm"),
    attention_post_norm=Norm("post_attention_layernorm", "post_attention_norm"),
    ffn_norm=Norm("pre_feedforward_layernorm", "ffn_norm"),
    ffn_post_norm=Norm("post_feedforward_layernorm", "post_ffw_norm"),
    q_norm=Norm("self_attn.q_norm", "attn_q_norm"),
    k_norm=Norm("self_attn.k_norm", "attn_k_norm"),
    norm_offset=1.0,
    scales_embedding=True,
)

parameters = partial(decoder_parameters, family=_FAMILY)
cuts = partial(decoder_cuts, family=_FAMILY)
gguf_names = partial(decoder_gguf_names, family=_FAMILY)
create = partial(Decoder, family=_FAMILY)
