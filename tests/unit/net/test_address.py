"""Which address others are told."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import zmq

from kvmesh.net import address
from kvmesh.net.address import (
    choose_family,
    listen,
    reachable_endpoint,
    reachable_host,
    specific_host,
    uses_ipv6,
)

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


def test_a_machine_with_ipv6_only_has_an_address_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_name: str) -> str:
        raise OSError

    def found(_name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        entries = ("fe80::1%eth0", "2001:db8::7")
        return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, 0, 0, 0)) for address in entries]

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    monkeypatch.setattr(socket, "getaddrinfo", found)
    assert reachable_host("::") == "[2001:db8::7]"
    assert reachable_endpoint("tcp://*:*", "tcp://[::]:5557") == "tcp://[2001:db8::7]:5557"


needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


@needs_ipv6
def test_the_wildcard_of_ipv6_takes_both() -> None:
    with listen("::") as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=30).close()


@pytest.mark.parametrize(
    ("endpoint", "with_ipv4", "without"),
    [
        ("tcp://127.0.0.1:5557", False, False),
        ("tcp://[::1]:5557", True, True),
        ("tcp://localhost:5557", False, False),
        ("tcp://mesh-indexer:8301", False, True),
        ("ipc:///tmp/x", False, False),
    ],
)
def test_names_are_looked_up_in_the_family_of_this_machine(
    endpoint: str, with_ipv4: bool, without: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "route"
    monkeypatch.setattr(address, "_IPV4_ROUTES", table)
    table.write_text("Iface\tDestination\n")
    assert uses_ipv6(endpoint) is without
    table.write_text("Iface\tDestination\neth0\t00000000\n")
    assert uses_ipv6(endpoint) is with_ipv4


@needs_ipv6
@pytest.mark.parametrize(("bound", "hosts"), [("*", ("127.0.0.1", "[::1]")), ("[::1]", ("[::1]",))])
def test_sockets_of_events_and_matches_meet_by_ipv6(bound: str, hosts: tuple[str, ...]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with context.socket(zmq.ROUTER) as server:
            choose_family(server, f"tcp://{bound}:*")
            server.bind(f"tcp://{bound}:*")
            port = str(server.get_string(zmq.LAST_ENDPOINT)).rpartition(":")[2]
            for host in hosts:
                with context.socket(zmq.DEALER) as client:
                    client.linger = 0
                    choose_family(client, f"tcp://{host}:{port}")
                    client.connect(f"tcp://{host}:{port}")
                    client.send(b"here")
                    assert server.poll(30_000), host
                    assert server.recv_multipart()[1] == b"here"
    finally:
        context.term()
