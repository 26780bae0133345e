"""The outputs of one sequence as its front sees them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from anyio.streams.memory import MemoryObjectReceiveStream

from kvmesh.protocol.engine import TokenOutput
from kvmesh.protocol.errors import ApiError

__all__ = ["EngineDeadError", "StreamItem", "TokenStream"]

StreamItem = TokenOutput | ApiError
"""What travels to a stream: outputs, and at most one error as its end."""


class EngineDeadError(ApiError):
    """The engine process is gone; its requests are lost, and a new engine may be on its way."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message, type="service_unavailable_error", code="engine_dead", retry_after_s=5)


class TokenStream(AsyncIterator[TokenOutput]):
    """Outputs of one sequence, the last with a finish reason. Leaving early (``aclose``, ``async with``) aborts it."""

    def __init__(
        self, abort: Callable[[str], None], request_id: str, received: MemoryObjectReceiveStream[StreamItem]
    ) -> None:
        self._abort = abort
        self._request_id = request_id
        self._received = received
        self._over = False

    async def __anext__(self) -> TokenOutput:
        """The next output.

        Raises:
            ApiError: the engine failed the request, or died (:class:`EngineDeadError`).
            StopAsyncIteration: the sequence is finished.
        """
        if self._over:
            raise StopAsyncIteration
        try:
            item = await self._received.receive()
        except BaseException:
            self._leave()
            raise
        if isinstance(item, ApiError):
            self._end()
            raise item
        if item.finish_reason is not None:
            self._end()
        return item

    async def aclose(self) -> None:
        """Stop the sequence unless it is finished; idempotent."""
        self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        if not self._over:
            self._end()
            self._abort(self._request_id)

    def _end(self) -> None:
        self._over = True
        self._received.close()
