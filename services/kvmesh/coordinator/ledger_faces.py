"""HTTP over the transfer ledger: engines' events in, records out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import get_args

import msgspec
from aiohttp import web

from kvmesh.coordinator.ledger import LedgerQuery, TransferLedger
from kvmesh.coordinator.queries import float_query, int_query, is_set
from kvmesh.net.http import json_response, read_json
from kvmesh.protocol.errors import ApiError, bad_request
from kvmesh.protocol.transfer import LedgerEvent, TransferState

__all__ = ["LedgerFaces"]

MAX_LISTED_TRANSFERS = 1000


class LedgerFaces:
    """Routes over a ledger.

    Args:
        ledger: the ledger.
        stored: waits, before events are confirmed, until they survive this process.
    """

    def __init__(self, ledger: TransferLedger, *, stored: Callable[[], Awaitable[None]]) -> None:
        self._ledger = ledger
        self._stored = stored

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add ``/transfers`` and ``/transfers/ID``."""
        router.add_post("/transfers", self._record)
        router.add_get("/transfers", self._transfers)
        router.add_get("/transfers/{transfer_id}", self._transfer)

    async def _record(self, request: web.Request) -> web.Response:
        self._ledger.record(await read_json(request, list[LedgerEvent]))
        await self._stored()
        return json_response({})

    async def _transfers(self, request: web.Request) -> web.Response:
        wanted = LedgerQuery(
            state=_state_query(request),
            open=is_set(request, "open"),
            stuck=is_set(request, "stuck"),
            instance=request.query.get("instance"),
            request=request.query.get("request"),
            older_than_ms=round(1e3 * float_query(request, "older_than_s", 0.0)),
        )
        limit = min(int_query(request, "limit", 100), MAX_LISTED_TRANSFERS)
        return json_response(self._ledger.query(wanted, limit=limit))

    async def _transfer(self, request: web.Request) -> web.Response:
        text = request.match_info["transfer_id"]
        found = self._ledger.find(text) if text.isascii() and text.isdigit() and len(text) <= 20 else []
        if len(found) > 1:
            raise ApiError(409, f"The ledger knows {len(found)} transfers that begin with {text}.", code="ambiguous")
        record = self._ledger.get(found[0]) if found else None
        if record is None:
            raise ApiError(404, f"The ledger knows no transfer {text}; it keeps the latest ones.", code="not_found")
        return json_response(record)


def _state_query(request: web.Request) -> TransferState | None:
    text = request.query.get("state")
    if text is None:
        return None
    try:
        state: TransferState = msgspec.convert(text, TransferState)
    except msgspec.ValidationError:
        raise bad_request(f"state must be one of {', '.join(get_args(TransferState))}.", param="state") from None
    return state
