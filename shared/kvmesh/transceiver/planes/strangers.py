"""Connections whose peer has not shown yet that it belongs here: few and short-lived, whoever opens them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Final

from kvmesh.telemetry import get_logger
from kvmesh.transceiver.borders import isolated
from kvmesh.transceiver.planes.sockets import shut

__all__ = ["MAX_STRANGERS", "Strangers"]

MAX_STRANGERS: Final = 64


class Strangers:
    """Serves every connection in a thread of its own. When there are too many strangers, the oldest has to go.

    Args:
        name: of the threads.
        most: how many strangers there may be.
    """

    def __init__(self, name: str, most: int = MAX_STRANGERS) -> None:
        self._name = name
        self._most = most
        self._lock = threading.Lock()
        self._waiting: dict[socket.socket, None] = {}
        """Oldest first."""
        self._log = get_logger("transceiver.strangers")

    def __len__(self) -> int:
        return len(self._waiting)

    def meet(self, connection: socket.socket, serve: Callable[[socket.socket], None]) -> threading.Thread | None:
        """Serve a new connection. It is closed when ``serve`` fails, or when the system has no thread for it (None)."""
        with self._lock:
            if len(self._waiting) >= self._most:
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                shut(oldest)
            self._waiting[connection] = None
        thread = threading.Thread(target=self._run, args=(connection, serve), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._log.warning("a connection is closed", reason=str(error), thread=self._name)
            self.know(connection)
            connection.close()
            return None
        return thread

    def know(self, connection: socket.socket) -> None:
        """The peer belongs here, or is gone."""
        with self._lock:
            self._waiting.pop(connection, None)

    def close(self) -> None:
        """Shut the connections of those who are strangers still."""
        with self._lock:
            waiting, self._waiting = list(self._waiting), {}
        for connection in waiting:
            shut(connection)

    def _run(self, connection: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        try:
            serve(connection)
        except Exception:
            # The border of error isolation: what one peer makes go wrong ends its own connection only.
            isolated(self._log, "a connection is closed: it could not be served", thread=self._name)
            shut(connection)
            connection.close()
        finally:
            self.know(connection)
