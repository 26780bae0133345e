"""Receiver: whether the answer of an owner makes sense, and which pages a slice of a promised prompt brought."""

from __future__ import annotations

from kvmesh.cache.layout import PageLayout
from kvmesh.protocol.transfer import Aux, TransferResult
from kvmesh.transceiver.runs import MissingPageError, select
from kvmesh.transceiver.sessions import ReceiveSession
from kvmesh.transceiver.slices import BlockSpan, group_spans
from kvmesh.transceiver.types import PageIds

__all__ = ["answer_obstacle", "arrived_pages"]

MAX_TOP_LOGPROBS = 1024
"""Far above what any request may ask for."""


def arrived_pages(session: ReceiveSession, layout: PageLayout, result: TransferResult) -> list[PageIds]:
    """By layer group, the pages of the blocks that a slice has brought; notes how far the prompt has come.

    Args:
        session: that of the slice.
        layout: of this engine.
        result: says which blocks they are.

    Raises:
        MissingPageError: they do not follow those before them, or the prompt is not whole after the last slice.
    """
    num_blocks = layout.num_blocks(session.num_tokens)
    whole = BlockSpan(*result.slice_blocks)
    if not 0 <= whole.first <= whole.end <= num_blocks:
        raise MissingPageError(f"a slice is said to be blocks {whole.first} to {whole.end} of {num_blocks}")
    windows = [group.window for group in layout.groups]
    spans = group_spans(whole, windows, session.num_tokens, is_last=result.is_last)
    reached = session.arrived_to or [0] * len(spans)
    for group, (span, before) in enumerate(zip(spans, reached, strict=True)):
        if not span.is_empty and span.first > before:
            raise MissingPageError(f"blocks {before} to {span.first} of layer group {group} have not come")
    reached = [max(span.end, before) for span, before in zip(spans, reached, strict=True)]
    if result.is_last and min(reached) < num_blocks:
        raise MissingPageError(f"the last slice ends at block {min(reached)} of {num_blocks}")
    session.arrived_to = reached
    pages = []
    for span, first, wanted in zip(spans, session.first_block, session.wanted, strict=True):
        own = wanted[max(span.first - first, 0) : max(span.end - first, 0)]
        pages.append(select(own, own >= 0))
    return pages


def answer_obstacle(session: ReceiveSession, result: TransferResult) -> str | None:
    """Why the answer of an owner cannot end, or go on with, a session (semantics §6.8); None when it can."""
    if not session.is_claim:
        if result.aux is not None:
            return "first tokens came with a prompt that was computed before"
        return None if result.is_last else "a slice came of a prompt that was computed before"
    if not result.is_last:
        if result.status == "ready":
            return "a part of the prompt is granted"
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
