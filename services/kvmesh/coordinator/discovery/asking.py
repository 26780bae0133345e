"""Asks a server what it is and how it is."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvmesh.net.client import HttpClient, PeerUnreachableError
from kvmesh.net.server_info import MESH_DIALECT, ServerInfo
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.members import Load

__all__ = ["Answer", "SilentError", "ask"]


MAX_BYTES = 1 << 20
"""Of one answer: whoever is at an address is asked, many at once, and need not be a server."""


class SilentError(Exception):
    """There is no server, or none that says what it is; the argument says so."""


class Answer(NamedTuple):
    """What a server says."""

    info: ServerInfo
    ready: bool
    """Whether it takes new work."""
    draining: bool
    """Whether it is about to leave."""
    load: Load


class _Model(msgspec.Struct):
    id: str = ""


class _Models(msgspec.Struct):
    data: list[_Model] = []


async def ask(http: HttpClient, url: str, dialect: str) -> Answer:
    """Ask for ``/server_info``, ``/health`` and, of a server of this mesh, ``/stats``.

    Args:
        http: bounds each exchange in time.
        url: base URL.
        dialect: what kind of server is expected. Other engines need have no ``/server_info``: the name of their model
            is enough.

    Raises:
        SilentError: no answer that says what it is.
    """
    try:
        info = await _info(http, url, dialect)
        ready, draining = await _health(http, url)
        load = Load(healthy=ready)
        if info.protocol is not None:
            load = msgspec.structs.replace(await _load(http, url), healthy=ready or draining)
    except (PeerUnreachableError, ApiError, msgspec.DecodeError) as error:
        raise SilentError(str(error)) from error
    return Answer(info, ready, draining, load)


async def _info(http: HttpClient, url: str, dialect: str) -> ServerInfo:
    try:
        return await http.call("GET", f"{url}/server_info", ServerInfo, max_bytes=MAX_BYTES)
    except (ApiError, msgspec.DecodeError):
        if dialect == MESH_DIALECT:
            raise
    models = await http.call("GET", f"{url}/v1/models", _Models, max_bytes=MAX_BYTES)
    return ServerInfo(model=models.data[0].id if models.data else "")


async def _health(http: HttpClient, url: str) -> tuple[bool, bool]:
    """Whether it takes new work, and whether it is about to leave."""
    try:
        async with http.open("GET", f"{url}/health"):
            return True, False
    except ApiError as error:
        return False, "answered 503: draining" in error.message


async def _load(http: HttpClient, url: str) -> Load:
    try:
        return await http.call("GET", f"{url}/stats", Load, max_bytes=MAX_BYTES)
    except (ApiError, msgspec.DecodeError):
        return Load()  # it starts or ends: what it does now is not worth a word
