"""Addresses to listen at, and from the one that was bound to the one that others connect to."""

from __future__ import annotations

import errno
import os
import socket

__all__ = ["BindError", "listen", "reachable_endpoint", "reachable_host", "specific_host"]

_WILDCARDS = frozenset({"*", "0.0.0.0", "::", "[::]"})  # noqa: S104  compared with, not bound


class BindError(OSError):
    """A service cannot bind an address of its settings; the message is a sentence for the person who set it.

    Args:
        setting: its name, with the sections that it is in: ``kv_events_config.endpoint``.
        address: its value.
        number: of the error.
    """

    def __init__(self, setting: str, address: object, number: int) -> None:
        self.setting = setting
        if number == errno.EADDRINUSE:
            why = "is taken"
        else:
            # Where a name is not found, the number is the resolver's and no system error.
            why = f"cannot be bound ({os.strerror(number) if number > 0 else 'no such name'})"
        super().__init__(number, f"{setting} {address} {why}")

    def __str__(self) -> str:
        return f"{self.strerror}; choose another"


def listen(host: str, port: int = 0, *, backlog: int = 256) -> socket.socket:
    """A TCP listener, IPv4 or IPv6 as the address says; port 0: one of the system's choice.

    Raises:
        OSError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


def reachable_host(host: str) -> str:
    """A host that others can connect to: a wildcard is none, so this machine's own address stands for it."""
    if host not in _WILDCARDS:
        return f"[{host}]" if ":" in host and not host.startswith("[") else host
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"  # a machine that does not know its own name is alone


def specific_host(host: str) -> str:
    """The address to bind where peers are told the one that is bound: this machine's own for a wildcard."""
    return reachable_host(host) if host in _WILDCARDS else host


def reachable_endpoint(asked: str, bound: str) -> str:
    """The ZMQ endpoint that others connect to, from the one asked for and the socket's ``LAST_ENDPOINT``."""
    if not asked.startswith("tcp://"):
        return asked
    host = asked.removeprefix("tcp://").rpartition(":")[0]
    return f"tcp://{reachable_host(host)}:{bound.rpartition(':')[2]}"
