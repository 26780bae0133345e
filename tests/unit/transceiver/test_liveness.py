from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from kvmesh.transceiver.liveness import ProcessGoneError, ProcessIdentity, _start_ticks, open_process


def identity_of(pid: int) -> ProcessIdentity:
    mine = ProcessIdentity.current()
    return ProcessIdentity(mine.boot_id, mine.pid_namespace, pid, _start_ticks(pid))


def test_the_end_of_a_process_is_seen() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identity_of(child.pid)
    pidfd = open_process(identity)
    assert pidfd is not None
    try:
        assert select.select([pidfd], [], [], 0) == ([], [], [])
        child.kill()
        assert select.select([pidfd], [], [], 10)[0] == [pidfd]
    finally:
        os.close(pidfd)
        child.communicate()
    with pytest.raises(ProcessGoneError):
        open_process(identity)


def test_a_reused_number_is_another_process() -> None:
    mine = ProcessIdentity.current()
    with pytest.raises(ProcessGoneError):
        open_process(ProcessIdentity(mine.boot_id, mine.pid_namespace, mine.pid, mine.start_ticks + 1))


@pytest.mark.parametrize("field", ["boot_id", "pid_namespace"])
def test_a_process_elsewhere_cannot_be_watched(field: str) -> None:
    mine = ProcessIdentity.current()
    values = {name: getattr(mine, name) for name in mine.__struct_fields__}
    assert open_process(ProcessIdentity(**{**values, field: "elsewhere"})) is None
