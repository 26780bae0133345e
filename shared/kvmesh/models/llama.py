"""Llama, and Mistral, whose only difference is the window that its configuration gives to all layers."""

from __future__ import annotations

import re
from functools import partial

from kvmesh.models.decoder import Decoder
from kvmesh.models.decoder_family import DecoderFamily, Norm, decoder_cuts, decoder_gguf_names, decoder_parameters

__all__ = ["IGNORED_TENSORS", "create", "cuts", "gguf_names", "parameters"]

# Buffers that old checkpoints carry, a copy of the tied embedding, and the rope divisors, which the configuration has.
IGNORED_TENSORS = re.compile(r".*\.rotary_emb\.inv_freq|lm_head\.weight|rope_freqs\.weight")

_FAMILY = DecoderFamily(
    attention_norm=Norm("input_layernorm", "attn_norm"),
    ffn_norm=Norm("post_attention_layernorm", "ffn_norm"),
    gguf_permutes_heads=True,
)

parameters = partial(decoder_parameters, family=_FAMILY)
cuts = partial(decoder_cuts, family=_FAMILY)
gguf_names = partial(decoder_gguf_names, family=_FAMILY)
create = partial(Decoder, family=_FAMILY)
