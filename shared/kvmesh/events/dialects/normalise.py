"""Rules that hold in every dialect: hashes, tiers, and which events are not usable at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvmesh.events.dialects.base import RejectedError
from kvmesh.events.dialects.identity import BlockContent, identity_of
from kvmesh.events.dialects.tokens import WireTokens
from kvmesh.events.records import Removed, Stored, Tier

__all__ = ["TIERS", "WireHash", "block_hashes", "local_only", "removed", "stored", "tier_of"]

WireHash = int | bytes
"""A signed or unsigned 64-bit number, or a digest."""

_MASK = 2**64 - 1
_MASK_BYTES = 8

TIERS: Mapping[str | None, Tier] = {
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
"""Media, in upper case."""


def tier_of(medium: str | None) -> Tier:
    """The tier that a medium belongs to; Mooncake writes media in lower case.

    Raises:
        RejectedError: an unknown medium; taking it for the device would promise what nobody may hold.
    """
    tier = TIERS.get(medium if medium is None else medium.upper())
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
    return [
        value & _MASK if isinstance(value, int) else int.from_bytes(value[-_MASK_BYTES:], "big") for value in hashes
    ]


def removed(*, hashes: Sequence[WireHash], medium: str | None, group: int | None, locality: str | None) -> Removed:
    """A removed event from the fields that the dialects share.

    Raises:
        RejectedError: it is remote or in an unknown medium.
    """
    local_only(locality)
    return Removed(hashes=block_hashes(hashes), tier=tier_of(medium), group=group)


def stored(
    *,
    hashes: Sequence[WireHash],
    parent: WireHash | None,
    tokens: WireTokens,
    block_size: int,
    medium: str | None,
    lora_id: int | None,
    lora_name: str | None,
    salt: str | None,
    content: BlockContent,
    group: int | None = None,
    kind: str | None = None,
    locality: str | None = None,
    tenant: str | None = None,
    model: str | None = None,
) -> Stored:
    """A stored event from the fields that the dialects share.

    Raises:
        RejectedError: it is remote, in an unknown medium, refers to itself, or its tokens do not fill its blocks.
    """
    local_only(locality)
    tier = tier_of(medium)
    normal = block_hashes(hashes)
    before = None if parent is None else block_hashes([parent])[0]
    if not normal or block_size < 1:
        raise RejectedError("no_blocks")
    if len({before, *normal}) != len(normal) + 1:
        raise RejectedError("refers_to_itself")
    if len(tokens.ids) and len(tokens.ids) != block_size * len(normal) + tokens.lookahead:
        raise RejectedError("tokens_do_not_fill_blocks")
    identity = identity_of(
        content,
        tokens.digests,
        num_blocks=len(normal),
        block_size=block_size,
        lora_name=lora_name,
        salt=salt,
        at_root=before is None,
    )
    return Stored(
        hashes=normal,
        parent=before,
        token_ids=tokens.ids,
        block_size=block_size,
        lookahead=tokens.lookahead,
        tier=tier,
        lora=lora_id if lora_name is None else lora_name,
        salt=identity.salt,
        extra_keys=identity.extra_keys,
        group=group,
        kind=kind,
        tenant=tenant,
        model=model,
    )
