"""Available memory, from files as the kernel writes them (§2 host_cache_size)."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from kvmesh.cache.probe import available_host_bytes, memlock_limit_bytes

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine of 64 GiB of which 40 are available, without control groups."""
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemFree: 99 kB\nMemAvailable: {40 << 20} kB\n")
    return tmp_path


def write(root: Path, path: str, text: object) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(str(text))


def v2_group(root: Path, path: str, limit: object, usage: int, inactive: int = 0) -> None:
    write(root, f"sys/fs/cgroup/{path}/memory.max", f"{limit}\n")
    write(root, f"sys/fs/cgroup/{path}/memory.current", f"{usage}\n")
    write(root, f"sys/fs/cgroup/{path}/memory.stat", f"anon 1\nfile 2\ninactive_file {inactive}\n")


def test_a_machine_without_groups(machine: Path) -> None:
    assert available_host_bytes(machine) == 40 * GIB


def test_this_machine() -> None:
    assert available_host_bytes() > 0


def test_nothing_is_known(tmp_path: Path) -> None:
    assert available_host_bytes(tmp_path) == 0


def test_the_groups_limit_counts_and_cache_that_can_go_does_not(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/pod/container\n")
    v2_group(machine, "pod/container", 8 * GIB, 6 * GIB, inactive=3 * GIB)
    assert available_host_bytes(machine) == 5 * GIB
    v2_group(machine, "pod/container", 8 * GIB, 9 * GIB)
    assert available_host_bytes(machine) == 0


def test_the_tightest_group_around_the_process_counts(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/pod/container\n")
    v2_group(machine, "pod/container", "max", 6 * GIB)
    v2_group(machine, "pod", 7 * GIB, 6 * GIB)
    v2_group(machine, "elsewhere", 1, 1)
    assert available_host_bytes(machine) == GIB


def test_a_loose_group_does_not_count(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/\n")
    v2_group(machine, "", 100 * GIB, 2 * GIB)
    assert available_host_bytes(machine) == 40 * GIB


@pytest.mark.parametrize("place", ["docker/abc", ""])
def test_version_1_in_a_container_that_sees_only_the_root_of_its_group(machine: Path, place: str) -> None:
    write(machine, "proc/self/cgroup", "5:cpu:/x\n4:cpuset,memory:/docker/abc\n0::/\n")
    group = f"sys/fs/cgroup/memory/{place}"
    write(machine, f"{group}/memory.limit_in_bytes", 4 * GIB)
    write(machine, f"{group}/memory.usage_in_bytes", 3 * GIB)
    write(machine, f"{group}/memory.stat", f"inactive_file 5\ntotal_inactive_file {GIB}\n")
    assert available_host_bytes(machine) == 2 * GIB


def test_the_address_space_counts_without_what_is_mapped(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(machine, "proc/self/statm", "100 50 20 1 0 30 0\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (GIB, resource.RLIM_INFINITY))
    assert available_host_bytes(machine) == GIB - 100 * resource.getpagesize()


def test_memlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, resource.RLIM_INFINITY))
    assert memlock_limit_bytes() == 8 << 20
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert memlock_limit_bytes() is None
