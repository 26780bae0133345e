"""Why a request went where it went: the decisions of recent requests, for ``/explain/{request_id}``."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import msgspec

from kvmesh.router.policy import Decision

__all__ = ["Attempt", "Explainer", "Explanation", "SequenceExplanation"]

MAX_REQUESTS = 2048
"""Requests remembered; with their decisions a few KiB each."""

Mode = Literal["disaggregated", "local", "aggregated"]


class Attempt(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One try to serve a sequence."""

    mode: Mode
    transfer_id: int | None = None
    context: Decision | None = None
    """Choice of the server that prefills, or serves the whole request when aggregated."""
    context_dp_rank: int | None = None
    """Attention data-parallel rank that it was asked to use, for the prefix that the rank holds."""
    generation: Decision | None = None
    generation_dp_rank: int | None = None
    """The same of the generation server."""
    generation_first: bool = False
    """Both legs ran at once."""
    outcome: str = "running"
    """``running``, ``done``, ``cancelled`` or the error's code."""
    error: str | None = None


class SequenceExplanation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One choice of the response."""

    index: int
    prompt_tokens: int
    match_state: str
    matched_tokens: dict[str, int] = {}
    """Leading tokens that each server held in device memory when asked, by instance id."""
    attempts: list[Attempt] = []


class Explanation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One client request."""

    request_id: str
    response_id: str
    api: str
    model: str
    received_unix_ms: int
    client_request_id: str | None = None
    queue_ms: float = 0.0
    tokenize_ms: float = 0.0
    match_ms: float = 0.0
    first_byte_ms: float | None = None
    total_ms: float | None = None
    outcome: str = "running"
    sequences: list[SequenceExplanation] = []


class Explainer:
    """A ring of explanations, found by request id, by the client's id, or by the response's ``id``."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self._max_requests = max_requests
        self._by_id: OrderedDict[str, Explanation] = OrderedDict()
        self._aliases: dict[str, str] = {}

    def add(self, explanation: Explanation) -> None:
        """Remember a request that has just begun; it is filled in as it runs."""
        key = explanation.request_id
        self._by_id[key] = explanation
        for alias in (explanation.response_id, explanation.client_request_id):
            if alias is not None:
                self._aliases[alias] = key
        while len(self._by_id) > self._max_requests:
            _, old = self._by_id.popitem(last=False)
            for alias in (old.response_id, old.client_request_id):
                if alias is not None and self._aliases.get(alias) == old.request_id:
                    del self._aliases[alias]

    def find(self, name: str) -> Explanation | None:
        """The explanation of a request; of several with the same client id the newest."""
        return self._by_id.get(self._aliases.get(name, name))
