"""What an engine needs to move pages, put together from its settings: transceiver, transfer desk, context credits."""

from __future__ import annotations

import os

import torch

from kvmesh.cache.base import CacheManager
from kvmesh.cache.layout import PageLayout
from kvmesh.config import WorkerSettings
from kvmesh.config.transfer_facts import server_facts
from kvmesh.engine.credits import ContextCredits
from kvmesh.engine.offers import EarlyOffers
from kvmesh.engine.pages import SequencePages
from kvmesh.engine.transfer_pools import transfer_pools
from kvmesh.engine.transfers import TransferDesk
from kvmesh.engine.waiting import LoopWaiter
from kvmesh.net.address import specific_host
from kvmesh.net.clock import Clock
from kvmesh.transceiver import Transceiver, create_transceiver

__all__ = ["context_credits", "start_transceiver", "transfer_desk"]


def start_transceiver(
    settings: WorkerSettings,
    manager: CacheManager,
    *,
    digest: str,
    summary: str,
    epoch: int,
    waiter: LoopWaiter,
    clock: Clock,
    max_seq_len: int,
) -> Transceiver | None:
    """The transceiver over the cache's pages; None where the settings name no backend.

    Args:
        settings: the worker's.
        manager: whose pages move.
        digest: what must be equal at a peer.
        summary: what it covers, for people.
        epoch: of this life of the engine.
        waiter: the loop's.
        clock: for deadlines.
        max_seq_len: of the model, in tokens.

    Raises:
        TransceiverConfigError: the configuration cannot work here.
        OSError: an address cannot be bound.
    """
    pools = transfer_pools(manager)
    return create_transceiver(
        settings.cache_transceiver_config,
        layout=manager.layout,
        pools=pools,
        instance_id=settings.instance_id or f"engine-{os.getpid()}",
        epoch=epoch,
        cluster_secret=(settings.cluster_secret or "").encode(),
        bind_host=specific_host(settings.transfer_bind_host),
        plane=settings.transfer_plane,
        checksums=settings.transfer_checksums,
        digest=digest,
        summary=summary,
        clock=clock,
        facts=server_facts(settings, "cuda" if any(pool.device == "cuda" for pool in pools) else "cpu"),
        waiter=waiter,
        max_seq_len=max_seq_len,
    )


def transfer_desk(
    settings: WorkerSettings,
    transceiver: Transceiver,
    layout: PageLayout,
    device: torch.device,
    waiter: LoopWaiter,
    clock: Clock,
) -> TransferDesk:
    """The executor's desk for transfers, with offers of prompts that are still computed on ``device``."""
    offers = EarlyOffers(
        transceiver,
        [group.window for group in layout.groups],
        layout.tokens_per_block,
        settle=(lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else _settled,
    )
    return TransferDesk(transceiver, settings.cache_transceiver_config, waiter, clock, offers)


def context_credits(
    settings: WorkerSettings, manager: CacheManager, pages: SequencePages, transceiver: Transceiver, clock: Clock
) -> ContextCredits:
    """How much of each pool finished prompts may hold that nobody has read yet."""
    timeout_ms = settings.cache_transceiver_config.kv_transfer_timeout_ms
    return ContextCredits(
        settings.max_unread_share,
        lambda: [pool.total for pool in manager.stats().pools],
        pages,
        float("inf") if timeout_ms is None else timeout_ms / 1e3,
        transceiver.is_unread,
        clock,
    )


def _settled() -> None:
    """On a CPU, what was computed is in the pages."""
