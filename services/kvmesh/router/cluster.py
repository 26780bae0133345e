"""The servers that this router may use: membership, health, and who may be paired with whom."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from kvmesh.net.clock import Clock
from kvmesh.protocol.members import Member, MemberEvent
from kvmesh.router.breaker import Breaker
from kvmesh.router.loads import Loads

__all__ = ["HASH_ALGORITHMS", "Cluster", "Leg", "Server", "Unusable", "pairable", "preparation_problem"]

Leg = Literal["context", "generation", "both"]
"""The work a server is wanted for; ``both`` is a whole request."""

HASH_ALGORITHMS = frozenset({"", "v1_block_key", "v2_sha256", "v2_sha256_64"})
"""Block hashes whose events an indexer can match; empty: the server did not say, and is not matched."""


class Unusable(NamedTuple):
    """A server that cannot be chosen now, and why."""

    instance_id: str
    reason: str


class Server:
    """One member with what this router knows of its health."""

    __slots__ = ("breaker", "give_ups", "heard_at_s", "member", "problem")

    def __init__(self, member: Member, breaker: Breaker, problem: str | None, heard_at_s: float) -> None:
        self.member = member
        self.breaker = breaker
        self.heard_at_s = heard_at_s
        """When ``member`` came, in the monotonic seconds of the breaker's clock."""
        self.problem = problem
        """Why the server is never used, whatever its health; None for a prepared one."""
        self.give_ups: set[Callable[[], None]] = set()
        """End the waits for answers of it that have not begun."""

    def give_up(self) -> None:
        """Its life is over: what has not begun to answer will not, as whoever stands still does not even refuse."""
        for end in list(self.give_ups):
            end()

    def unusable(self) -> str | None:
        """Why it cannot be chosen now; None when it can."""
        if self.problem is not None:
            return self.problem
        if self.member.draining:
            return "draining"
        # An answer that came after the heartbeat knows better.
        if not self.member.load.healthy and self.breaker.well_at_s <= self.heard_at_s:
            return "engine not answering"
        return None if self.breaker.closed else "not answering"


def pairable(context: Member, generation: Member) -> bool:
    """Whether pages of one can be read by the other: equal model, dialect and, where both state one, digest."""
    if (context.model, context.dialect) != (generation.model, generation.dialect):
        return False
    digests = context.compat_digest, generation.compat_digest
    return "" in digests or digests[0] == digests[1]


def preparation_problem(member: Member, *, dialects: Iterable[str], tokens_per_block: int | None) -> str | None:
    """Why a server is not taken in, whatever its health; None when it is.

    Args:
        member: what it says of itself.
        dialects: those that this router speaks.
        tokens_per_block: what the router's policy was configured for; None takes any block size. A server's block that
            neither divides it nor is a multiple of it can never match what the router asks for.
    """
    if member.dialect not in dialects:
        return f"speaks the unknown dialect '{member.dialect}'"
    if member.kv_cache_hash_algo not in HASH_ALGORITHMS:
        return f"hashes blocks by the unknown '{member.kv_cache_hash_algo}'"
    own, wanted = member.tokens_per_block, tokens_per_block
    if own and wanted and own % wanted and wanted % own:
        return f"has blocks of {own} tokens, which do not divide with the configured {wanted}"
    return None


class Cluster:
    """Members turned into servers; feed it with :meth:`apply`, the callback of a membership.

    Args:
        clock: of the breakers.
        loads: told of heartbeats and departures.
        dialects: those that the router speaks.
        tokens_per_block: see :func:`preparation_problem`.
        min_context_servers: usable context servers of a model before it is served.
        min_generation_servers: the same for generation servers.
        on_gone: told the instance id of each server that left.
        on_problem: told of a server that is not taken in, once each time it joins.
    """

    def __init__(
        self,
        clock: Clock,
        loads: Loads,
        *,
        dialects: Iterable[str] = ("kvmesh",),
        tokens_per_block: int | None = None,
        min_context_servers: int = 1,
        min_generation_servers: int = 1,
        on_gone: Callable[[str], None] | None = None,
        on_problem: Callable[[Member, str], None] | None = None,
    ) -> None:
        self._clock = clock
        self._loads = loads
        self._dialects = frozenset(dialects)
        self._tokens_per_block = tokens_per_block
        self._minimal = {"context_servers": min_context_servers, "generation_servers": min_generation_servers}
        self._on_gone = on_gone
        self._on_problem = on_problem
        self._servers: dict[str, Server] = {}

    def apply(self, event: MemberEvent) -> None:
        """Take in a change of the membership; members that serve no requests are not kept."""
        member = event.member
        if member.role not in ("context", "generation", "both"):
            return
        known = self._servers.get(member.instance_id)
        if event.kind in ("left", "dead"):
            if known is not None and known.member.epoch <= member.epoch:
                self._remove(member.instance_id)
                if event.kind == "dead":
                    known.give_up()
            return
        if known is not None and known.member.epoch != member.epoch:
            self._remove(member.instance_id)  # a new life: what was remembered of the old one is void
            known.give_up()
            known = None
        problem = preparation_problem(member, dialects=self._dialects, tokens_per_block=self._tokens_per_block)
        if known is None:
            self._servers[member.instance_id] = Server(member, Breaker(self._clock), problem, self._clock.monotonic_s())
            if problem is not None and self._on_problem is not None:
                self._on_problem(member, problem)
        else:
            known.member, known.problem, known.heard_at_s = member, problem, self._clock.monotonic_s()
        self._loads.heard(member.instance_id, member.load)

    def get(self, instance_id: str) -> Server | None:
        """A server by its id."""
        return self._servers.get(instance_id)

    def servers(self) -> list[Server]:
        """All of them, usable or not."""
        return list(self._servers.values())

    def select(self, leg: Leg, model: str) -> tuple[list[Server], list[Unusable]]:
        """Servers of exactly the role ``leg`` for ``model``: those usable now, and the others with their reasons."""
        usable, unusable = [], []
        for server in self._servers.values():
            if server.member.role != leg or server.member.model != model:
                continue
            reason = server.unusable()
            if reason is None:
                usable.append(server)
            else:
                unusable.append(Unusable(server.member.instance_id, reason))
        return usable, unusable

    def models(self) -> dict[str, int]:
        """Served models and the context in tokens that every server of the model has (0: none stated one)."""
        found: dict[str, int] = {}
        for server in self._servers.values():
            member = server.member
            if server.problem is None and member.model:
                known = found.get(member.model, 0)
                lengths = [length for length in (known, member.max_seq_len) if length]
                found[member.model] = min(lengths, default=0)
        return found

    def ready(self, model: str | None = None) -> bool:
        """Whether some request could be served now: by a whole-request server, or by a pair that fits.

        A pair also needs the minimal numbers of usable servers of both roles.
        """
        models = self.models() if model is None else (model,)
        return any(self._model_ready(name) for name in models)

    def due_probes(self) -> list[Server]:
        """Servers whose breaker asks for a probe now."""
        now_s = self._clock.monotonic_s()
        return [
            server
            for server in self._servers.values()
            if server.breaker.retry_at_s is not None and server.breaker.retry_at_s <= now_s
        ]

    def info(self) -> dict[str, Any]:
        """The body of ``/cluster_info``: TensorRT-LLM's fields, then each server in detail."""
        by_role: dict[str, list[str]] = {"context": [], "generation": [], "both": []}
        for server in self._servers.values():
            by_role[server.member.role].append(server.member.url)
        return {
            "is_ready": self.ready(),
            "current_workers": {
                "context_servers": by_role["context"],
                "generation_servers": by_role["generation"],
                "aggregated_servers": by_role["both"],
            },
            "minimal_instances": self._minimal,
            "servers": [self._describe(server) for server in self._servers.values()],
        }

    def statistics(self) -> dict[str, float]:
        """Servers by role, how many cannot be used, and whether there are enough."""
        roles = [server.member.role for server in self._servers.values()]
        return {
            "ready": float(self.ready()),
            "context_servers": roles.count("context"),
            "generation_servers": roles.count("generation"),
            "aggregated_servers": roles.count("both"),
            "unusable_servers": sum(server.unusable() is not None for server in self._servers.values()),
            "breaker_opened_total": self._opened_by_the_gone
            + sum(server.breaker.opened_total for server in self._servers.values()),
        }

    _opened_by_the_gone = 0

    def _model_ready(self, model: str) -> bool:
        if self.select("both", model)[0]:
            return True
        contexts, generations = self.select("context", model)[0], self.select("generation", model)[0]
        if len(contexts) < self._minimal["context_servers"] or len(generations) < self._minimal["generation_servers"]:
            return False
        return any(pairable(context.member, generation.member) for context in contexts for generation in generations)

    def _describe(self, server: Server) -> dict[str, Any]:
        member = server.member
        load = self._loads.of(member.instance_id)
        return {
            "instance_id": member.instance_id,
            "role": member.role,
            "url": member.url,
            "epoch": member.epoch,
            "model": member.model,
            "dialect": member.dialect,
            "tokens_per_block": member.tokens_per_block,
            "max_seq_len": member.max_seq_len,
            "usable": server.unusable() is None,
            "reason": server.unusable(),
            "active_requests": load.requests,
            "active_tokens": load.tokens,
        }

    def _remove(self, instance_id: str) -> None:
        server = self._servers.pop(instance_id)
        self._opened_by_the_gone += server.breaker.opened_total
        self._loads.forget(instance_id)
        if self._on_gone is not None:
            self._on_gone(instance_id)
