"""Files with secrets that others on the machine may read are told of."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from kvmesh.config import WorkerSettings
from kvmesh.net.auth import ApiKeys
from kvmesh.net.private_files import is_public
from kvmesh.worker.server import WorkerService


@pytest.mark.parametrize(("mode", "public"), [(0o600, False), (0o440, False), (0o644, True), (0o660, True)])
def test_keys_that_others_may_read_are_told_of(mode: int, public: bool, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-one")
    file.chmod(mode)
    assert is_public(file) is public
    with structlog.testing.capture_logs() as lines:
        ApiKeys(file)
    told = [line["setting"] for line in lines if line["event"] == "others may read a secret, or change it"]
    assert told == (["api_keys_file"] if public else [])


def test_a_file_that_is_not_there_is_told_of_by_others(tmp_path: Path) -> None:
    assert not is_public(tmp_path / "none")


def test_the_cluster_secret_of_a_server_is_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("s")
    file.chmod(0o644)
    with structlog.testing.capture_logs() as lines:
        WorkerService(WorkerSettings(role="context", cluster_secret_file=str(file)))
    assert "cluster_secret_file" in [line.get("setting") for line in lines]
