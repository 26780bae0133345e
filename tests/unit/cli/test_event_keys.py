"""``kvmesh keys curve`` and ``kvmesh keys events``: files that services take."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.cli.main import main
from kvmesh.config.curve import CurveSettings
from kvmesh.events.keyed import KeyRing
from kvmesh.net.curve import CurveSecurity


def test_a_pair_that_services_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "curve"
    assert main(["keys", "curve", str(directory)]) == 0
    public, secret = capsys.readouterr().out.split()
    assert (public, secret) == (f"{directory}/kvmesh.key", f"{directory}/kvmesh.key_secret")
    assert CurveSecurity.load(CurveSettings(key_file=secret, client_keys=public)) is not None
    assert main(["keys", "curve", str(directory)]) == 2
    assert "already" in capsys.readouterr().err
    assert main(["keys", "curve", str(directory), "--name", "router"]) == 0
    assert len(list(directory.iterdir())) == 4


@pytest.mark.parametrize(
    "arguments", [["curve", "{dir}", "--name", "../x"], ["curve", "/proc/nothing"], ["events", "/proc/nothing/x"]]
)
def test_what_cannot_be_written_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(["keys", *(argument.format(dir=tmp_path) for argument in arguments)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_new_key_of_events_comes_first_and_the_older_ones_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "events.keys"
    said = []
    for _ in range(2):
        assert main(["keys", "events", str(file)]) == 0
        said.append(capsys.readouterr().out)
    ring = KeyRing.load(file, "x")
    assert ring is not None
    assert [key.key_id in text for key, text in zip(ring, reversed(said), strict=True)] == [True, True]
    assert file.stat().st_mode & 0o777 == 0o600
    assert not any(line in "".join(said) for line in file.read_text().split()), "secrets are not printed"
    file.write_bytes(b"\xff")
    assert main(["keys", "events", str(file)]) == 2
