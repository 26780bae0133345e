"""The beginning of an answer: the first events of a stream, or a whole body with the right usage in it."""

from __future__ import annotations

import msgspec

from kvmesh.protocol.disagg import CtxUsage
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.openai.responses import encode
from kvmesh.router.answer import Events, broken_off, error_in, has_error
from kvmesh.router.cluster import Server
from kvmesh.router.legs import LegFailure, failure_of
from kvmesh.router.rewrite import rewrite_usage
from kvmesh.router.upstream import UpstreamBrokenError

__all__ = ["first_events", "with_usage"]


async def first_events(server: Server, source: Events, *, second: bool) -> bytes:
    """The first events of a stream. An error among them is a failed leg like any other: the client saw nothing yet.

    Args:
        server: who sends them.
        source: the stream.
        second: whether this is the second leg of a disaggregated request.

    Raises:
        LegFailure: there are none, or they are an error.
    """
    instance_id = server.member.instance_id
    try:
        first = await source.next()
    except UpstreamBrokenError as error:
        server.breaker.failed()
        raise LegFailure(instance_id, broken_off(str(error)), retryable=True) from error
    if not first:
        server.breaker.failed()
        raise LegFailure(instance_id, broken_off("before its first event"), retryable=True)
    if has_error(first):
        good, error_event = error_in(first)
        if not good:
            raise failure_of(instance_id, error_event, second=second)
    return first


def with_usage(body: bytes, truth: CtxUsage) -> bytes:
    """A whole body with the context server's usage.

    Raises:
        ApiError: 502, it has none.
    """
    try:
        response = msgspec.json.decode(body)
        rewrite_usage(response, truth)
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        raise ApiError(
            502, "The generation server's answer has no usage.", type="server_error", code="bad_generation_answer"
        ) from None
    return encode(response)
