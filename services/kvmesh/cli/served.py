"""Which model a server serves."""

from __future__ import annotations

import msgspec

from kvmesh.cli.errors import UserError
from kvmesh.net.client import HttpClient, PeerUnreachableError
from kvmesh.protocol.errors import ApiError

__all__ = ["served_model"]


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Card]


async def served_model(url: str, headers: dict[str, str] | None = None) -> str:
    """The first model of ``/v1/models``, of KVMesh or any other OpenAI-compatible server.

    Raises:
        UserError: nobody answers, or no model is served.
    """
    try:
        async with HttpClient(timeout_s=5.0, headers=headers) as http:
            models = await http.call("GET", f"{url}/v1/models", _Models)
    except (PeerUnreachableError, ApiError) as error:
        raise UserError(f"{error}; is the mesh up? 'kvmesh up' starts one") from error
    if not models.data:
        raise UserError(f"{url} serves no model yet; try again in a moment")
    return models.data[0].id
