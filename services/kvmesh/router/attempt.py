"""One try to serve a sequence: place it, prefill, hand off, decode; or all of it at one server."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial

from kvmesh.net.faults import fault_point
from kvmesh.protocol.disagg import CtxUsage
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.openai.responses import encode
from kvmesh.protocol.ranks import RankWish
from kvmesh.router.answer import Answer, EventSource, StreamAnswer, WholeAnswer
from kvmesh.router.cluster import Server
from kvmesh.router.dialects.base import Dialect, Outgoing, Prefilled
from kvmesh.router.explain import Attempt
from kvmesh.router.generation_first import BothLegs
from kvmesh.router.hand_off import Abort, HandOff
from kvmesh.router.ids import TransferIds
from kvmesh.router.legs import CONSEQUENCES, LegFailure, Legs, judge
from kvmesh.router.opening import first_events, with_usage
from kvmesh.router.plan import Avoid, Placement, Planner
from kvmesh.router.recent import RecentRoutes
from kvmesh.router.rewrite import as_events, rewrite_usage_events
from kvmesh.router.work import Work

__all__ = ["Attempts"]


class Attempts:
    """Makes tries.

    Args:
        planner: places sequences.
        legs: sends legs.
        dialects: by name.
        ids: makes transfer ids.
        abort: tells a context server that nobody will come for its pages.
        recent: adds to matches what earlier choices will bring about; None: nothing is predicted.
        generation_first: send both legs of a disaggregated sequence at once.
    """

    def __init__(
        self,
        planner: Planner,
        legs: Legs,
        dialects: Mapping[str, Dialect],
        ids: TransferIds,
        *,
        abort: Abort,
        recent: RecentRoutes | None = None,
        generation_first: bool = False,
    ) -> None:
        self._planner = planner
        self._legs = legs
        self._dialects = dialects
        self._ids = ids
        self._send_abort = abort
        self._recent = recent
        self._aborts = 0
        self._modes = {"disaggregated": 0, "local": 0, "aggregated": 0}
        self._prefill_only = 0
        self._generation_first = 0
        self._both = BothLegs(planner, legs, self._prefill) if generation_first else None

    def statistics(self) -> dict[str, float]:
        """Sequences begun by the way they went, and hand-offs that nobody fetched."""
        return {
            **{f"sequences_{mode}_total": float(count) for mode, count in self._modes.items()},
            "sequences_prefill_only_total": self._prefill_only,
            "sequences_generation_first_total": self._generation_first,
            "aborted_hand_offs_total": self._aborts,
        }

    async def run(self, work: Work, record: Attempt, avoid: Avoid, stack: AsyncExitStack) -> Answer:
        """One try; what the answer still needs open is put on ``stack``.

        Raises:
            LegFailure: a server failed.
            ApiError: nobody can serve it, or a server's answer makes no sense.
        """
        if self._recent is not None:
            self._recent.look(work)
        placement = self._planner.place(work, avoid)
        wish = self._planner.rank_wish(work, placement.server.member)
        self._sent(work, placement, wish)
        record.mode = placement.mode
        work.explanation.attempts.append(record)
        self._modes[placement.mode] += 1
        if placement.mode == "disaggregated":
            return await self._disaggregated(work, placement, wish, record, avoid, stack)
        if placement.mode == "local":
            record.generation = placement.decision
        else:
            record.context = placement.decision
        member = placement.server.member
        if placement.mode == "local":
            record.generation_dp_rank = wish.rank
        else:
            record.context_dp_rank = wish.rank
        outgoing = self._dialects[member.dialect].whole(work, wish)
        return await self._answer(work, placement.server, outgoing, stack)

    async def _disaggregated(
        self,
        work: Work,
        placement: Placement,
        wish: RankWish,
        record: Attempt,
        avoid: Avoid,
        stack: AsyncExitStack,
    ) -> Answer:
        server = placement.server
        dialect = self._dialects[server.member.dialect]
        record.context = placement.decision
        transfer_id = record.transfer_id = self._ids.next()
        hand_off = HandOff(server, dialect, transfer_id, self._abort)
        stack.callback(hand_off.close)
        if self._both is not None and not work.first_token_only:
            answer = await self._both.run(work, hand_off, wish, record, avoid, stack)
            if answer is not None:
                self._generation_first += 1
                return answer
        record.context_dp_rank = wish.rank
        prefilled = await self._prefill(work, hand_off, dialect.prefill(work, transfer_id, wish))
        fault_point("router.between_legs")
        if prefilled.finished:
            hand_off.settled = True
            self._prefill_only += 1
            return _finished(work, prefilled)
        return await self._second_leg(work, hand_off, prefilled, record, avoid, stack)

    async def _prefill(self, work: Work, hand_off: HandOff, outgoing: Outgoing) -> Prefilled:
        server, dialect = hand_off.server, hand_off.dialect
        tokens = self._planner.uncached_tokens(work, server.member.instance_id)
        try:
            body = await self._legs.whole(server, outgoing, work.headers, tokens=tokens, deadline=work.deadline)
        except LegFailure as failure:
            # Only then is it certain that it prefilled nothing: after any other failure it may keep the pages.
            hand_off.settled = failure.unreachable or 400 <= failure.error.status < 500
            raise
        prefilled = dialect.read_prefill(work, body)
        work.prefilled_at(server.member.instance_id)
        return prefilled

    async def _second_leg(
        self,
        work: Work,
        hand_off: HandOff,
        prefilled: Prefilled,
        record: Attempt,
        avoid: Avoid,
        stack: AsyncExitStack,
    ) -> Answer:
        truth = prefilled.usage if hand_off.dialect.rewrites_usage else None
        while True:
            try:
                placement = self._planner.place_generation(work, hand_off.server.member, avoid)
            except ApiError as error:
                # Another pair may still be whole: that is for a further try to find out.
                raise LegFailure(hand_off.server.member.instance_id, error, retryable=True) from None
            record.generation = placement.decision
            wish = self._planner.rank_wish(work, placement.server.member)
            if placement.server.member.events_endpoint is None:
                self._sent(work, placement, wish)  # no event will ever tell what it holds
            record.generation_dp_rank = wish.rank
            outgoing = hand_off.dialect.decode(work, prefilled, hand_off.transfer_id, wish)
            try:
                return await self._answer(work, placement.server, outgoing, stack, hand_off, truth)
            except LegFailure as failure:
                if not failure.unreachable:
                    if failure.error.code in CONSEQUENCES:  # The context server may be the one that has failed.
                        avoid.failed.add(hand_off.server.member.instance_id)
                    raise
                avoid.down.add(failure.instance_id)  # nothing was sent: the hand-off is good for another server

    async def _answer(
        self,
        work: Work,
        server: Server,
        outgoing: Outgoing,
        stack: AsyncExitStack,
        hand_off: HandOff | None = None,
        truth: CtxUsage | None = None,
    ) -> Answer:
        """The leg that produces the client's answer: the second one, or the only one.

        ``truth`` is the usage to put into it, where the server counts for itself.
        """
        tokens, second = work.prompt_tokens, hand_off is not None

        def ended(error: ApiError | None) -> None:
            if hand_off is not None:
                hand_off.settled = error is None
            judge(server, error)

        if not work.request.stream:
            # Its prefill cannot be seen to end, so siblings go there at once: the engine computes a prefix but once.
            work.prefilled_at(server.member.instance_id)
            body = await self._legs.whole(
                server, outgoing, work.headers, tokens=tokens, second=second, deadline=work.deadline
            )
            ended(None)
            return WholeAnswer(body if truth is None else with_usage(body, truth))
        response = await stack.enter_async_context(
            self._legs.open(server, outgoing, work.headers, tokens=tokens, second=second, deadline=work.deadline)
        )
        source = EventSource(response)
        first = await first_events(server, source, second=second)
        work.prefilled_at(server.member.instance_id)
        rewrite = None if truth is None else partial(rewrite_usage_events, truth=truth)
        return StreamAnswer(first, source, rewrite=rewrite, on_end=ended)

    def _sent(self, work: Work, placement: Placement, wish: RankWish) -> None:
        if self._recent is not None:
            self._recent.sent(work, placement.server.member, wish)

    def _abort(self, server: Server, outgoing: Outgoing) -> None:
        self._aborts += 1
        self._send_abort(server, outgoing)


def _finished(work: Work, prefilled: Prefilled) -> Answer:
    """The context server's answer as the client's: there is nothing to generate."""
    if not work.request.stream:
        return WholeAnswer(encode(prefilled.response))
    return StreamAnswer(as_events(work.kind, prefilled.response, include_usage=work.request.include_usage))
