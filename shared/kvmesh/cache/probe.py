"""What the machine has for a host tier: memory that can be had, and how much of it may be page-locked."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["available_host_bytes", "memlock_limit_bytes"]


class _Controller(NamedTuple):
    """Where one version of control groups keeps its memory accounts."""

    mount: str
    limit: str
    usage: str
    inactive: str
    """The line of ``memory.stat`` with the cached file pages that the kernel gives up first."""


_V2 = _Controller("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_V1 = _Controller("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process can use without swapping or being killed for them.

    The smallest of the machine's ``MemAvailable``, of what ``RLIMIT_AS`` lets this process still map, and of what is
    left to the control groups around this process: the limit without the usage, where cached file pages that can go do
    not count as used (they are what a freshly loaded checkpoint leaves). Without such facts: 0.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    candidates = [_meminfo_bytes(root), *_address_space_bytes(root)]
    for controller, group in _groups(root):
        candidates += _left_bytes(controller, group)
    return max(0, min(candidates))


def memlock_limit_bytes() -> int | None:
    """``RLIMIT_MEMLOCK`` of this process; None where there is no limit."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _meminfo_bytes(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 0


def _address_space_bytes(root: Path) -> list[int]:
    """What this process may still map; nothing where it has no limit."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return []
    mapped_pages, *_ = _read(root / "proc/self/statm").split() or ["0"]
    return [soft - int(mapped_pages) * resource.getpagesize()]


def _groups(root: Path) -> Iterator[tuple[_Controller, Path]]:
    """The control groups of this process, from its own to the outermost that can be seen."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            controller = _V2
        elif "memory" in controllers.split(","):
            controller = _V1
        else:
            continue
        mount = root / controller.mount
        group = mount / path.lstrip("/")
        # In a container the path may be the host's, of which only the mount's root is there.
        yield from ((controller, at) for at in (group, *group.parents) if at == mount or mount in at.parents)


def _left_bytes(controller: _Controller, group: Path) -> list[int]:
    """What one group has left; nothing where it has no limit."""
    limit, usage = _read(group / controller.limit).strip(), _read(group / controller.usage).strip()
    if not limit.isdigit() or not usage.isdigit():
        return []
    inactive = 0
    for line in _read(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == controller.inactive:
            inactive = int(value)
    return [int(limit) - max(0, int(usage) - inactive)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
