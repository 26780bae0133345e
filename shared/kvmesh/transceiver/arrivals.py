"""Generation first, receiver: which pages a slice brought, and whether what came with the last one makes sense."""

from __future__ import annotations

from kvmesh.cache.layout import PageLayout
from kvmesh.protocol.transfer import Aux, TransferResult
from kvmesh.transceiver.runs import select
from kvmesh.transceiver.sessions import ReceiveSession
from kvmesh.transceiver.slices import BlockSpan, group_spans
from kvmesh.transceiver.types import PageIds

__all__ = ["arrived_pages", "aux_obstacle"]

MAX_TOP_LOGPROBS = 1024
"""Far above what any request may ask for."""


def arrived_pages(session: ReceiveSession, layout: PageLayout, result: TransferResult) -> list[PageIds]:
    """By layer group, the pages of the blocks that a slice has brought.

    Args:
        session: that of the slice.
        layout: of this engine.
        result: says which blocks they are.
    """
    windows = [group.window for group in layout.groups]
    spans = group_spans(BlockSpan(*result.slice_blocks), windows, session.num_tokens, is_last=result.is_last)
    pages = []
    for span, first, wanted in zip(spans, session.first_block, session.wanted, strict=True):
        own = wanted[max(span.first - first, 0) : max(span.end - first, 0)]
        pages.append(select(own, own >= 0))
    return pages


def aux_obstacle(session: ReceiveSession, result: TransferResult) -> str | None:
    """Why the answer of an owner cannot end, or go on with, a session (semantics §6.8); None when it can."""
    if not session.is_claim:
        return None
    if not result.is_last:
        return None if result.aux is None else "first tokens came with a slice that is not the last"
    if result.aux is None:
        return "no first token came with the last slice"
    return _bad_lengths(result.aux, session.num_tokens)


def _bad_lengths(aux: Aux, num_tokens: int) -> str | None:
    if len(aux.first_tokens) != 1:
        return f"{len(aux.first_tokens)} first tokens came, it must be one"
    if len(aux.first_logprobs) > 1 or any(len(entry.top) > MAX_TOP_LOGPROBS for entry in aux.first_logprobs):
        return "there are more log-probabilities than first tokens"
    if aux.prompt_tokens != num_tokens or not 0 <= aux.cached_tokens <= num_tokens:
        return f"usage of {aux.prompt_tokens} tokens, {aux.cached_tokens} cached, came for a prompt of {num_tokens}"
    return None
