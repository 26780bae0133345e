"""Addresses to listen at, and from the one that was bound to the one that others connect to."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import zmq

__all__ = ["BindError", "choose_family", "listen", "reachable_endpoint", "reachable_host", "specific_host", "uses_ipv6"]

_IPV4_ROUTES = Path("/proc/net/route")
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
    """A TCP listener, IPv4 or IPv6 as the address says (``::``: both); port 0: one of the system's choice.

    Raises:
        OSError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=both)


def reachable_host(host: str) -> str:
    """A host that others can connect to: a wildcard is none, so this machine's own address stands for it."""
    if host not in _WILDCARDS:
        return f"[{host}]" if ":" in host and not host.startswith("[") else host
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError:
        pass
    try:
        found = socket.getaddrinfo(name, None, family=socket.AF_INET6, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    # What holds only on one link (fe80::...%eth0) is no address for others.
    usable = [str(address[0]) for *_, address in found if "%" not in str(address[0])]
    return f"[{usable[0]}]" if usable else "127.0.0.1"  # a machine that does not know its own name is alone


def specific_host(host: str) -> str:
    """The address to bind where peers are told the one that is bound: this machine's own for a wildcard."""
    return reachable_host(host) if host in _WILDCARDS else host


def reachable_endpoint(asked: str, bound: str) -> str:
    """The ZMQ endpoint that others connect to, from the one asked for and the socket's ``LAST_ENDPOINT``."""
    if not asked.startswith("tcp://"):
        return asked
    host = asked.removeprefix("tcp://").rpartition(":")[0]
    return f"tcp://{reachable_host(host)}:{bound.rpartition(':')[2]}"


def uses_ipv6(endpoint: str) -> bool:
    """Whether a ZMQ socket has to be allowed IPv6 for an endpoint, to bind or to connect to.

    With ``*`` it then listens on both. ZMQ looks a name up in one family only: in IPv6 where this machine has no IPv4,
    in IPv4 elsewhere.
    """
    if not endpoint.startswith("tcp://"):
        return False
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    if ":" in host:
        return True
    if host == "*":
        return socket.has_dualstack_ipv6()
    is_name = host != "localhost" and not host.replace(".", "").isdigit()
    return is_name and not _has_ipv4()


def choose_family(socket: zmq.Socket[Any], endpoint: str) -> None:
    """Let a ZMQ socket speak the family of an endpoint; before it binds or connects."""
    socket.ipv6 = uses_ipv6(endpoint)


def _has_ipv4() -> bool:
    """Whether there is a route for IPv4 beside loopback, which has none in this table."""
    try:
        return len(_IPV4_ROUTES.read_text(encoding="ascii").splitlines()) > 1
    except OSError:
        return True  # another system than Linux
