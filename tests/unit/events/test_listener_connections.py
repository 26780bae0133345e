"""What still waits of a connection that has ended is not told after what came on the next."""

from __future__ import annotations

from typing import Any

import anyio
import zmq
from wire_publisher import payload

from kvmesh.events.listener import Admission, EventListener

FIRST, SECOND = 7, 8


def frames(number: int, life: int) -> list[bytes]:
    return [b"t", number.to_bytes(8, "big"), payload({"type": "AllBlocksCleared"}, ts=float(life))]


async def test_the_rest_of_an_earlier_connection_is_left_out() -> None:
    """The sockets' queues are read in turn, so it may come late, with just the number that would be next."""
    heard: list[Any] = []

    def told() -> list[tuple[int, int]]:
        return [(item.sequence, int(item.records.ts)) for item in heard if type(item).__name__ == "Batch"]

    with zmq.Context() as context:
        listener = EventListener("tcp://127.0.0.1:*", lambda *_: Admission(heard.append), context=context)
        async with anyio.create_task_group() as tasks:
            listener._take(FIRST, frames(0, 1), tasks)
            listener._connection_changed(int(zmq.EVENT_DISCONNECTED), FIRST)
            listener._take(FIRST, frames(1, 1), tasks)
            listener._take(SECOND, frames(0, 2), tasks)
            listener._take(FIRST, frames(1, 1), tasks)
            listener._take(SECOND, frames(1, 2), tasks)
            with anyio.fail_after(5):
                while len(told()) < 4:  # noqa: ASYNC110 - what is waited for has no event
                    await anyio.sleep(0.002)
            tasks.cancel_scope.cancel()
    assert told() == [(0, 1), (1, 1), (0, 2), (1, 2)]
    assert listener.ignored_total == 1
