"""Which address others are told."""

from __future__ import annotations

import socket

import pytest

from kvmesh.net.address import reachable_endpoint, reachable_host, specific_host

OWN = "10.1.2.3"


@pytest.fixture(autouse=True)
def _own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda _name: OWN)


@pytest.mark.parametrize("wildcard", ["*", "0.0.0.0", "::", "[::]"])
def test_nobody_can_connect_to_a_wildcard(wildcard: str) -> None:
    assert reachable_host(wildcard) == specific_host(wildcard) == OWN
    assert reachable_endpoint(f"tcp://{wildcard}:*", f"tcp://{wildcard}:5557") == f"tcp://{OWN}:5557"


def test_an_address_is_bound_as_it_is_written() -> None:
    assert specific_host("127.0.0.2") == reachable_host("127.0.0.2") == "127.0.0.2"
    assert (specific_host("::1"), reachable_host("::1")) == ("::1", "[::1]")


def test_a_machine_without_a_name_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_name: str) -> str:
        raise OSError

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert specific_host("0.0.0.0") == "127.0.0.1"
