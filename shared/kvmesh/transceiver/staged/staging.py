"""What all receiver's ends of an engine have in common: its receive region, its pages, its channel."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from kvmesh.transceiver.channels.base import Channel, Region
from kvmesh.transceiver.staged.attachments import Attachments
from kvmesh.transceiver.staged.copying import PageCopier
from kvmesh.transceiver.staged.limbo import Limbo
from kvmesh.transceiver.staged.rooms import Rooms
from kvmesh.transceiver.tickets import Signer
from kvmesh.transceiver.types import PeerKey

__all__ = ["Staging"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """What the receiver's ends of one engine share.

    Attributes:
        key: this engine.
        signer: signs introductions.
        channel: moves the bytes.
        attachments: to the owners.
        copier: writes this engine's pages.
        region: the receive region.
        rooms: of the receive region.
        limbo: rooms that are out of use although their connection has ended.
        tags: numbers pieces, so that none is used twice.
        connect_timeout_s: bound of connection set-up.
    """

    key: PeerKey
    signer: Signer
    channel: Channel
    attachments: Attachments
    copier: PageCopier
    region: Region
    rooms: Rooms
    limbo: Limbo
    tags: itertools.count[int]
    connect_timeout_s: float
