"""What both sides of a transceiver share: who we are, our memory, the plane, the threads and the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvmesh.cache.layout import PageLayout
from kvmesh.net.clock import Clock
from kvmesh.protocol.transfer import ControlMessage
from kvmesh.transceiver.bounce import BounceRegions
from kvmesh.transceiver.control import Route
from kvmesh.transceiver.fences import Fences
from kvmesh.transceiver.handshake import Handshake
from kvmesh.transceiver.integrity import PageChecksums
from kvmesh.transceiver.ledger import Ledger
from kvmesh.transceiver.planes.base import DataPlane
from kvmesh.transceiver.tickets import Signer
from kvmesh.transceiver.timing import TransferTimes, Waiter
from kvmesh.transceiver.types import PageIds, PageLease, PeerKey, PoolMemory
from kvmesh.transceiver.workers import PeerWorkers

__all__ = ["LocalEngine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEngine:
    """Fixed for the life of a transceiver."""

    key: PeerKey
    pools: Sequence[PoolMemory]
    """Those of the device, in the layout's order, then those of the host tier in the same order, if there are any."""
    layout: PageLayout
    plane: DataPlane
    checksums: PageChecksums | None
    """None when they are switched off, or cannot be computed on this memory."""
    bounce: BounceRegions | None = None
    """None: pages always move one by one."""
    handshake: Handshake
    tickets: Signer
    claims: Signer
    """Generation first: what receivers sign instead."""
    addresses: Signer
    """Generation first: what tells receivers whom to ask."""
    times: TransferTimes
    clock: Clock
    waiter: Waiter
    ledger: Ledger
    workers: PeerWorkers
    send: Callable[[Route, ControlMessage], None]
    admit: Callable[[bytes], None]
    """A receiver has introduced itself as one of ours: its messages may be large."""
    dial: Callable[[str], bytes]
    """Open the connection to an owner; returns this engine's identity there."""
    hang_up: Callable[[str], None]
    """Close the connection to an owner, after what is queued for it."""
    watch: Callable[[int, PeerKey], None]
    """Report the end of a process (a pidfd) as the death of a peer."""
    peer_gone: Callable[[PeerKey], None]
    """A peer is known to be dead."""
    fences: Fences = field(default_factory=Fences)
    """The lives of peers that are over."""

    def now_unix_ms(self) -> int:
        """Wall-clock milliseconds since the Unix epoch."""
        return self.clock.unix_ns() // 1_000_000

    def leased_pages(self, lease: PageLease, num_tokens: int) -> list[PageIds]:
        """Per layer group the pages of the blocks that ``num_tokens`` tokens take.

        Raises:
            ValueError: the lease has fewer.
        """
        num_blocks = self.layout.num_blocks(num_tokens)
        pages: list[PageIds] = []
        for group in range(len(self.layout.groups)):
            ids = np.array(lease.page_ids(group)[:num_blocks], dtype=np.int32)
            if len(ids) != num_blocks:
                raise ValueError(
                    f"the lease holds {len(ids)} blocks of group {group}; {num_tokens} tokens take {num_blocks}"
                )
            pages.append(ids)
        return pages

    @property
    def shares_host_tier(self) -> bool:
        """Whether peers can read pages that the cache has moved to its host tier."""
        return len(self.pools) > len(self.layout.pools)

    @property
    def num_groups(self) -> int:
        """Layer groups of the layout."""
        return len(self.layout.groups)

    def page_bytes(self, group: int) -> int:
        """Bytes of one page of a layer group."""
        return self.layout.groups[group].page_bytes
