"""Runs a sequence on its servers, again and elsewhere while the client has seen nothing of it.

What is tried again, and how often:

* a server that cannot be reached: another one, as long as there is one; nothing was sent;
* a server that answers 429, 500, 502 or 503, or breaks off: the whole sequence, ``max_retries`` times, on other servers
  where there are any (a request that kills its server must not go through them all);
* an answer of any other status is the client's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from kvmesh.protocol.errors import ApiError
from kvmesh.router.answer import Answer
from kvmesh.router.attempt import Attempts
from kvmesh.router.explain import Attempt
from kvmesh.router.legs import LegFailure
from kvmesh.router.plan import Avoid
from kvmesh.router.work import Work

__all__ = ["Dispatcher"]


class Dispatcher:
    """Answers sequences.

    Args:
        attempts: makes one try.
        max_retries: tries after the first.
    """

    def __init__(self, attempts: Attempts, *, max_retries: int = 1) -> None:
        self._attempts = attempts
        self._max_retries = max_retries
        self._retries = 0

    @asynccontextmanager
    async def answer(self, work: Work) -> AsyncIterator[Answer]:
        """The answer of a sequence once it has begun; leaving the block closes whatever is still open upstream.

        Raises:
            ApiError: no server could, or wanted to, answer.
        """
        async with AsyncExitStack() as stack:
            answer, record = await self._begin(work, stack)
            try:
                yield answer
            except ApiError as error:
                record.outcome, record.error = error.code or "error", error.message
                raise
            except BaseException:
                record.outcome = "cancelled"
                raise
            record.outcome = "done"

    def statistics(self) -> dict[str, float]:
        """Further tries, and what :meth:`Attempts.statistics` counts."""
        return {**self._attempts.statistics(), "retries_total": self._retries}

    async def _begin(self, work: Work, stack: AsyncExitStack) -> tuple[Answer, Attempt]:
        """Try until a server has begun to answer; what it holds is left to ``stack``."""
        avoid = Avoid()
        retries_left = self._max_retries
        last: LegFailure | None = None
        while True:
            record = Attempt(mode="disaggregated")
            try:
                async with AsyncExitStack() as resources:
                    answer = await self._attempts.run(work, record, avoid, resources)
                    stack.push_async_exit(resources.pop_all())
                    return answer, record
            except LegFailure as failure:
                record.outcome, record.error = failure.error.code or "error", str(failure)
                last = failure
            except ApiError as error:
                record.outcome, record.error = error.code or "error", error.message
                # When nobody is left to try, why the last one failed says more than that.
                raise (error if last is None else last.error) from None
            except BaseException:
                record.outcome = "cancelled"
                raise
            if last.unreachable:
                avoid.down.add(last.instance_id)
            elif last.retryable and retries_left:
                avoid.failed.add(last.instance_id)
                retries_left -= 1
            else:
                raise last.error
            self._retries += 1
