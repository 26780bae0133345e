"""Which blocks of a prompt go out when a prefill chunk is done: the rules of pipelined transfers, as pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["BlockSpan", "chunk_blocks", "group_spans", "pipelining_obstacle"]


class BlockSpan(NamedTuple):
    """Blocks ``[first, end)`` of a prompt."""

    first: int
    end: int

    @property
    def is_empty(self) -> bool:
        """Whether there is no block in it."""
        return self.end <= self.first


def chunk_blocks(start: int, end: int, tokens_per_block: int, *, is_first: bool, is_last: bool) -> BlockSpan:
    """Blocks that go out when a chunk of a prompt has been computed (semantics §6.5).

    Only full blocks go, for the others still change; the first chunk takes the reused prefix along, the last one the
    trailing partial block. Spans of consecutive chunks follow one another without gap or overlap.

    Args:
        start: first token of the chunk.
        end: behind its last token.
        tokens_per_block: tokens in a block.
        is_first: no chunk of this prompt was computed before; what was found in the cache lies in front of it.
        is_last: the prompt ends with it.

    Returns:
        The span; an empty one of a chunk that is not the last is not sent, its tokens go with the next.
    """
    first = 0 if is_first else start // tokens_per_block
    return BlockSpan(first, -(-end // tokens_per_block) if is_last else end // tokens_per_block)


def group_spans(
    span: BlockSpan, windows: Sequence[int | None], prompt_tokens: int, *, is_last: bool
) -> list[BlockSpan]:
    """Blocks that go out of each layer group.

    A group whose window is shorter than the prompt goes whole with the last slice: which of its blocks matter is known
    at the end only, and those in front may already have lost their pages.

    Args:
        span: of the slice.
        windows: of each layer group in tokens, None for full attention.
        prompt_tokens: length of the prompt.
        is_last: whether the slice is the last.
    """
    whole, nothing = BlockSpan(0, span.end), BlockSpan(span.first, span.first)
    deferred = whole if is_last else nothing
    return [deferred if window is not None and window < prompt_tokens else span for window in windows]


def pipelining_obstacle(*, generation_first: bool, beam_width: int = 1) -> str | None:
    """Why a context request cannot be sent slice by slice (semantics §6.5), None when it can.

    Args:
        generation_first: whether its receiver is known before it is computed.
        beam_width: of its search; the edge refuses any other than 1 before (``use_beam_search``, ``best_of``).
    """
    if not generation_first:
        return (
            "This context server has enable_pipelined_transfer, which requires schedule_style generation_first; set it "
            "at the router, or turn pipelined transfers off."
        )
    if beam_width != 1:
        return f"enable_pipelined_transfer requires beam_width == 1, got {beam_width}"
    return None
