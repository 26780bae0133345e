"""One leg: a request to one server, counted in its load, judged for its breaker, failures sorted by what they allow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

import anyio

from kvmesh.protocol.errors import ApiError, unavailable
from kvmesh.router.answer import broken_off
from kvmesh.router.cluster import Server
from kvmesh.router.deadline import Deadline
from kvmesh.router.dialects.base import Outgoing
from kvmesh.router.loads import Loads
from kvmesh.router.upstream import (
    Upstream,
    UpstreamBrokenError,
    UpstreamResponse,
    UpstreamUnreachableError,
    error_from_body,
)

__all__ = ["CONSEQUENCES", "LegFailure", "Legs", "failure_of", "judge"]

_RETRYABLE = frozenset({429, 500, 502, 503})
_SICK = frozenset({500, 502})
"""Statuses by which a server shows that it is not well; being busy or shutting down is no sickness."""
_REQUEST_S_OWN = frozenset({"model_error", "sampling_failed"})
"""Codes of failures that the request takes with it: no sign of its server's health, and the same on another server."""
CONSEQUENCES = frozenset(
    {
        "kv_transfer_cancelled",
        "kv_transfer_timeout",
        "kv_receiver_timeout",
        "transfer_failed",
        "receiver_failed",
        "peer_dead",
        "peer_lost",
        "peer_unreachable",
    }
)
"""Codes of failures that a server reports because the other leg's server has failed, or has been stopped."""
_NO_SUCH_RANK = "no_such_rank"
"""Only the router orders ranks: a server that does not have one was started anew with fewer, as it will soon tell."""
_HAND_OFF_REFUSED = frozenset({400, 403, 404, 409, 410, 422})
"""From a second leg these concern the hand-off, which the client knows nothing of: its request passed the first leg."""


class LegFailure(Exception):  # noqa: N818 (an outcome that steers the retries; the error for the client is inside)
    """A leg that failed.

    Attributes:
        instance_id: the server.
        error: what the client is told when nothing else works.
        unreachable: nothing was sent.
        retryable: another try may succeed.
    """

    def __init__(
        self, instance_id: str, error: ApiError, *, unreachable: bool = False, retryable: bool = False
    ) -> None:
        super().__init__(f"{instance_id}: {error.message}")
        self.instance_id = instance_id
        self.error = error
        self.unreachable = unreachable
        self.retryable = retryable


class Legs:
    """Sends legs.

    Args:
        upstream: connections to workers.
        loads: where legs are counted.
    """

    def __init__(self, upstream: Upstream, loads: Loads) -> None:
        self._upstream = upstream
        self._loads = loads

    @asynccontextmanager
    async def open(
        self,
        server: Server,
        outgoing: Outgoing,
        headers: Mapping[str, str],
        *,
        tokens: int,
        second: bool = False,
        deadline: Deadline = Deadline(),  # noqa: B008 (immutable)
    ) -> AsyncIterator[UpstreamResponse]:
        """The head of a good answer; its body is read, and the load counted, within the block.

        A server that keeps the request waiting until its deadline has failed.

        Args:
            server: whom to ask.
            outgoing: what to ask.
            headers: sent along.
            tokens: what the request adds to the server's load.
            second: whether this is the second leg of a disaggregated request.
            deadline: of the request; enforced by the caller.

        Raises:
            LegFailure: no connection, or another status than 200.
        """
        instance_id = server.member.instance_id
        with self._loads.track(instance_id, tokens):
            try:
                with _until_dead(server), _waiting(server, deadline):
                    response = await self._upstream.post(f"{server.member.url}{outgoing.path}", outgoing.body, headers)
            except UpstreamUnreachableError as down:
                server.breaker.unreachable()
                raise LegFailure(
                    instance_id,
                    unavailable("No server could be reached; send the request again in a moment.", code="unreachable"),
                    unreachable=True,
                ) from down
            except UpstreamBrokenError as error:
                server.breaker.failed()
                raise LegFailure(instance_id, broken_off(str(error)), retryable=True) from error
            try:
                watched = _Watched(response, server, deadline)
                if response.status != 200:
                    raise await self._refusal(server, watched, second=second)
                yield watched
            finally:
                response.close()

    async def whole(
        self,
        server: Server,
        outgoing: Outgoing,
        headers: Mapping[str, str],
        *,
        tokens: int,
        second: bool = False,
        deadline: Deadline = Deadline(),  # noqa: B008 (immutable)
    ) -> bytes:
        """The whole body of a good answer.

        Raises:
            LegFailure: no connection, another status than 200, or it broke off.
        """
        async with self.open(server, outgoing, headers, tokens=tokens, second=second, deadline=deadline) as response:
            try:
                body = await response.read()
            except UpstreamBrokenError as error:
                server.breaker.failed()
                raise LegFailure(server.member.instance_id, broken_off(str(error)), retryable=True) from error
        server.breaker.succeeded()
        return body

    async def _refusal(self, server: Server, response: UpstreamResponse, *, second: bool) -> LegFailure:
        try:
            body = await response.read()
        except UpstreamBrokenError as broken:
            server.breaker.failed()
            return LegFailure(server.member.instance_id, broken_off(str(broken)), retryable=True)
        error = error_from_body(response.status, body, response.retry_after_s)
        if response.status in _SICK:
            judge(server, error)
        return failure_of(server.member.instance_id, error, second=second)


class _Watched:
    """A response; waiting for it until the deadline is its server's failure."""

    __slots__ = ("_deadline", "_response", "_server", "retry_after_s", "status")

    def __init__(self, response: UpstreamResponse, server: Server, deadline: Deadline) -> None:
        self._response = response
        self._server = server
        self._deadline = deadline
        self.status = response.status
        self.retry_after_s = response.retry_after_s

    async def read(self) -> bytes:
        """See :class:`kvmesh.router.upstream.UpstreamResponse`."""
        with _waiting(self._server, self._deadline):
            return await self._response.read()

    async def next_chunk(self) -> bytes:
        """See :class:`kvmesh.router.upstream.UpstreamResponse`."""
        with _waiting(self._server, self._deadline):
            return await self._response.next_chunk()

    def close(self) -> None:
        """See :class:`kvmesh.router.upstream.UpstreamResponse`."""
        self._response.close()


@contextmanager
def _until_dead(server: Server) -> Iterator[None]:
    """A wait for the head of an answer, which ends when the server is taken for dead.

    Raises:
        UpstreamBrokenError: it was.
    """
    with anyio.CancelScope() as scope:
        server.give_ups.add(scope.cancel)
        try:
            yield
        finally:
            server.give_ups.discard(scope.cancel)
    if scope.cancelled_caught:
        raise UpstreamBrokenError(f"{server.member.instance_id} was taken for dead")


@contextmanager
def _waiting(server: Server, deadline: Deadline) -> Iterator[None]:
    """A wait for the server. One that the client ends by leaving says nothing about it."""
    since_s = anyio.current_time()
    try:
        yield
    except anyio.get_cancelled_exc_class():
        if deadline.blames(since_s):
            server.breaker.failed()
        raise


def judge(server: Server, error: ApiError | None) -> None:
    """Tell a server's breaker how a leg went: well (None), or by its fault, not the request's nor the other leg's."""
    if error is None:
        server.breaker.succeeded()
    elif error.code not in _REQUEST_S_OWN and error.code not in CONSEQUENCES:
        server.breaker.failed()


def failure_of(instance_id: str, error: ApiError, *, second: bool) -> LegFailure:
    """Sort a server's error by its status, unless its code says that it is the request's own."""
    if error.code in _REQUEST_S_OWN:
        return LegFailure(instance_id, error)
    if second and error.status in _HAND_OFF_REFUSED:
        error = ApiError(
            502,
            f"The generation server refused what the context server handed on: {error.message}",
            type="server_error",
            code=error.code or "hand_off_refused",
        )
    if error.code == _NO_SUCH_RANK:
        error = unavailable(
            "A server has fewer ranks than it had; send the request again in a moment.", code=error.code
        )
    if error.status in (429, 503) and error.retry_after_s is None:
        error.retry_after_s = 1
    return LegFailure(instance_id, error, retryable=error.status in _RETRYABLE)
