"""Rules that hold in every dialect: hashes, tiers, salts, and which events are not usable at all."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvmesh.events.dialects.base import RejectedError
from kvmesh.events.records import LoraKey, Stored, Tier
from kvmesh.hashing import TokenIds

__all__ = ["WireHash", "block_hashes", "local_only", "stored", "tier_of"]

WireHash = int | bytes
"""A signed or unsigned 64-bit number, or a digest."""

_MASK = 2**64 - 1
_MASK_BYTES = 8

_TIERS: Mapping[str | None, Tier] = {
    None: Tier.DEVICE,
    "GPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "CPU_TIER2": Tier.DISK,
    "DISK": Tier.DISK,
    "NVME": Tier.DISK,
    "STORAGE": Tier.DISK,
    "FS": Tier.DISK,
    "OBJ": Tier.DISK,
}


def tier_of(medium: str | None) -> Tier:
    """The tier that a medium belongs to.

    Raises:
        RejectedError: an unknown medium; taking it for the device would promise what nobody may hold.
    """
    tier = _TIERS.get(medium)
    if tier is None:
        raise RejectedError("unknown_medium")
    return tier


def local_only(locality: str | None) -> None:
    """Accept what the worker itself holds.

    Raises:
        RejectedError: the block lies elsewhere, or the word is unknown.
    """
    if locality not in (None, "LOCAL"):
        raise RejectedError("not_local")


def block_hashes(hashes: Sequence[WireHash]) -> list[int]:
    """Hashes as unsigned 64-bit numbers: two's complement, and the last 8 bytes (big-endian) of a digest."""
    return [_block_hash(value) for value in hashes]


def _block_hash(value: WireHash) -> int:
    return value & _MASK if isinstance(value, int) else int.from_bytes(value[-_MASK_BYTES:], "big")


def stored(
    *,
    hashes: Sequence[WireHash],
    parent: WireHash | None,
    token_ids: list[int],
    block_size: int,
    medium: str | None,
    lora_id: int | None,
    lora_name: str | None,
    salt: str | None,
    extra_keys: list[Any] | None,
    group: int | None,
    kind: str | None,
    locality: str | None,
) -> Stored:
    """A stored event from the fields that the dialects share.

    Raises:
        RejectedError: it is remote, in an unknown medium, refers to itself, or its tokens do not fill its blocks.
    """
    local_only(locality)
    normal = block_hashes(hashes)
    before = None if parent is None else _block_hash(parent)
    if not normal or block_size < 1:
        raise RejectedError("no_blocks")
    if len({before, *normal}) != len(normal) + 1:
        raise RejectedError("refers_to_itself")
    if token_ids and len(token_ids) != block_size * len(normal):
        raise RejectedError("tokens_do_not_fill_blocks")
    lora: LoraKey = lora_id if lora_name is None else lora_name
    salt, extra_keys = _identity(salt, extra_keys, lora_name, at_root=before is None)
    return Stored(
        hashes=normal,
        parent=before,
        token_ids=_token_array(token_ids),
        block_size=block_size,
        tier=tier_of(medium),
        lora=lora,
        salt=salt,
        extra_keys=extra_keys,
        group=group,
        kind=kind,
    )


def _identity(
    salt: str | None, extra_keys: list[Any] | None, lora_name: str | None, *, at_root: bool
) -> tuple[str | None, list[Any] | None]:
    """Take the salt and the adapter's name out of the extra keys.

    vLLM lists the adapter with every block and the salt with the first one, unlabelled; a lone text there is the salt.
    """
    if not extra_keys:
        return salt, None
    rest: list[Any] = [_without(keys, lora_name) for keys in extra_keys]
    first = rest[0]
    if at_root and salt is None and isinstance(first, list) and len(first) == 1 and isinstance(first[0], str):
        salt, rest[0] = first[0], None
    elif salt is not None:
        rest[0] = _without(first, salt)
    return salt, rest if any(keys is not None for keys in rest) else None


def _without(keys: Any, word: str | None) -> Any:
    if not isinstance(keys, list):
        return keys
    return [key for key in keys if word is None or key != word] or None


def _token_array(token_ids: list[int]) -> TokenIds:
    try:
        # Half the time of numpy's own conversion of a list.
        return np.frombuffer(struct.pack(f"<{len(token_ids)}i", *token_ids), dtype="<i4")
    except struct.error:
        raise RejectedError("token_out_of_range") from None
