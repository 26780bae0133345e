"""A doorbell, rung by threads and by other processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.net.doorbell import BellRope, Doorbell

LONG_S = 60.0
"""A wait that is ended; no test gets there."""


@pytest.fixture
def bell() -> Iterator[Doorbell]:
    bell = Doorbell()
    yield bell
    bell.close()


def test_a_ring_is_remembered_until_it_is_silenced(bell: Doorbell) -> None:
    assert not bell.wait(0)
    bell.silence()
    bell.ring()
    bell.ring()
    assert bell.wait(LONG_S)
    assert bell.wait(LONG_S), "nobody has silenced it"
    bell.silence()
    assert not bell.wait(0)


def test_a_wait_takes_its_time_and_no_longer(bell: Doorbell) -> None:
    begun_s = time.monotonic()
    assert not bell.wait(0.02)
    assert time.monotonic() - begun_s >= 0.02


def test_a_wait_of_any_length_is_one(bell: Doorbell) -> None:
    bell.ring()
    assert bell.wait(1e12)
    assert bell.wait(float("inf"))


def test_a_ring_of_another_thread_ends_a_wait(bell: Doorbell) -> None:
    other = threading.Thread(target=bell.ring)
    other.start()
    assert bell.wait(LONG_S)
    other.join()


def test_a_bell_that_nobody_hears_never_blocks(bell: Doorbell) -> None:
    """A pipe holds 64 KiB."""
    rope = BellRope(os.getpid(), bell.sign)
    for _ in range(70_000):
        bell.ring()
    rope.pull()
    assert bell.wait(0)


def test_another_process_rings(bell: Doorbell) -> None:
    program = (
        "import sys; from kvmesh.net.doorbell import BellRope, BellSign; "
        "BellRope(int(sys.argv[1]), BellSign(*map(int, sys.argv[2:]))).pull()"
    )
    sign = bell.sign
    numbers = [str(number) for number in (os.getpid(), sign.fd, sign.device, sign.inode)]
    subprocess.run([sys.executable, "-c", program, *numbers], check=True, timeout=LONG_S)
    assert bell.wait(0)


def test_other_files_are_no_bell(bell: Doorbell) -> None:
    another = Doorbell()
    with pytest.raises(FileNotFoundError, match="another file than its doorbell"):
        BellRope(os.getpid(), bell.sign.__class__(another.fd, bell.sign.device, bell.sign.inode))
    another.close()
    for fd in (another.fd, 1 << 20):
        with pytest.raises(OSError, match=r".+"):
            BellRope(os.getpid(), bell.sign.__class__(fd, bell.sign.device, bell.sign.inode))


def test_a_closed_bell_is_not_rung(bell: Doorbell) -> None:
    rope = BellRope(os.getpid(), bell.sign)
    bell.close()
    bell.close()
    bell.ring()
    rope.pull()


def test_descriptors_go_with_the_last_reference() -> None:
    bell = Doorbell()
    rope = BellRope(os.getpid(), bell.sign)
    pipe = f"pipe:[{bell.sign.inode}]"
    assert open_descriptors(pipe) == 3
    del bell, rope
    assert open_descriptors(pipe) == 0


def open_descriptors(target: str) -> int:
    """How many descriptors of this process mean this file."""
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # Another thread may have closed it.
            count += str(descriptor.readlink()) == target
    return count
