"""Gemma 2: norms around both parts of a layer, windows on every other layer, soft caps on scores and logits."""

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
    norm_offset=1.0,
    scales_embedding=True,
)

parameters = partial(decoder_parameters, family=_FAMILY)
cuts = partial(decoder_cuts, family=_FAMILY)
gguf_names = partial(decoder_gguf_names, family=_FAMILY)
create = partial(Decoder, family=_FAMILY)
