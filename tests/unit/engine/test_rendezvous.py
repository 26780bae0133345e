"""The meeting place of front and engine: private, gone afterwards, swept after a killed front."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvmesh.engine.rendezvous import MAX_PARENT_BYTES, rendezvous, sweep


def test_private_and_gone_afterwards() -> None:
    with rendezvous() as endpoint:
        directory = Path(endpoint.removeprefix("ipc://")).parent
        assert directory.stat().st_mode & 0o777 == 0o700
    assert not directory.exists()


@pytest.mark.parametrize("more", [0, 1])
def test_a_name_that_is_too_long_for_sockets(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """The longest that still fits is used."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        longest = Path(directory) / ("x" * (MAX_PARENT_BYTES - len(directory) - 1 + more))
        longest.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(longest))
        with rendezvous() as endpoint, socket.socket(socket.AF_UNIX) as bound:
            path = Path(endpoint.removeprefix("ipc://"))
            assert path.is_relative_to(longest) == (not more)
            bound.bind(str(path))


def test_only_what_dead_fronts_left_is_swept(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = tmp_path / f"kvmesh-engine-{ended.pid}-abc"
    living = tmp_path / f"kvmesh-engine-{os.getpid()}-abc"
    foreign = tmp_path / "kvmesh-engine-other-abc"
    for directory in (left, living, foreign):
        directory.mkdir()
        (directory / "engine.sock").touch()
    assert sweep(tmp_path) == [left]
    assert not left.exists()
    assert living.exists()
    assert foreign.exists()
