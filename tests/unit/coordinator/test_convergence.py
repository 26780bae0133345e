"""Whatever happens to members and coordinators, a watcher ends up knowing exactly who is alive, and in good order.

Coordinators lose their memory, or come back with an old one: no life that has ended is ever taken for alive again.
"""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvmesh.coordinator.ledger import TransferLedger
from kvmesh.coordinator.registry import FencedError, MemberRegistry, UnknownMemberError
from kvmesh.coordinator.state import CoordinatorState
from kvmesh.coordinator.storage import MemoryStore
from kvmesh.net.clock import ManualClock
from kvmesh.net.discovery_view import MemberView
from kvmesh.protocol.members import Heartbeat, Load, Member, MemberEvent

LEASE_S = 10.0
NAMES = ("context-0", "generation-0", "generation-1")

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["start", "leave", "crash", "beat"]), st.sampled_from(NAMES)),
        st.tuples(st.sampled_from(["restart", "watch", "second", "store", "succeed"]), st.just("")),
    ),
    max_size=60,
)


class World:
    """Processes, a coordinator that may lose its memory, and one watcher."""

    def __init__(self, history: int) -> None:
        self.clock = ManualClock()
        self.history = history
        self.incarnations = 0
        self.epochs: dict[str, int] = {}
        self.stored: dict[str, bytes] = {}
        self.view = MemberView()
        self.heard: list[MemberEvent] = []
        self.view.subscribe(self.heard.append)
        self.restart("")

    def restart(self, _: str) -> None:
        self.incarnations += 1
        self.registry = MemberRegistry(
            self.clock, lease_s=LEASE_S, incarnation=str(self.incarnations), history=self.history
        )

    def store(self, _: str) -> None:
        """What a coordinator with this memory would have written."""
        state = self.state()
        self.stored = {key: value for key in state.keys() if (value := state.read(key)) is not None}  # noqa: SIM118

    def succeed(self, _: str) -> None:
        """Another coordinator takes over with what was stored, maybe long ago."""
        self.restart("")
        self.state().restore(self.stored)

    def state(self) -> CoordinatorState:
        return CoordinatorState(self.registry, TransferLedger(self.clock), MemoryStore(self.clock))

    def start(self, name: str) -> None:
        self.register(name, 0)

    def register(self, name: str, epoch: int) -> None:
        member = Member(instance_id=name, role="both", url="http://u", epoch=epoch)
        self.epochs[name] = self.registry.register(member).epoch

    def leave(self, name: str) -> None:
        if name in self.epochs:
            self.registry.deregister(name, self.epochs.pop(name))

    def crash(self, name: str) -> None:
        self.epochs.pop(name, None)

    def beat(self, name: str) -> None:
        if name not in self.epochs:
            return
        try:
            load = Load(running=len(self.heard))
            self.registry.heartbeat(name, Heartbeat(epoch=self.epochs[name], load=load))
        except UnknownMemberError:
            self.register(name, self.epochs[name])
        except FencedError:
            raise AssertionError("only one process has each name here") from None

    def second(self, _: str) -> None:
        self.clock.advance(1.0)
        self.registry.sweep()

    def watch(self, _: str) -> None:
        reply = self.registry.changes(self.view.incarnation, self.view.revision)
        self.view.apply(reply, self.clock.monotonic_s())
        self.view.expire(self.clock.monotonic_s())
        for name, epoch in self.view.take_outdated().items():
            self.registry.met(name, epoch)

    def settle(self) -> None:
        for _ in range(2 * int(LEASE_S)):
            for name in NAMES:
                self.beat(name)
            self.second("")
            self.watch("")


TWO_LIVES = [("start", "context-0"), ("start", "context-0"), ("watch", "")]
"""The watcher knows an epoch that a coordinator without memory will not have reached."""


@settings(max_examples=300, deadline=None)
@example([*TWO_LIVES, ("restart", ""), ("start", "context-0")], 1000)
@example([*TWO_LIVES, ("restart", ""), ("watch", ""), ("start", "context-0")], 1000)
@example([("start", "context-0"), ("store", ""), ("start", "context-0"), ("watch", ""), ("succeed", "")], 1000)
@example([("start", "context-0"), ("store", ""), ("leave", "context-0"), ("watch", ""), ("succeed", "")], 1000)
@given(ACTIONS, st.sampled_from([2, 1000]))
def test_a_watcher_converges_and_hears_a_consistent_story(actions, history):
    world = World(history)
    for action, name in actions:
        getattr(world, action)(name)
    world.settle()
    assert {m.instance_id: m.epoch for m in world.view.members()} == world.epochs
    assert {m.instance_id for m in world.registry.members().members} == set(world.epochs)

    alive: dict[str, int] = {}
    latest: dict[str, int] = {}
    for event in world.heard:
        name, epoch = event.member.instance_id, event.member.epoch
        if event.kind == "joined":
            assert name not in alive, "an older life ends before a newer one begins"
            alive[name] = epoch
            assert epoch > latest.get(name, -1), "what was alive before, or is over, does not begin again"
            latest[name] = epoch
        elif event.kind == "updated":
            assert alive[name] == epoch
        elif name in alive:
            assert alive.pop(name) <= epoch
    assert alive == world.epochs


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["restart", "watch", "second"]), max_size=8))
def test_coordinator_restarts_alone_kill_nobody(actions):
    """As long as members beat within their lease, no restart makes a watcher drop one."""
    world = World(1000)
    for name in NAMES:
        world.start(name)
    world.watch("")
    for action in actions:
        getattr(world, action)("")
        for name in NAMES:
            world.beat(name)
    world.settle()
    assert {event.kind for event in world.heard} <= {"joined", "updated"}
