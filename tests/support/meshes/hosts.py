"""Hosts of their own for the services of a mesh: network namespaces on one bridge, with links that can be cut.

Needs root and ``ip``, ``nsenter`` and ``unshare``; :func:`obstacle` says what is missing.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

__all__ = ["Network", "listening_ports", "obstacle"]

_CLONE_NEWNET = 0x40000000
_PREFIX = "10.77.0"
_DEVICE = "eth0"
_RULE_PRIORITY = "10"
_TOOLS = ("ip", "nsenter", "unshare")
_numbers = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


def obstacle() -> str:
    """Why there can be no namespaces here; empty when there can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "" if done.returncode == 0 else f"no network namespaces: {done.stderr.decode().strip()}"


class Network:
    """A bridge with one namespace for each host, and this process's own place on it, the hub.

    Args:
        hosts: their names.
        apart: whether each is a process id namespace of its own, too, so that no host sees another's processes.
    """

    def __init__(self, hosts: Iterable[str], *, apart: bool) -> None:
        self._name = f"kvm{os.getpid()}n{next(_numbers)}"
        self.apart = apart
        self.addresses: dict[str, str] = {}
        self._hub = f"{self._name}hub"
        _ip("netns", "add", self._hub)
        self._in(self._hub, "link", "add", "br0", "type", "bridge")
        self._in(self._hub, "link", "set", "br0", "up")
        self._in(self._hub, "link", "set", "lo", "up")
        self._in(self._hub, "addr", "add", f"{_PREFIX}.1/24", "dev", "br0")
        for number, host in enumerate(hosts, start=2):
            self._add(host, f"{_PREFIX}.{number}")

    def _add(self, host: str, address: str) -> None:
        space = self._space(host)
        _ip("netns", "add", space)
        self.addresses[host] = address
        self._in(self._hub, "link", "add", self._link(host), "type", "veth", "peer", "name", _DEVICE, "netns", space)
        self._in(self._hub, "link", "set", self._link(host), "master", "br0", "up")
        self._in(space, "link", "set", "lo", "up")
        self._in(space, "link", "set", _DEVICE, "up")
        self._in(space, "addr", "add", f"{address}/24", "dev", _DEVICE)

    def command(self, host: str, argv: list[str]) -> list[str]:
        """``argv`` on that host."""
        apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"] if self.apart else []
        return ["nsenter", f"--net=/run/netns/{self._space(host)}", *apart, *argv]

    def cut(self, host: str) -> None:
        """Take its plug out: packets vanish, nobody is told."""
        self._in(self._hub, "link", "set", self._link(host), "down")

    def mend(self, host: str) -> None:
        """Put the plug in again."""
        self._in(self._hub, "link", "set", self._link(host), "up")

    def block(self, host: str, ports: Iterable[int]) -> None:
        """Drop what this host sends from or to these TCP ports of any host."""
        for port in ports:
            for end in ("sport", "dport"):
                self._in(self._space(host), "rule", "add", "prio", _RULE_PRIORITY, *_tcp(end, port), "blackhole")

    def unblock(self, host: str) -> None:
        """Drop nothing any more."""
        space = self._space(host)
        while (
            subprocess.run(
                ["ip", "-n", space, "rule", "del", "prio", _RULE_PRIORITY], capture_output=True, check=False
            ).returncode
            == 0
        ):
            pass

    @contextmanager
    def entered(self, host: str | None = None) -> Iterator[None]:
        """This thread's new sockets are on that host, or at the hub, which reaches all."""
        space = self._hub if host is None else self._space(host)
        with Path(f"/proc/self/task/{threading.get_native_id()}/ns/net").open() as before:
            with Path(f"/run/netns/{space}").open() as inside:
                _set_namespace(inside.fileno())
            try:
                yield
            finally:
                _set_namespace(before.fileno())

    def run(self, action: Callable[[], T], host: str | None = None) -> T:
        """Call ``action`` on that host, or at the hub."""
        with self.entered(host):
            return action()

    def close(self) -> None:
        """Remove everything."""
        for space in [*map(self._space, self.addresses), self._hub]:
            _ip("netns", "del", space)

    def _space(self, host: str) -> str:
        return f"{self._name}{host}"

    def _link(self, host: str) -> str:
        return f"v{list(self.addresses).index(host)}"

    def _in(self, space: str, *arguments: str) -> None:
        _ip("-n", space, *arguments)


def listening_ports(pid: int) -> set[int]:
    """TCP ports on which a process listens, in its own namespace."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        target = str(entry.readlink())
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def _tcp(end: str, port: int) -> list[str]:
    return ["ipproto", "tcp", end, str(port)]


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


def _set_namespace(fd: int) -> None:
    if _libc.setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")
