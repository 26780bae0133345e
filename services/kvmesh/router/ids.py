"""Mesh-wide transfer ids: 63-bit snowflakes, laid out as TensorRT-LLM's ``disagg_request_id``."""

from __future__ import annotations

import os
import uuid

from kvmesh.net.clock import Clock

__all__ = ["LOCAL_ID_LIMIT", "TransferIds"]

LOCAL_ID_LIMIT = 1 << 40
"""Ids below are a server's own; a mesh-wide id is never among them."""
PROCESS_ID_VARIABLE = "TRTLLM_DISAGG_WORKER_PROCESS_ID"

_TIME_BITS, _NODE_BITS, _PROCESS_BITS, _COUNTER_BITS = 39, 8, 6, 10
_SPAN = (1 << 63) - 1 - LOCAL_ID_LIMIT


class TransferIds:
    """Makes ids that no other router of the mesh makes: milliseconds | node | process | counter.

    Args:
        clock: source of the time part (monotonic).
        node_id: 0..255, unlike on every machine; default: from the hardware address.
        process_id: 0..63, unlike in every router process of a machine; default: from the environment, else the pid.

    Raises:
        ValueError: an id is out of its range.
    """

    def __init__(self, clock: Clock, *, node_id: int | None = None, process_id: int | None = None) -> None:
        node = uuid.getnode() % (1 << _NODE_BITS) if node_id is None else node_id
        process = _default_process_id() if process_id is None else process_id
        if not 0 <= node < 1 << _NODE_BITS:
            raise ValueError(f"node_id is {node}; it must be 0 to {(1 << _NODE_BITS) - 1}")
        if not 0 <= process < 1 << _PROCESS_BITS:
            raise ValueError(f"the process id is {process}; it must be 0 to {(1 << _PROCESS_BITS) - 1}")
        self._clock = clock
        self._place = (node << _PROCESS_BITS | process) << _COUNTER_BITS
        self._last_ms = -1
        self._counter = 0

    def next(self) -> int:
        """A new id in [2**40, 2**63 - 1)."""
        now_ms = int(self._clock.monotonic_s() * 1000)
        if now_ms > self._last_ms:
            self._last_ms, self._counter = now_ms, 0
        else:
            self._counter += 1
            if self._counter >= 1 << _COUNTER_BITS:  # this millisecond is used up: borrow from the next one
                self._last_ms, self._counter = self._last_ms + 1, 0
        time_part = self._last_ms & ((1 << _TIME_BITS) - 1)
        value = time_part << (_NODE_BITS + _PROCESS_BITS + _COUNTER_BITS) | self._place | self._counter
        return value % _SPAN + LOCAL_ID_LIMIT


def _default_process_id() -> int:
    given = os.environ.get(PROCESS_ID_VARIABLE)
    if given is None:
        return os.getpid() % (1 << _PROCESS_BITS)
    if not given.isdigit():
        raise ValueError(f"{PROCESS_ID_VARIABLE} is {given!r}; it must be a number")
    return int(given)
