"""Answers of the indexer's HTTP face: one body that Mooncake's and Dynamo's clients both find their keys in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvmesh.events.index.index import DumpedBlock
from kvmesh.protocol.match import WorkerMatch

__all__ = ["dumped_block", "query_reply"]


def query_reply(matches: Iterable[WorkerMatch], tenant_id: str, instance_id: str | None) -> dict[str, Any]:
    """Tokens that each worker holds; a colder tier's count includes what the warmer ones hold.

    * Mooncake: ``{tenant: {instance: {longest_matched, GPU, CPU, DISK, DP: {rank: tokens in any tier}}}}``;
    * Dynamo: ``{scores: {instance: {rank: device tokens}}, frequencies: [], instances: {instance: {longest_matched,
      gpu, cpu, disk, dp: {rank: device tokens}}}}``.

    Over ranks, the best one's is given. A tenant that is called like one of Dynamo's keys is left out.
    """
    mooncake: dict[str, dict[str, Any]] = {}
    dynamo: dict[str, dict[str, Any]] = {}
    scores: dict[str, dict[str, int]] = {}
    for match in matches:
        name, rank = match.instance_id, str(match.dp_rank)
        if instance_id not in (None, name):
            continue
        device, host, disk = match.device_tokens, match.host_tokens, match.disk_tokens
        upper = mooncake.get(name)
        if upper is None:
            upper = mooncake[name] = {"longest_matched": 0, "GPU": 0, "CPU": 0, "DISK": 0, "DP": {}}
            dynamo[name] = {"longest_matched": 0, "gpu": 0, "dp": {}, "cpu": 0, "disk": 0}
            scores[name] = {}
        lower = dynamo[name]
        upper["longest_matched"] = lower["longest_matched"] = max(upper["longest_matched"], disk)
        upper["GPU"] = lower["gpu"] = max(upper["GPU"], device)
        upper["CPU"] = lower["cpu"] = max(upper["CPU"], host)
        upper["DISK"] = lower["disk"] = max(upper["DISK"], disk)
        upper["DP"][rank] = disk
        lower["dp"][rank] = scores[name][rank] = device
    return {tenant_id: mooncake, "scores": scores, "frequencies": [], "instances": dynamo}


def dumped_block(block: DumpedBlock) -> dict[str, Any]:
    """A block as ``/dump`` shows it."""
    return {
        **block.scope._asdict(),
        "block_size": block.block_size,
        "seq_hash": block.prefix_hash,
        "parent_hash": block.parent_hash,
        "tier": block.tier.name.lower(),
        "predicted": block.predicted,
    }
