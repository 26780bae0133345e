"""The meeting place of front and engine: private, gone afterwards, swept after a killed front."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kvmesh.engine.rendezvous import rendezvous, sweep


def test_private_and_gone_afterwards() -> None:
    with rendezvous() as endpoint:
        directory = Path(endpoint.removeprefix("ipc://")).parent
        assert directory.stat().st_mode & 0o777 == 0o700
    assert not directory.exists()


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
