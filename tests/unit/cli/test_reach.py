"""What a person is told when a server does not answer as it should."""

from __future__ import annotations

import pytest

from kvmesh.cli.reach import explained
from kvmesh.net.client import HttpClient, PeerUnreachableError


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (
            "its certificate is not signed by the trusted authorities (ca_file)",
            "its certificate is not signed by the trusted authorities (--ca-file)",
        ),
        (
            "it asks for a client certificate (cert_file, key_file)",
            "it asks for a client certificate (--cert-file, --key-file)",
        ),
        ("cannot connect to h:1 (Connection refused)", "cannot connect to h:1 (Connection refused); check --url"),
    ],
)
async def test_certificates_are_not_blamed_on_the_address(found: str, told: str) -> None:
    error = PeerUnreachableError(f"cannot reach https://h:1: {found}")
    shown = await explained(HttpClient(), error, "https://h:1", wanted="router", given=True)
    assert str(shown) == f"cannot reach https://h:1: {told}"
