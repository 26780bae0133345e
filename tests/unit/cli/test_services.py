"""What a service says that cannot start: which setting is at fault, and the flag that changes it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from kvmesh.cli.main import USER_ERROR, main

FREE = "tcp://127.0.0.1:*"


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for service in ("indexer", "coordinator"):
        monkeypatch.setattr(f"kvmesh.{service}.main.configure_logging", lambda *_: None)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == USER_ERROR
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_a_taken_http_port_is_named(capsys: pytest.CaptureFixture[str], taken: int) -> None:
    assert refusal(capsys, "coordinator", f"--port={taken}") == (
        f"kvmesh coordinator: port {taken} is taken; choose another with --port (0: any free one)"
    )


@pytest.mark.parametrize(
    ("flag", "others"),
    [
        ("--match-endpoint", {}),
        ("--listen-endpoint", {"--match-endpoint": FREE}),
        ("--publish-endpoint", {"--match-endpoint": FREE}),
        ("--publish-replay-endpoint", {"--match-endpoint": FREE, "--publish-endpoint": FREE}),
    ],
)
def test_a_taken_endpoint_is_not_taken_for_the_http_port(
    capsys: pytest.CaptureFixture[str], taken: int, flag: str, others: dict[str, str]
) -> None:
    endpoint = f"tcp://127.0.0.1:{taken}"
    given = [f"{name}={value}" for name, value in {**others, flag: endpoint}.items()]
    assert refusal(capsys, "indexer", "--port=0", *given) == (
        f"kvmesh indexer: {flag[2:].replace('-', '_')} {endpoint} is taken; choose another with {flag}"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("coordinator", "--port=0", "--host=192.0.2.1"), "host 192.0.2.1 cannot be bound (Cannot assign"),
        (
            ("indexer", "--port=0", "--match-endpoint=tcp://192.0.2.1:8301"),
            "match_endpoint tcp://192.0.2.1:8301 cannot",
        ),
        (
            ("indexer", "--port=0", "--match-endpoint=tcp://nowhere"),
            "match_endpoint tcp://nowhere cannot be bound (Inv",
        ),
    ],
)
def test_an_address_that_is_not_ours_is_a_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    flag = arguments[-1].partition("=")[0]
    sentence = refusal(capsys, *arguments)
    assert sentence.startswith(f"kvmesh {arguments[0]}: {said}")
    assert sentence.endswith(f"; choose another with {flag}")
