"""Which servers serve a sequence: from cluster, loads and matches to a placement. No I/O.

A sequence goes one of three ways:

* ``disaggregated``: a context server prefills, a generation server goes on;
* ``local``: a generation server that already holds most of the prompt does everything (conditional disaggregation);
* ``aggregated``: a server without a role restriction does everything. Such servers compete with context servers in the
  same choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from kvmesh.protocol.errors import ApiError, unavailable
from kvmesh.protocol.match import WorkerMatch
from kvmesh.protocol.members import Member
from kvmesh.protocol.ranks import RankWish
from kvmesh.router.cluster import Cluster, Leg, Server, Unusable, pairable
from kvmesh.router.explain import Mode
from kvmesh.router.loads import Loads
from kvmesh.router.policy import Candidate, Decision, Policy, Question, Scored
from kvmesh.router.policy.types import DEFAULT_TOKENS_PER_BLOCK
from kvmesh.router.work import Work

__all__ = ["Avoid", "Placement", "Planner", "needs_context"]


class Avoid:
    """Servers that failed this sequence already."""

    def __init__(self) -> None:
        self.down: set[str] = set()
        """Could not be reached: not asked again."""
        self.failed: set[str] = set()
        """Answered badly: asked again only when there is no other."""


class Placement(NamedTuple):
    """Where a sequence begins."""

    mode: Mode
    server: Server
    decision: Decision


def needs_context(prompt_tokens: int, matched_tokens: int, limit: int) -> bool:
    """TensorRT-LLM's rule of conditional disaggregation: too much of the prompt is not at the generation server."""
    return matched_tokens == 0 or prompt_tokens - matched_tokens > limit


class Planner:
    """Places sequences.

    Args:
        cluster: the servers.
        loads: what they do.
        context_policy: chooses where prompts are computed, aggregated servers included.
        generation_policy: chooses where answers are generated.
        max_local_prefill_length: uncached prompt tokens up to which a generation server works alone; 0: never.
        tokens_per_block: configured block size; a server with another one is not credited for matches.
    """

    def __init__(
        self,
        cluster: Cluster,
        loads: Loads,
        *,
        context_policy: Policy,
        generation_policy: Policy,
        max_local_prefill_length: int = 0,
        tokens_per_block: int | None = None,
    ) -> None:
        self._cluster = cluster
        self._loads = loads
        self._context_policy = context_policy
        self._generation_policy = generation_policy
        self._max_local = max_local_prefill_length
        self._tokens_per_block = tokens_per_block

    @property
    def needs_matches(self) -> bool:
        """Whether any choice depends on what servers hold."""
        return self._context_policy.needs_matches or self._generation_policy.needs_matches or self._max_local > 0

    def forget(self, instance_id: str) -> None:
        """A server left the mesh."""
        self._context_policy.forget(instance_id)
        self._generation_policy.forget(instance_id)

    def place(self, work: Work, avoid: Avoid) -> Placement:
        """Where the sequence begins.

        Raises:
            ApiError: 503 when no server, or no pair of servers, can take it now.
        """
        model = work.request.model
        generations, unusable_generations = self._select("generation", model, avoid)
        if self._max_local > 0 and generations:
            local = self._choose(self._generation_policy, work, generations, unusable_generations)
            matched = _matched_tokens(work, local.chosen)
            if not needs_context(work.prompt_tokens, matched, self._max_local):
                return Placement("local", self._server(local.chosen), local)
        contexts, unusable = self._select("context", model, avoid)
        if not work.first_token_only:
            contexts, unpaired = _paired(contexts, generations)
            unusable = [*unusable, *unpaired]
        aggregated, unusable_aggregated = self._select("both", model, avoid)
        unusable = [*unusable, *unusable_aggregated]
        candidates = [*contexts, *aggregated]
        if not candidates:
            raise _nobody(model, [*unusable, *unusable_generations])
        decision = _sibling(work, candidates) or self._choose(self._context_policy, work, candidates, unusable)
        server = self._server(decision.chosen)
        return Placement("aggregated" if server.member.role == "both" else "disaggregated", server, decision)

    def place_generation(self, work: Work, context: Member, avoid: Avoid) -> Placement:
        """Where a prefilled sequence goes on; only servers that can read the context server's pages.

        Raises:
            ApiError: 503 when there is none now.
        """
        servers, unusable = self._select("generation", work.request.model, avoid)
        fitting = [server for server in servers if pairable(context, server.member)]
        unusable += [
            Unusable(server.member.instance_id, "cannot read the context server's pages")
            for server in servers
            if server not in fitting
        ]
        if not fitting:
            raise _nobody(work.request.model, unusable)
        decision = self._choose(self._generation_policy, work, fitting, unusable)
        return Placement("disaggregated", self._server(decision.chosen), decision)

    def rank_wish(self, work: Work, member: Member) -> RankWish:
        """The rank of a server that holds most of the prompt; none where the server is one engine or nothing is known.

        The server itself weighs the wish against its ranks' load.
        """
        match = self._match(work, member) if member.dp_size > 1 else None
        if match is None or match.dp_rank >= member.dp_size:  # what was known of an earlier life with more ranks
            return RankWish()
        return RankWish(match.dp_rank, max(match.device_tokens, match.host_tokens, match.disk_tokens))

    def uncached_tokens(self, work: Work, instance_id: str) -> int:
        """Prompt tokens that the server has still to compute, or to fetch."""
        return max(work.prompt_tokens - _matched_tokens(work, instance_id), 0)

    def _select(self, leg: Leg, model: str, avoid: Avoid) -> tuple[list[Server], list[Unusable]]:
        usable, unusable = self._cluster.select(leg, model)
        reachable = [server for server in usable if server.member.instance_id not in avoid.down]
        untried = [server for server in reachable if server.member.instance_id not in avoid.failed]
        left = untried or reachable
        kept = {server.member.instance_id for server in left}
        tried = [
            Unusable(server.member.instance_id, "failed this request")
            for server in usable
            if server.member.instance_id not in kept
        ]
        return left, [*unusable, *tried]

    def _choose(self, policy: Policy, work: Work, servers: Sequence[Server], unusable: Iterable[Unusable]) -> Decision:
        question = Question(
            prompt_tokens=work.prompt_tokens,
            token_ids=work.prompt.ids,
            text=work.prompt.text,
            conversation_id=work.conversation_id,
        )
        decision = policy.choose([self._candidate(work, server.member) for server in servers], question)
        excluded = [Scored(instance_id=server.instance_id, excluded=server.reason) for server in unusable]
        if not excluded:
            return decision
        return msgspec.structs.replace(decision, candidates=[*decision.candidates, *excluded])

    def _candidate(self, work: Work, member: Member) -> Candidate:
        load = self._loads.of(member.instance_id)
        match = self._match(work, member)
        return Candidate(
            instance_id=member.instance_id,
            active_requests=load.requests,
            active_tokens=load.tokens,
            device_tokens=match.device_tokens if match else 0,
            host_tokens=match.host_tokens if match else 0,
            disk_tokens=match.disk_tokens if match else 0,
            tokens_per_block=self._tokens_per_block or member.tokens_per_block or DEFAULT_TOKENS_PER_BLOCK,
        )

    def _match(self, work: Work, member: Member) -> WorkerMatch | None:
        """What a server is credited for."""
        if self._tokens_per_block and member.tokens_per_block not in (0, self._tokens_per_block):
            return None
        return work.matches.by_server.get(member.instance_id)

    def _server(self, instance_id: str) -> Server:
        server = self._cluster.get(instance_id)
        assert server is not None, "a chosen server is a member: nothing was awaited since it was selected"
        return server


def _matched_tokens(work: Work, instance_id: str) -> int:
    match = work.matches.by_server.get(instance_id)
    return 0 if match is None else max(match.device_tokens, match.host_tokens, match.disk_tokens)


def _paired(contexts: list[Server], generations: list[Server]) -> tuple[list[Server], list[Unusable]]:
    fitting = [server for server in contexts if any(pairable(server.member, other.member) for other in generations)]
    return fitting, [
        Unusable(server.member.instance_id, "no generation server can read its pages now")
        for server in contexts
        if server not in fitting
    ]


def _sibling(work: Work, candidates: list[Server]) -> Decision | None:
    """Another choice of the same prompt was just prefilled somewhere: go there, the events are still on their way."""
    if work.prefer_context not in [server.member.instance_id for server in candidates]:
        return None
    assert work.prefer_context is not None
    return Decision(
        policy="sibling",
        chosen=work.prefer_context,
        reason="it has just computed the same prompt for another choice",
        candidates=[Scored(instance_id=server.member.instance_id) for server in candidates],
    )


def _nobody(model: str, unusable: list[Unusable]) -> ApiError:
    reasons = "; ".join(f"{server.instance_id}: {server.reason}" for server in unusable)
    return unavailable(
        f"No server can take a request for '{model}' now ({reasons or 'none has joined'}); send it again in a moment.",
        code="no_server_available",
    )
