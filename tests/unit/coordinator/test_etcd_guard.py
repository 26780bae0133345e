"""Before a member of the chart's etcd starts: changes that would make two clusters of one, or none, are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import EtcdServer, etcd_binary, why_no_etcd

from kvmesh.coordinator.etcd_guard import judge, main

ONE = {"etcd-0": "http://etcd-0.etcd:2380"}
THREE = {f"etcd-{i}": f"http://etcd-{i}.etcd:2380" for i in range(3)}
SECURE = {name: url.replace("http:", "https:") for name, url in THREE.items()}


def test_members_of_a_new_cluster_begin_one_after_the_other() -> None:
    assert judge("etcd-0", THREE, None, has_data=False, running=None) == (None, False, None)
    assert judge("etcd-2", THREE, None, has_data=False, running=None).wait
    assert judge("etcd-2", THREE, None, has_data=False, running=list(THREE.values())) == (None, False, None)


def test_a_member_that_was_there_starts() -> None:
    for recorded in (THREE, None):
        assert judge("etcd-1", THREE, recorded, has_data=True, running=None) == (None, False, None)


def test_more_members_do_not_start_beside_the_one_that_runs() -> None:
    """They would be a cluster of their own; the one that runs goes on."""
    for name in ("etcd-1", "etcd-2"):
        refusal = judge(name, THREE, None, has_data=False, running=list(ONE.values())).refusal
        assert refusal is not None
        assert "set it to 1" in refusal
    stays = judge("etcd-0", THREE, ONE, has_data=True, running=None)
    assert stays.refusal is None
    assert stays.note is not None


def test_fewer_members_would_have_no_majority() -> None:
    refusal = judge("etcd-0", ONE, THREE, has_data=True, running=None).refusal
    assert refusal is not None
    assert "set it to 3" in refusal


def test_members_keep_the_addresses_that_they_know_each_other_by() -> None:
    refusal = judge("etcd-2", SECURE, THREE, has_data=True, running=None).refusal
    assert refusal is not None
    assert "set tls.enabled back" in refusal
    alone = {"etcd-0": SECURE["etcd-0"]}
    assert judge("etcd-0", alone, ONE, has_data=True, running=None) == (None, False, None), "nobody looks for it"


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    if etcd_binary() is None:
        pytest.skip(why_no_etcd())
    server = EtcdServer()
    try:
        yield server.start()
    finally:
        server.stop()


def test_a_real_one_says_who_its_members_are(
    etcd: EtcdServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members = f"test={etcd.peer_url},other=http://127.0.0.1:1"

    def guard(name: str, directory: Path, flags: str) -> int:
        record = tmp_path / f"{name}.json"
        return main(["--data-dir", str(directory), "--record", str(record), "--name", name, "--members", flags])

    assert guard("other", tmp_path / "empty", members) == 1
    assert "an etcd of 1 members runs" in capsys.readouterr().err
    data = etcd.directory / "data"
    assert guard("test", data, f"test={etcd.peer_url}") == 0
    assert guard("test", data, members) == 0
    assert "goes on as the only member" in capsys.readouterr().err
    assert guard("test", data, f"test={etcd.peer_url}") == 0, "what was recorded is what it began with"
    assert capsys.readouterr().err == ""
    assert guard("first", tmp_path / "empty", "first=http://127.0.0.1:1,second=http://127.0.0.1:2") == 0
