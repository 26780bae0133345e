"""Generation first: both legs of a sequence at once, the answer from the generation server.

The generation leg is sent, and its answer read, while the context leg is under way: the context server computes only
after the generation server has asked it for the pages, so whoever awaited one leg before sending the other would wait
for ever.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from kvmesh.protocol.disagg import CtxUsage
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.ranks import RankWish
from kvmesh.router.answer import Answer, EventSource, StreamAnswer, WholeAnswer
from kvmesh.router.background import ContextLeg, in_background
from kvmesh.router.cluster import Server
from kvmesh.router.dialects.base import Outgoing, Prefilled
from kvmesh.router.explain import Attempt
from kvmesh.router.hand_off import HandOff
from kvmesh.router.legs import CONSEQUENCES, LegFailure, Legs, judge
from kvmesh.router.opening import first_events, with_usage
from kvmesh.router.plan import Avoid, Planner
from kvmesh.router.rewrite import has_usage, rewrite_usage_events
from kvmesh.router.work import Work

__all__ = ["BothLegs", "Prefill"]

Prefill = Callable[[Work, HandOff, Outgoing], Awaitable[Prefilled]]
"""Sends a context leg and reads its answer; raises ``LegFailure`` or ``ApiError``."""

USAGE_WAIT_S = 1.0
"""How long the end of an answer waits for the context leg's, whose usage belongs into it; usually it came long before.
A generation server that knows the context server's usage by itself has put it in anyway."""


class BothLegs:
    """Sends both legs of a sequence.

    Args:
        planner: places the generation leg.
        legs: sends it.
        prefill: sends the context leg.
    """

    def __init__(self, planner: Planner, legs: Legs, prefill: Prefill) -> None:
        self._planner = planner
        self._legs = legs
        self._prefill = prefill

    async def run(
        self, work: Work, hand_off: HandOff, wish: RankWish, record: Attempt, avoid: Avoid, stack: AsyncExitStack
    ) -> Answer | None:
        """The answer; None when the context server cannot take part, and nothing was sent.

        Raises:
            LegFailure: a leg failed; the other was stopped.
            ApiError: a server's answer makes no sense.
        """
        context = hand_off.server.member
        try:
            placement = self._planner.place_generation(work, context, avoid)
        except ApiError as error:
            raise LegFailure(context.instance_id, error, retryable=True) from None
        server = placement.server
        generation_wish = self._planner.rank_wish(work, server.member)
        both = hand_off.dialect.both(work, context, hand_off.transfer_id, wish, generation_wish)
        if both is None:
            return None
        record.generation_first = True
        record.context_dp_rank = both.context_dp_rank
        record.generation = placement.decision
        record.generation_dp_rank = generation_wish.rank
        leg = ContextLeg(context.instance_id, lambda: self._prefill(work, hand_off, both.context))
        await stack.enter_async_context(in_background(leg.run))
        try:
            if work.request.stream:
                return await self._stream(work, server, both.generation, hand_off, leg, stack)
            return await self._whole(work, server, both.generation, hand_off, leg)
        except LegFailure as failure:
            cause = await leg.cause_of(failure)
            if cause.error.code in CONSEQUENCES:  # Either may be the one that has failed.
                avoid.failed.update((context.instance_id, server.member.instance_id))
            raise cause from None

    async def _whole(
        self, work: Work, server: Server, outgoing: Outgoing, hand_off: HandOff, leg: ContextLeg
    ) -> WholeAnswer:
        body = await leg.guard(
            lambda: self._legs.whole(
                server, outgoing, work.headers, tokens=work.prompt_tokens, second=True, deadline=work.deadline
            )
        )
        # The context leg's own answer may come late, or never: the pages were there when this one could be made.
        work.prefilled_at(hand_off.server.member.instance_id)
        await leg.wait(USAGE_WAIT_S)
        hand_off.settled = True
        truth = _truth(hand_off, leg)
        return WholeAnswer(body if truth is None else with_usage(body, truth))

    async def _stream(
        self,
        work: Work,
        server: Server,
        outgoing: Outgoing,
        hand_off: HandOff,
        leg: ContextLeg,
        stack: AsyncExitStack,
    ) -> StreamAnswer:
        def ended(error: ApiError | None) -> None:
            hand_off.settled = error is None
            judge(server, error)

        def rewrite(events: bytes) -> bytes:
            truth = _truth(hand_off, leg)
            return events if truth is None else rewrite_usage_events(events, truth)

        opening = self._legs.open(
            server, outgoing, work.headers, tokens=work.prompt_tokens, second=True, deadline=work.deadline
        )
        response = await leg.guard(lambda: stack.enter_async_context(opening))
        source = _UsageAwaited(EventSource(response), leg)
        # Once it has begun, the context server has done its part: what happens there does not matter any more.
        first = await leg.guard(lambda: first_events(server, source, second=True))
        work.prefilled_at(hand_off.server.member.instance_id)
        return StreamAnswer(first, source, rewrite=rewrite, on_end=ended)


class _UsageAwaited:
    """Events of a generation leg; those with usage come when the context server's is known."""

    def __init__(self, source: EventSource, leg: ContextLeg) -> None:
        self._source = source
        self._leg = leg

    async def next(self) -> bytes:
        """See :meth:`kvmesh.router.answer.EventSource.next`."""
        events = await self._source.next()
        if has_usage(events):
            await self._leg.wait(USAGE_WAIT_S)
        return events


def _truth(hand_off: HandOff, leg: ContextLeg) -> CtxUsage | None:
    """The usage to put in, where the server counts for itself and the context server's is known."""
    return leg.prefilled.usage if hand_off.dialect.rewrites_usage and leg.prefilled is not None else None
