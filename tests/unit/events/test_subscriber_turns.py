"""A message that comes while a connection comes up belongs to that connection, not to the one before."""

from __future__ import annotations

import struct
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import zmq
from wire_publisher import payload

from kvmesh.events import subscriber as module
from kvmesh.events.subscriber import EventSubscriber

STREAM, MONITOR = "stream", "monitor"


@pytest.mark.parametrize("again", [True, False])
async def test_a_message_is_not_taken_before_the_story_of_its_connection(
    monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Another life's first message may be there as soon as its connection is, with just the number that is next."""
    said = {
        STREAM: [[b"t", bytes(8), payload({"type": "AllBlocksCleared"})]],
        MONITOR: [[struct.pack("=hi", zmq.EVENT_HANDSHAKE_SUCCEEDED, 0), b"tcp://p"]] * (2 if again else 1),
    }
    order: list[str] = []

    def receive(socket: Any) -> Any:
        if not order and socket == MONITOR:
            order.append("asked too early")
            return None
        order.append(socket)
        return said[socket].pop(0) if said[socket] else None

    monkeypatch.setattr(module, "receive", receive)
    heard: list[str] = []
    with zmq.Context() as context, anyio.CancelScope() as scope:
        subscriber = EventSubscriber("tcp://p", None, context=context)
        subscriber._ordered.deliver = lambda item: heard.append(type(item).__name__)

        async def idle(*_: object) -> None:
            scope.cancel()
            await anyio.lowlevel.checkpoint()

        monkeypatch.setattr(subscriber, "_idle", idle)
        await subscriber._follow(STREAM, MONITOR)  # type: ignore[arg-type]
    assert heard == (["Connected", "Reset", "Connected", "Batch"] if again else ["Connected", "Batch"])
