"""``kvmesh keys tls`` and ``kvmesh keys api``, and whom the other commands trust."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from kvmesh.cli.errors import UserError
from kvmesh.cli.main import main
from kvmesh.cli.rundir import MeshState, ProcessState
from kvmesh.cli.trust import tls_from
from kvmesh.config.tls import TlsSettings
from kvmesh.net.auth import read_keys
from kvmesh.net.tls import Tls


def test_certificates_bear_the_names_and_are_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "keys"
    assert main(["keys", "tls", str(directory), "--name", "router", "--name", "10.0.0.7", "--days", "3"]) == 0
    ca, _ca_key, certificate, key = capsys.readouterr().out.split()
    loaded = Tls(TlsSettings(cert_file=certificate, key_file=key, ca_file=ca)).certificate
    assert loaded is not None
    assert {"router", "10.0.0.7", "kvmesh.internal"} < set(loaded.names)
    first = Path(certificate).read_bytes(), Path(ca).read_bytes()
    assert main(["keys", "tls", str(directory)]) == 0
    assert Path(certificate).read_bytes() != first[0]
    assert Path(ca).read_bytes() == first[1], "whoever trusts it goes on doing so"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tls", "{dir}", "--days", "0"], "--days must be above 0"),
        (["tls", "{dir}", "--stem", "../x"], "no plain file name"),
        (["tls", "{dir}", "--name", "ä.example"], "neither a host name nor an address"),
        (["tls", "/proc/nowhere"], "cannot write to /proc/nowhere"),
        (["api", "{dir}/keys", "a b"], "is no name for a key"),
        (["api", "/nowhere/keys", "ada"], "cannot write /nowhere/keys"),
    ],
)
def test_what_cannot_be_made_is_told(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", *(argument.format(dir=tmp_path) for argument in arguments)]) == 2
    assert says in capsys.readouterr().err


def test_a_directory_with_half_an_authority_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ca.crt").write_text("something precious")
    assert main(["keys", "tls", str(tmp_path)]) == 2
    assert "no authority that can sign" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["ca.crt"]


def test_api_keys_are_added_and_private(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    assert main(["keys", "api", str(file), "ada"]) == 0
    first = capsys.readouterr().out.strip()
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text(file.read_text().rstrip("\n"))
    assert main(["keys", "api", str(file), "bob"]) == 0
    second = capsys.readouterr().out.strip()
    assert read_keys(file) == {first: "ada", second: "bob"}
    assert main(["keys", "api", str(file), "ada"]) == 2
    assert "has a key named ada already" in capsys.readouterr().err


def state(**tls: str) -> MeshState:
    supervisor = ProcessState(name="supervisor", pid=1, start_ticks=1)
    return MeshState(
        phase="ready", supervisor=supervisor, url="", coordinator_url="", indexer_url="", model="", temp_dir="", tls=tls
    )


def test_flags_beat_the_environment_which_beats_the_running_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "tls", str(tmp_path)]) == 0
    ca = str(tmp_path / "ca.crt")
    running = state(ca_file=ca, server_name="of the mesh")
    assert tls_from(argparse.Namespace(), running).settings.server_name == "of the mesh"
    assert tls_from(argparse.Namespace(), None).for_request() == {}
    monkeypatch.setenv("KVMESH_TLS__CA_FILE", ca)
    monkeypatch.setenv("KVMESH_TLS__SERVER_NAME", "of the environment")
    assert tls_from(argparse.Namespace(), running).settings.server_name == "of the environment"
    flags = argparse.Namespace(server_name="of the flag", ca_file=None)
    assert tls_from(flags, running).settings.server_name == "of the flag"
    with pytest.raises(UserError, match=r"cannot read tls\.ca_file"):
        tls_from(argparse.Namespace(ca_file="/nowhere"), running)
