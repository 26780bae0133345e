"""Which bytes of an owner's pages go where in a receiver's pages: a pure function of the two layouts.

Peers share a block among their ranks in different ways (tensor and pipeline parallelism): heads may be split or merged,
kept twice, and layers lie in other layer groups. The heads of a buffer are its outermost axis, so what two buffers have
in common is one run of bytes in either. Between equal layouts a whole page goes into a whole page.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvmesh.cache.layout import BufferSpec, LayerGroupLayout, PageLayout

__all__ = ["Route", "RouteError", "Span", "plan_routes"]


class RouteError(Exception):
    """The receiver's pages cannot be filled from the owner's; the message names the buffer."""


class Span(NamedTuple):
    """A run of bytes that is in the pages of both."""

    owner_offset: int
    receiver_offset: int
    nbytes: int


class Route(NamedTuple):
    """What pages of one layer group of the owner give to those of one of the receiver, block by block."""

    owner_group: int
    receiver_group: int
    spans: tuple[Span, ...]


def plan_routes(owner: PageLayout, receiver: PageLayout) -> tuple[Route, ...]:
    """Every byte of the receiver's pages, from the first of the owner's ranks that has it.

    Both sides compute this and get the same routes in the same order.

    Raises:
        RouteError: something that the receiver keeps is not in the owner's pages, or not in the same form.
    """
    return tuple(route for group in receiver.groups for route in _routes_into(group, owner))


def _routes_into(group: LayerGroupLayout, owner: PageLayout) -> Iterator[Route]:
    for source in owner.groups:
        if source.buffers == group.buffers:
            yield Route(source.group_id, group.group_id, (Span(0, 0, group.page_bytes),))
            return
    spans: dict[int, list[Span]] = {}
    for buffer in group.buffers:
        for source_group, span in _sources(buffer, owner):
            found = spans.setdefault(source_group, [])
            if found and _follows(found[-1], span):
                found[-1] = found[-1]._replace(nbytes=found[-1].nbytes + span.nbytes)
            else:
                found.append(span)
    for source_group in sorted(spans):
        yield Route(source_group, group.group_id, tuple(spans[source_group]))


def _sources(buffer: BufferSpec, owner: PageLayout) -> Iterator[tuple[int, Span]]:
    """Where the heads of ``buffer`` come from, in their order: (layer group of the owner, span)."""
    candidates = [
        (source.group_id, theirs)
        for source in owner.groups
        for theirs in source.buffers
        if (theirs.layer, theirs.role) == (buffer.layer, buffer.role)
    ]
    head_bytes = buffer.nbytes // buffer.num_kv_heads
    head, end = buffer.first_kv_head, buffer.first_kv_head + buffer.num_kv_heads
    while head < end:
        found = next((one for one in candidates if 0 <= head - one[1].first_kv_head < one[1].num_kv_heads), None)
        if found is None:
            raise RouteError(
                f"head {head} of the {buffer.role} buffer of layer {buffer.layer} is in no page of the owner"
            )
        group_id, theirs = found
        if theirs.nbytes != head_bytes * theirs.num_kv_heads:
            raise RouteError(f"the {buffer.role} buffer of layer {buffer.layer} has another size at the owner")
        last = min(end, theirs.first_kv_head + theirs.num_kv_heads)
        yield (
            group_id,
            Span(
                theirs.offset_bytes + (head - theirs.first_kv_head) * head_bytes,
                buffer.offset_bytes + (head - buffer.first_kv_head) * head_bytes,
                (last - head) * head_bytes,
            ),
        )
        head = last


def _follows(before: Span, span: Span) -> bool:
    """Whether ``span`` begins where ``before`` ends, on both sides."""
    return (before.owner_offset + before.nbytes, before.receiver_offset + before.nbytes) == span[:2]
