"""A defect that one peer brings about is logged, counted, and ends nothing of the others."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from kvmesh.transceiver.borders import isolated, isolated_errors_total
from kvmesh.transceiver.control import Control
from kvmesh.transceiver.planes.strangers import Strangers
from kvmesh.transceiver.types import PeerKey

WAIT_S = 20


class FakeLog:
    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, object]]] = []

    def exception(self, event: str, **fields: object) -> None:
        self.said.append((event, fields))


class DefectiveHandler:
    """Fails at whatever it hears."""

    def __init__(self) -> None:
        self.heard = 0

    def _fail(self, *_heard: object) -> None:
        self.heard += 1
        raise ZeroDivisionError

    on_message = on_connected = on_disconnected = on_process_ended = _fail


def test_an_isolated_error_is_logged_and_counted() -> None:
    log, before = FakeLog(), isolated_errors_total()
    isolated(log, "something failed", peer="a#1")
    assert isolated_errors_total() == before + 1
    assert log.said == [("something failed", {"peer": "a#1"})]


def test_a_connection_that_cannot_be_served_is_counted() -> None:
    def fail(_connection: socket.socket) -> None:
        raise ZeroDivisionError

    before = isolated_errors_total()
    ours, theirs = socket.socketpair()
    with theirs:
        thread = Strangers("test").meet(ours, fail)
        assert thread is not None
        thread.join(WAIT_S)
    assert isolated_errors_total() == before + 1


@pytest.mark.parametrize("told", [lambda one: one._handler.on_connected, lambda one: one._handler.on_process_ended])
def test_what_becomes_of_a_peer_ends_no_control_thread(told: Callable[[Control], Callable[[object], None]]) -> None:
    handler = DefectiveHandler()
    control = Control("engine", "127.0.0.1", handler)
    before = isolated_errors_total()
    control._tell(told(control), PeerKey("peer", 1))
    assert handler.heard == 1
    assert isolated_errors_total() == before + 1
    assert control.error is None
