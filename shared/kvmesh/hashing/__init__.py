"""Keys of token blocks, in every algorithm that caches, events, routers and the indexer use.

``v2`` (SHA-256 chains) is what the cache itself reuses blocks by; ``v1`` and ``local`` (XXH3) are 64-bit keys for
routing. Tokens always come as one contiguous int32 array. The work is native; ``reference`` states the same rules in
plain Python, and tests compare the two.
"""

from __future__ import annotations

from kvmesh.hashing.local import ROUTING_SEED, local_hashes, sequence_hashes
from kvmesh.hashing.reuse_key import MultimodalSpan, ReuseKey
from kvmesh.hashing.scope import ReuseScope, salt_id, v2_root
from kvmesh.hashing.tokens import TokenIds, as_token_ids
from kvmesh.hashing.v1 import V1_ROOT, v1_block_keys
from kvmesh.hashing.v2 import (
    signed_wire_hash,
    v2_block_keys,
    v2_partial_key,
    wire_hash,
    wire_hashes,
    wire_numbers,
)

__all__ = [
    "ROUTING_SEED",
    "V1_ROOT",
    "MultimodalSpan",
    "ReuseKey",
    "ReuseScope",
    "TokenIds",
    "as_token_ids",
    "local_hashes",
    "salt_id",
    "sequence_hashes",
    "signed_wire_hash",
    "v1_block_keys",
    "v2_block_keys",
    "v2_partial_key",
    "v2_root",
    "wire_hash",
    "wire_hashes",
    "wire_numbers",
]
