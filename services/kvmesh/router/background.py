"""A leg that runs beside another one, and how the end of one ends the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio

from kvmesh.protocol.errors import ApiError
from kvmesh.router.dialects.base import Prefilled
from kvmesh.router.legs import CONSEQUENCES, LegFailure

__all__ = ["ContextLeg", "in_background"]

T = TypeVar("T")

GRACE_S = 0.5
"""How long the failure of one leg waits for the other's, where it is likely to be its consequence: the client should
hear why, and the right server be blamed."""


class ContextLeg:
    """The context leg of a generation-first sequence, which runs while the generation leg is awaited.

    Args:
        instance_id: the context server.
        prefill: sends it and reads its answer.
    """

    def __init__(self, instance_id: str, prefill: Callable[[], Awaitable[Prefilled]]) -> None:
        self._instance_id = instance_id
        self._prefill = prefill
        self._scope: anyio.CancelScope | None = None
        self._done = anyio.Event()
        self.prefilled: Prefilled | None = None
        """Its answer, once it has come."""
        self.failure: LegFailure | None = None

    async def run(self) -> None:
        """Run it; a failure ends what :meth:`guard` waits for."""
        try:
            self.prefilled = await self._prefill()
        except LegFailure as failure:
            await self._fail(failure)
        except ApiError as error:
            await self._fail(LegFailure(self._instance_id, error))
        finally:
            self._done.set()

    async def guard(self, wait: Callable[[], Awaitable[T]]) -> T:
        """Wait for something of the generation leg, unless this leg fails first.

        Raises:
            LegFailure: this leg has failed.
        """
        if self.failure is not None:
            raise self.failure
        with anyio.CancelScope() as scope:
            self._scope = scope
            try:
                return await wait()
            finally:
                self._scope = None
        assert self.failure is not None, "nobody else cancels the scope"
        raise self.failure

    async def wait(self, seconds: float) -> None:
        """Wait until it is over, for ``seconds`` at most."""
        with anyio.move_on_after(seconds):
            await self._done.wait()

    async def cause_of(self, failure: LegFailure) -> LegFailure:
        """Why the generation leg failed: by itself, or because this leg did."""
        if failure is self.failure or failure.unreachable:
            return failure
        refused = failure.error.status < 500 or failure.error.code == "hand_off_refused"
        if failure.error.code not in CONSEQUENCES and not refused and failure.error.status != 502:
            return failure
        await self.wait(GRACE_S)
        mine = self.failure
        return failure if mine is None or mine.error.code in CONSEQUENCES else mine

    async def _fail(self, failure: LegFailure) -> None:
        if failure.error.code in CONSEQUENCES:
            await anyio.sleep(GRACE_S)  # the generation leg is about to say more
        self.failure = failure
        if self._scope is not None:
            self._scope.cancel()


@asynccontextmanager
async def in_background(run: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run something while the block runs; leaving the block ends it. What the block raises is raised as it is."""
    raised: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        try:
            yield
        except BaseException as error:
            raised = error  # raised again outside the group, which would wrap it in an exception group
        tasks.cancel_scope.cancel()
    if raised is not None:
        raise raised
