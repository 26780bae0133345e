"""A worker's place in the mesh: what it tells the coordinator, and what it does when another member is gone."""

from __future__ import annotations

from collections.abc import Callable

from anyio.abc import TaskGroup

from kvmesh.net.discovery import CoordinatorClient
from kvmesh.protocol.members import Load, Member, MemberEvent
from kvmesh.protocol.ranks import rank_instance_ids
from kvmesh.telemetry import get_logger
from kvmesh.worker.context_legs import ContextLegs
from kvmesh.worker.ranks import EngineGroup

__all__ = ["join_mesh"]

_log = get_logger("worker")


async def join_mesh(
    tasks: TaskGroup,
    coordinator: CoordinatorClient,
    member: Member,
    engine: EngineGroup,
    legs: ContextLegs,
    *,
    load: Callable[[], Load],
    fail: Callable[[str], None],
) -> CoordinatorClient:
    """Register at the coordinator, pass the engines' ledger on to it, and listen for members that are gone.

    Args:
        tasks: owns what runs from now on.
        coordinator: not started yet.
        member: this worker.
        engine: its engines.
        legs: its context legs; those of a router that is gone are given up.
        load: what heartbeats tell.
        fail: called with the reason when the mesh goes on without this life of the worker.

    Returns:
        The same client, to drain and to leave with.
    """
    await coordinator.start(tasks)
    coordinator.subscribe(_on_member_event(member.instance_id, engine, legs))
    engine.on_ledger(coordinator.report)
    # Peers have forgotten what an older life gave out; only a new engine signs with a new epoch.
    coordinator.announce(
        member,
        load,
        on_outlived=lambda epoch: fail(f"the mesh took this worker for dead; its next life is epoch {epoch}"),
        on_fenced=lambda: fail("a newer process has taken this instance id"),
    )
    return coordinator


def _on_member_event(instance_id: str, engine: EngineGroup, legs: ContextLegs) -> Callable[[MemberEvent], None]:
    def hear(event: MemberEvent) -> None:
        member = event.member
        if event.kind not in ("dead", "left") or member.instance_id == instance_id:
            return
        if member.role == "router":
            _give_up_legs_of(member.instance_id, engine, legs)
            return
        for peer in rank_instance_ids(member.instance_id, member.dp_size):
            engine.peer_dead(peer, member.epoch)

    return hear


def _give_up_legs_of(router: str, engine: EngineGroup, legs: ContextLegs) -> None:
    """A router is gone: nobody will be sent for what it had prefilled here."""
    orphans = legs.take_orphans(router)
    for request_id in orphans:
        engine.abort(request_id)
    if orphans:
        _log.warning("a router is gone; its prompts are given up", router=router, prompts=len(orphans))
