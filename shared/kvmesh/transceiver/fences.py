"""Which lives of other engines are over: nothing is exchanged with them any more, whatever they or others still say."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from kvmesh.transceiver.types import PeerKey

__all__ = ["Fences"]

MAX_FENCES: Final = 16_384
"""Instance ids remembered. Who is forgotten could only come back in an old ticket, which has expired long ago."""


class Fences:
    """The latest life of each instance that has ended; used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: OrderedDict[str, int] = OrderedDict()

    def end(self, instance_id: str, epoch: int) -> None:
        """This life and every earlier one of an instance are over."""
        with self._lock:
            self._ended[instance_id] = max(epoch, self._ended.get(instance_id, epoch))
            self._ended.move_to_end(instance_id)
            if len(self._ended) > MAX_FENCES:
                self._ended.popitem(last=False)

    def is_over(self, peer: PeerKey) -> bool:
        """Whether this life of an engine is known to be over."""
        with self._lock:
            return peer.epoch <= self._ended.get(peer.instance_id, -1)
