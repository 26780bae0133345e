"""From addresses to members: who is admitted, renewed, let go and left alone, over fake servers and a manual clock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from waiting import until

from kvmesh.coordinator.discovery.asking import Answer, SilentError
from kvmesh.coordinator.discovery.finder import Finder
from kvmesh.coordinator.discovery.source import Expected
from kvmesh.coordinator.registry import MemberRegistry
from kvmesh.net.client import HttpClient
from kvmesh.net.clock import ManualClock
from kvmesh.net.server_info import ServerInfo
from kvmesh.protocol.members import Load, Member
from kvmesh.protocol.version import PROTOCOL_VERSION

LEASE_S = 9.0


def info(instance_id: str = "context-0", **fields: Any) -> ServerInfo:
    given = {
        "role": "context",
        "protocol": PROTOCOL_VERSION,
        "model": "tiny",
        "epoch": 5,
        "compat_digest": "d",
        **fields,
    }
    return ServerInfo(instance_id=instance_id, **given)


def answer(of: ServerInfo | None = None, *, ready: bool = True, draining: bool = False, running: int = 0) -> Answer:
    return Answer(of or info(), ready, draining, Load(healthy=ready or draining, running=running))


class FakeSource:
    """A source that reports what a test tells it."""

    def __init__(self, name: str = "fake", expected: Expected | None = None) -> None:
        self.name = name
        self.expected = expected or Expected()
        self.report: Callable[[Mapping[str, bool]], None] | None = None

    async def run(self, report: Callable[[Mapping[str, bool]], None]) -> None:
        self.report = report
        await anyio.sleep_forever()

    def statistics(self) -> dict[str, float]:
        return {"errors_total": 3}

    def say(self, *urls: str, **takes_work: bool) -> None:
        assert self.report is not None
        self.report({f"http://{url}": takes_work.get(url, True) for url in urls})


class Scene:
    """A finder with fake servers."""

    def __init__(self, *sources: FakeSource) -> None:
        self.clock = ManualClock()
        self.registry = MemberRegistry(self.clock, lease_s=LEASE_S, incarnation="one")
        self.events: list[str] = []
        self.registry.on_event = lambda event: self.events.append(f"{event.kind} {event.member.instance_id}")
        self.sources = list(sources) or [FakeSource()]
        self.servers: dict[str, Answer] = {}
        self.admits = self.buries = True
        self.finder = Finder(
            self.registry,
            self.sources,
            self.clock,
            admits=lambda: self.admits,
            buries=lambda: self.buries,
            asking=self._ask,
        )

    async def _ask(self, http: HttpClient, url: str, dialect: str) -> Answer:
        found = self.servers.get(url.removeprefix("http://"))
        if found is None:
            raise SilentError("nobody is there")
        return found

    @property
    def source(self) -> FakeSource:
        return self.sources[0]

    def member(self, instance_id: str = "context-0") -> Member | None:
        return self.registry.member(instance_id)

    async def settle(self, seconds: float = 0.0) -> None:
        """Let time pass in steps that no interval jumps over, and everything that is due happen."""
        await self._rest()
        while seconds > 0:
            step_s = min(0.5, seconds)
            seconds -= step_s
            self.clock.advance(step_s)
            await self._rest()
            self.registry.sweep()

    async def _rest(self) -> None:
        for _ in range(30):  # rounds of the loop: nothing here waits for anything but the clock
            await anyio.lowlevel.checkpoint()

    @property
    def state(self) -> str:
        [place] = self.finder.places()
        return str(place["state"])


@asynccontextmanager
async def running(scene: Scene) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.finder.run)
        await until(lambda: all(source.report is not None for source in scene.sources))
        yield
        tasks.cancel_scope.cancel()


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_who_answers_becomes_a_member_and_stays_one(scene: Scene) -> None:
    async with running(scene):
        scene.servers["a"] = answer(running=2)
        scene.source.say("a")
        await scene.settle()
        found = scene.member()
        assert found is not None
        assert (found.url, found.role, found.epoch, found.source, found.load.running) == (
            "http://a", "context", 5, "fake", 2,
        )  # fmt: skip
        scene.servers["a"] = answer(running=3)
        await scene.settle(4 * LEASE_S)
        assert scene.events[0] == "joined context-0"
        assert "dead context-0" not in scene.events
        assert scene.member().load.running == 3  # type: ignore[union-attr]
        assert scene.finder.statistics()["members"] == 1


async def test_who_stops_answering_is_dead_within_a_lease(scene: Scene) -> None:
    async with running(scene):
        scene.servers["a"] = answer()
        scene.servers["b"] = answer(info("context-1"))
        scene.source.say("a", "b")
        await scene.settle(1.0)
        del scene.servers["a"]
        await scene.settle(LEASE_S + 1.0)
        assert scene.member() is None
        assert scene.events.count("dead context-0") == 1
        assert scene.member("context-1") is not None
        assert scene.finder.statistics()["members"] == 1
        scene.servers["a"] = answer(info(epoch=6))
        await scene.settle(1.5)
        assert scene.member().epoch == 6  # type: ignore[union-attr]


async def test_whose_address_is_named_no_more_has_left_at_once(scene: Scene) -> None:
    async with running(scene):
        scene.servers |= {"a": answer(), "b": answer(info("context-1"))}
        scene.source.say("a", "b")
        await scene.settle()
        scene.source.say("b")
        await scene.settle()
        assert scene.events == ["joined context-0", "joined context-1", "left context-0"]


async def test_an_address_that_takes_no_new_work_drains_and_does_not_join(scene: Scene) -> None:
    async with running(scene):
        scene.servers |= {"a": answer(), "b": answer(info("context-1"))}
        scene.source.say("a", "b", b=False)
        await scene.settle(2.0)
        assert scene.member("context-1") is None
        scene.source.say("a", "b", a=False, b=False)
        await scene.settle()
        assert scene.member().draining  # type: ignore[union-attr]
        scene.source.say("a", "b")
        await scene.settle()
        assert not scene.member().draining  # type: ignore[union-attr]
        assert scene.member("context-1") is not None


async def test_a_server_that_says_that_it_drains_or_is_ill_stays_a_member_as_such(scene: Scene) -> None:
    async with running(scene):
        scene.servers["a"] = answer()
        scene.source.say("a")
        await scene.settle()
        scene.servers["a"] = answer(ready=False)
        await scene.settle(LEASE_S)
        member = scene.member()
        assert member is not None
        assert (member.load.healthy, member.draining) == (False, False)
        scene.servers["a"] = answer(ready=False, draining=True)
        await scene.settle(LEASE_S)
        member = scene.member()
        assert member is not None
        assert (member.load.healthy, member.draining) == (True, True)
        assert scene.state == "draining"


async def test_one_that_is_not_ready_waits(scene: Scene) -> None:
    async with running(scene):
        scene.servers["a"] = answer(ready=False)
        scene.source.say("a")
        await scene.settle(3.0)
        assert scene.member() is None
        assert scene.state == "is not ready"
        scene.servers["a"] = answer()
        await scene.settle(1.5)
        assert scene.member() is not None


@pytest.mark.parametrize(
    ("of", "expected", "says"),
    [
        (info(role="generation"), Expected("context"), "is a generation server, not a context server"),
        (info(role="router"), Expected(), "is a router, which serves no requests"),
        (info(protocol=PROTOCOL_VERSION + 1), Expected(), "speaks protocol"),
        (info(model=""), Expected(), "does not say which model"),
        (info(instance_id=""), Expected(), "no usable instance_id"),
        (info(instance_id="a/b"), Expected(), "no usable instance_id"),
        (info(transfer_backend="DEFAULT", compat_digest=""), Expected(), "how they are laid out"),
        (ServerInfo(model="m"), Expected(), "does not say its role"),
    ],
)
async def test_who_does_not_fit_is_not_taken_in_and_it_is_said_why(
    of: ServerInfo, expected: Expected, says: str
) -> None:
    scene = Scene(FakeSource(expected=expected))
    async with running(scene):
        scene.servers["a"] = answer(of)
        scene.source.say("a")
        await scene.settle(20.0)
        assert scene.registry.members().members == []
        assert says in scene.state
        assert scene.finder.statistics()["rejected_total"] == 1, "said once"


async def test_another_engine_is_a_member_by_what_its_source_says() -> None:
    scene = Scene(FakeSource(expected=Expected("generation", "vllm")))
    async with running(scene):
        scene.servers["10.0.0.9:8000"] = answer(ServerInfo(model="llama"))
        scene.source.say("10.0.0.9:8000")
        await scene.settle(3 * LEASE_S)
        member = scene.member("10.0.0.9:8000")
        assert member is not None
        assert (member.role, member.dialect, member.model) == ("generation", "vllm", "llama")
        assert scene.events == ["joined 10.0.0.9:8000"], "its epoch is the coordinator's choice, and stays"


async def test_who_registers_itself_is_not_doubled_and_not_renewed(scene: Scene) -> None:
    async with running(scene):
        own = Member(instance_id="context-0", role="context", url="http://own", epoch=5)
        scene.registry.register(own)
        scene.servers["a"] = answer()
        scene.source.say("a")
        await scene.settle(LEASE_S / 2)
        assert scene.member() == own
        assert "registered itself" in scene.state
        scene.source.say()
        await scene.settle()
        assert scene.member() == own, "its address is its own business"
        scene.source.say("a")
        del scene.servers["a"]
        scene.registry.register(Member(instance_id="other", role="context", url="http://other", epoch=1))
        await scene.settle(LEASE_S)
        assert scene.member() is None, "its lease is"


async def test_one_that_was_found_may_register_itself_later(scene: Scene) -> None:
    async with running(scene):
        scene.servers["a"] = answer()
        scene.source.say("a")
        await scene.settle()
        own = Member(instance_id="context-0", role="context", url="http://own", epoch=5)
        assert scene.registry.register(own).epoch == 5
        await scene.settle(LEASE_S / 2)
        assert scene.member() == own
        assert scene.events == ["joined context-0", "updated context-0"]


async def test_two_addresses_of_one_server_make_one_member(scene: Scene) -> None:
    async with running(scene):
        scene.servers |= {"a": answer(), "b": answer()}
        scene.source.say("a")
        await scene.settle()
        scene.source.say("a", "b")
        await scene.settle(LEASE_S)
        assert scene.events == ["joined context-0"]
        assert scene.member().url == "http://a"  # type: ignore[union-attr]
        scene.source.say("b")
        await scene.settle(LEASE_S)
        assert scene.member().url == "http://b"  # type: ignore[union-attr]


async def test_an_address_of_two_sources_leaves_with_the_last_of_them() -> None:
    scene = Scene(FakeSource("one"), FakeSource("two"))
    async with running(scene):
        scene.servers["a"] = answer()
        for source in scene.sources:
            source.say("a")
        await scene.settle()
        scene.sources[0].say()
        await scene.settle()
        assert scene.member() is not None
        scene.sources[1].say()
        await scene.settle()
        assert scene.events == ["joined context-0", "left context-0"]


async def test_a_restart_is_a_new_life_and_a_silence_is_not(scene: Scene) -> None:
    """A server that was taken for dead has an epoch that it does not know; it keeps that until it is started anew."""
    async with running(scene):
        scene.servers |= {"a": answer(), "b": answer(info("context-1"))}
        scene.source.say("a", "b")
        await scene.settle()
        del scene.servers["a"]
        await scene.settle(LEASE_S + 1)
        scene.servers["a"] = answer()
        await scene.settle(2.0)
        again = scene.member()
        assert again is not None
        assert again.epoch > 5
        await scene.settle(LEASE_S)
        assert scene.member().epoch == again.epoch  # type: ignore[union-attr]
        scene.servers["a"] = answer(info(epoch=again.epoch + 1))
        await scene.settle(LEASE_S)
        assert scene.member().epoch == again.epoch + 1  # type: ignore[union-attr]
        lives = [event for event in scene.events if "context-0" in event and "updated" not in event]
        assert lives == ["joined context-0", "dead context-0"] * 2 + ["joined context-0"]


async def test_only_who_answers_for_the_mesh_admits_and_only_who_leads_lets_go(scene: Scene) -> None:
    async with running(scene):
        scene.admits = scene.buries = False
        scene.servers["a"] = answer()
        scene.source.say("a")
        await scene.settle(5.0)
        assert scene.events == []
        scene.admits = True
        await scene.settle(1.5)
        assert scene.events == ["joined context-0"]
        scene.source.say()
        await scene.settle(2.0)
        assert scene.events == ["joined context-0"]
        scene.buries = True
        await scene.settle(1.5)
        assert scene.events == ["joined context-0", "left context-0"]


async def test_a_layout_that_fits_nobody_is_said(scene: Scene) -> None:
    """It is a member all the same: the servers that fit it may be on their way."""
    async with running(scene):
        scene.servers |= {
            "a": answer(info(compat_digest="aaaa")),
            "b": answer(info("generation-0", role="generation", compat_digest="bbbb")),
        }
        scene.source.say("a")
        await scene.settle()
        assert scene.state == "a member"
        scene.source.say("a", "b")
        await scene.settle()
        states = {place["instance_id"]: place["state"] for place in scene.finder.places()}
        assert "is that of no context server: context-0 has aaaa" in states["generation-0"]
        scene.servers["c"] = answer(info("generation-1", role="generation", compat_digest="aaaa"))
        scene.source.say("a", "b", "c")
        await scene.settle(LEASE_S)
        states = {place["instance_id"]: place["state"] for place in scene.finder.places()}
        assert states["generation-1"] == states["context-0"] == "a member"


async def test_a_source_that_fails_takes_nobody_along() -> None:
    class Broken(FakeSource):
        async def run(self, report: Callable[[Mapping[str, bool]], None]) -> None:
            self.report = report
            raise ZeroDivisionError

    scene = Scene(Broken(), FakeSource())
    async with running(scene):
        scene.servers["a"] = answer()
        scene.sources[1].say("a")
        await scene.settle(6.0)
        assert scene.events == ["joined context-0"]
        assert scene.finder.statistics()["defects_total"] == 2
        assert scene.finder.statistics()["source_errors_total"] == 6
