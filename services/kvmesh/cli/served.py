"""Which model a server serves."""

from __future__ import annotations

import msgspec

from kvmesh.cli.errors import UserError
from kvmesh.cli.reach import explained
from kvmesh.net.client import HttpClient, PeerUnreachableError
from kvmesh.net.tls import Tls
from kvmesh.protocol.errors import ApiError

__all__ = ["served_model"]


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Card]


async def served_model(
    url: str, headers: dict[str, str] | None = None, given: bool = False, tls: Tls | None = None
) -> str:
    """The first model of ``/v1/models``, of KVMesh or any other OpenAI-compatible server.

    Args:
        url: its base URL.
        headers: such as an API key.
        given: whether the user named the URL.
        tls: whom to trust behind ``https://``.

    Raises:
        UserError: nobody answers, or no model is served.
    """
    async with HttpClient(timeout_s=5.0, headers=headers, tls=tls) as http:
        try:
            models = await http.call("GET", f"{url}/v1/models", _Models)
        except (PeerUnreachableError, ApiError, msgspec.DecodeError) as error:
            raise await explained(http, error, url, wanted="router", given=given) from error
    if not models.data:
        raise UserError(f"{url} serves no model yet; try again in a moment")
    return models.data[0].id
