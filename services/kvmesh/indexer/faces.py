"""Bodies of the indexer's HTTP face, in the shapes that Mooncake's and Dynamo's clients send (``docs/indexer.md``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from kvmesh.events.index import DEFAULT_TENANT
from kvmesh.events.index.index import DumpedBlock
from kvmesh.protocol.match import WorkerMatch

__all__ = ["HashQuery", "Query", "RegisterBody", "Unregister", "dumped_block", "query_reply"]

NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]
Rank = Annotated[int, msgspec.Meta(ge=0)]
BlockSize = Annotated[int, msgspec.Meta(gt=0)]


class RegisterBody(msgspec.Struct, kw_only=True):
    """``POST /register``: follow a publisher that no coordinator knows."""

    endpoint: NonEmpty
    instance_id: NonEmpty
    modelname: NonEmpty
    replay_endpoint: str | None = None
    type: str = "vLLM"
    """Which engine it is; nothing depends on it, every event says how it is written."""
    lora_name: str | None = None
    """Adapter of blocks that name none."""
    tenant_id: str = DEFAULT_TENANT
    block_size: BlockSize | None = None
    """Said by every stored event; accepted for clients that send it."""
    dp_rank: Rank = 0
    additionalsalt: str | None = None
    """Salt of blocks that name none; queries find them with it as ``cache_salt``."""
    single_group: bool = False
    """It tells one layer group only, the widest: its blocks count even if that group has a window."""


class Unregister(msgspec.Struct, kw_only=True):
    """``POST /unregister``."""

    instance_id: str
    dp_rank: Rank | None = None
    """One rank only; all of them when absent."""


class _Question(msgspec.Struct, kw_only=True):
    model: str
    lora_name: str | None = None
    lora_id: int | None = None
    tenant_id: str = DEFAULT_TENANT
    instance_id: str | None = None
    """Only this worker."""
    block_size: BlockSize | None = None
    """Only workers with blocks of so many tokens."""
    cache_salt: str | None = None

    @property
    def lora(self) -> str | int | None:
        """The adapter, by name before number."""
        return self.lora_id if self.lora_name is None else self.lora_name


class Query(_Question, kw_only=True):
    """``POST /query``: who holds how much of these tokens."""

    token_ids: list[int]


class HashQuery(_Question, kw_only=True):
    """``POST /query_by_hash``: the same for the rolling XXH3 hashes of a prompt's blocks."""

    seq_hashes: list[int]
    """Signed or unsigned."""


def query_reply(matches: Iterable[WorkerMatch], tenant_id: str, instance_id: str | None) -> dict[str, Any]:
    """``{tenant: {instance: {longest_matched, GPU, CPU, DISK, DP: {rank: n}}}}``, all in tokens.

    A colder tier's count includes what the warmer ones hold; over ranks, the best one's is given.
    """
    instances: dict[str, dict[str, Any]] = {}
    for match in matches:
        if instance_id not in (None, match.instance_id):
            continue
        entry = instances.setdefault(match.instance_id, {"longest_matched": 0, "GPU": 0, "CPU": 0, "DISK": 0, "DP": {}})
        entry["longest_matched"] = max(entry["longest_matched"], match.disk_tokens)
        entry["GPU"] = max(entry["GPU"], match.device_tokens)
        entry["CPU"] = max(entry["CPU"], match.host_tokens)
        entry["DISK"] = max(entry["DISK"], match.disk_tokens)
        entry["DP"][str(match.dp_rank)] = match.disk_tokens
    return {tenant_id: instances}


def dumped_block(block: DumpedBlock) -> dict[str, Any]:
    """A block as ``/dump`` shows it."""
    return {
        **block.scope._asdict(),
        "block_size": block.block_size,
        "seq_hash": block.prefix_hash,
        "parent_hash": block.parent_hash,
        "tier": block.tier.name.lower(),
    }
