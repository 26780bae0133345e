from __future__ import annotations

import io

import pytest
import yaml
from rich.console import Console

from kvmesh.cli.errors import UserError
from kvmesh.cli.mesh import _Settled
from kvmesh.cli.plan import (
    LEAST_CACHE_BYTES,
    MOST_CACHE_BYTES,
    Machine,
    MeshPlan,
    event_ports,
    event_ports_are_free,
    plan_mesh,
    with_free_event_ports,
)
from kvmesh.cli.ports import HIGHEST, LOWEST, PortPicker
from kvmesh.cli.rundir import RunDir
from kvmesh.config import MeshSettings, WorkerSettings

MACHINE = Machine(cores=4, free_memory_bytes=8 << 30)


def plan(
    settings: MeshSettings | None = None, taken: frozenset[int] = frozenset(), machine: Machine = MACHINE
) -> MeshPlan:
    ports = PortPicker(free=lambda _host, port: port not in taken, seed=1)
    return plan_mesh(settings or MeshSettings(), machine, ports, "secret")


def settings_of(mesh: MeshPlan, name: str):
    return next(child.settings for child in mesh.children if child.name == name)


def test_the_default_mesh():
    mesh = plan()
    assert [child.name for child in mesh.children] == ["coordinator", "indexer", "context-0", "generation-0", "router"]
    assert mesh.worker_names == ("context-0", "generation-0")
    assert (mesh.url, mesh.coordinator_url) == ("http://127.0.0.1:8000", "http://127.0.0.1:8400")
    context, router = settings_of(mesh, "context-0"), settings_of(mesh, "router")
    assert (context.role, context.port, context.instance_id) == ("context", 0, "context-0")
    assert context.coordinator_url == router.coordinator_url == mesh.coordinator_url
    assert context.cache_transceiver_config.backend == "DEFAULT"
    assert context.num_threads == 2
    assert context.log_format == "json"
    assert router.indexer_match_endpoint == settings_of(mesh, "indexer").match_endpoint


def test_the_router_stops_first_and_the_coordinator_last():
    ranks = {child.name: child.stop_rank for child in plan().children}
    assert ranks["router"] < ranks["context-0"] == ranks["generation-0"] < ranks["indexer"] < ranks["coordinator"]


def test_every_worker_has_its_own_event_ports_on_loopback():
    mesh = plan(MeshSettings(num_context=2, num_generation=2, num_aggregated=1))
    events = [settings_of(mesh, name).kv_cache_config.kv_events_config for name in mesh.worker_names]
    endpoints = [end for event in events for end in (event.endpoint, event.replay_endpoint)]
    assert len(set(endpoints)) == 10
    assert all(endpoint.startswith("tcp://127.0.0.1:") for endpoint in endpoints)
    assert all(event.enable_kv_cache_events and event.publisher == "zmq" for event in events)


def test_default_ports_move_aside_and_named_ones_do_not():
    mesh = plan(taken=frozenset({8400, 8300, 8301, 5557, 5658}))
    moved = settings_of(mesh, "coordinator").port
    assert LOWEST <= moved < HIGHEST
    assert mesh.coordinator_url == f"http://127.0.0.1:{moved}"
    events = [settings_of(mesh, name).kv_cache_config.kv_events_config.endpoint for name in mesh.worker_names]
    assert "tcp://127.0.0.1:5557" not in events
    for named, taken in (
        ({"coordinator": {"port": 9400}}, 9400),
        ({"context_port": 9101}, 9101),
        ({"router": {"port": 9000}}, 9000),
    ):
        with pytest.raises(UserError, match=str(taken)):
            plan(MeshSettings.model_validate(named), taken=frozenset({taken}))


def test_a_taken_router_port_names_the_flag():
    with pytest.raises(UserError, match="--port"):
        plan(taken=frozenset({8000}))
    assert LOWEST <= settings_of(plan(MeshSettings(router={"port": 0})), "router").port < HIGHEST


def test_named_worker_ports_are_used():
    mesh = plan(MeshSettings(num_context=2, context_port=9101))
    assert [settings_of(mesh, f"context-{i}").port for i in range(2)] == [9101, 9102]


@pytest.mark.parametrize(
    ("free_bytes", "cache_bytes"), [(1 << 28, LEAST_CACHE_BYTES), (64 << 30, MOST_CACHE_BYTES), (4 << 30, 512 << 20)]
)
def test_the_cache_is_a_fair_share_of_free_memory(free_bytes, cache_bytes):
    mesh = plan(machine=Machine(cores=2, free_memory_bytes=free_bytes))
    assert settings_of(mesh, "context-0").device_memory_bytes == cache_bytes


def test_every_engine_has_a_thread():
    mesh = plan(MeshSettings(num_context=3, num_generation=3), machine=Machine(2, 8 << 30))
    assert {settings_of(mesh, name).num_threads for name in mesh.worker_names} == {1}


def test_what_a_section_says_is_kept():
    mesh = plan(
        MeshSettings.model_validate(
            {
                "log_level": "warning",
                "context": {"role": "context", "num_threads": 7, "device_memory_bytes": 123, "log_level": "debug"},
                "generation": {"role": "generation", "cache_transceiver_config": {"backend": "NIXL"}},
            }
        )
    )
    context, generation = settings_of(mesh, "context-0"), settings_of(mesh, "generation-0")
    assert (context.num_threads, context.device_memory_bytes, context.log_level) == (7, 123, "debug")
    assert (generation.cache_transceiver_config.backend, generation.log_level) == ("NIXL", "warning")


def test_settings_survive_the_way_through_a_file():
    for child in plan(MeshSettings(num_aggregated=1)).children:
        written = child.settings.model_dump(mode="json", exclude_unset=True)
        assert type(child.settings).model_validate(written) == child.settings


def test_a_picker_gives_each_port_once_and_gives_up_in_the_end():
    picker = PortPicker(free=lambda _host, _port: True, seed=3)
    assert picker.pick("h", 1) == 1
    assert picker.pick("h", 1) != 1
    assert not picker.claim("h", 1)
    run = picker.pick_run("h", 3, 10)
    assert run == 10
    assert picker.pick_run("h", 3, 12) not in (10, 11, 12)
    with pytest.raises(RuntimeError):
        PortPicker(free=lambda _host, _port: False).pick("h")
    with pytest.raises(RuntimeError):
        PortPicker(free=lambda _host, _port: False).pick_run("h", 2, 1)


@pytest.mark.parametrize(
    ("settings", "moves"),
    [
        ({}, {"endpoint", "replay_endpoint"}),
        ({"events_port": 5557}, {"replay_endpoint"}),
        ({"events_port": 5557, "replay_port": 5657}, set()),
        (
            {
                "context": {
                    "kv_cache_config": {
                        "kv_events_config": {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:5557"}
                    }
                }
            },
            {"replay_endpoint"},
        ),
    ],
)
def test_event_ports_lost_since_the_plan_move_unless_the_user_named_them(settings, moves):
    taken: set[int] = set()
    ports = PortPicker(free=lambda _host, port: port not in taken, seed=1)
    mesh = MeshSettings.model_validate(settings)
    planned = plan_mesh(mesh, MACHINE, ports, "secret")
    for child in planned.children:
        assert with_free_event_ports(mesh, child, ports) is child
    worker = next(child for child in planned.children if child.name == "context-0")
    taken |= {5557, 5657}
    renewed = with_free_event_ports(mesh, worker, ports)
    before, after = (child.settings.kv_cache_config.kv_events_config for child in (worker, renewed))
    assert {field for field in type(before).model_fields if getattr(before, field) != getattr(after, field)} == moves
    assert (renewed is worker) == (not moves)
    for field in moves:
        assert LOWEST <= int(getattr(after, field).rpartition(":")[2]) < HIGHEST


def test_event_ports_are_free_when_those_of_every_rank_are():
    taken: set[int] = set()
    ports = PortPicker(free=lambda _host, port: port not in taken, seed=1)
    ranks = WorkerSettings(enable_attention_dp=True, tensor_parallel_size=2)
    planned = {child.name: child for child in plan_mesh(MeshSettings(context=ranks), MACHINE, ports, "s").children}
    assert event_ports(planned["context-0"]) == {"endpoint": 5557, "replay_endpoint": 5657}
    assert event_ports(planned["router"]) == {}
    for held, free in ((set(), True), ({5558}, False), ({5658}, False), ({5559}, True)):
        taken.clear()
        taken.update(held)
        assert event_ports_are_free(planned["context-0"], ports) is free
        assert event_ports_are_free(planned["router"], ports)


@pytest.mark.parametrize("taken", [set(), {5557}, {5557, 5657}])
def test_event_ports_that_move_are_told_on_the_console(tmp_path, taken):
    held: set[int] = set()
    ports = PortPicker(free=lambda _host, port: port not in held, seed=1)
    planned = plan_mesh(MeshSettings(), MACHINE, ports, "secret")
    worker = next(child for child in planned.children if child.name == "context-0")
    run_dir = RunDir(tmp_path)
    run_dir.prepare()
    run_dir.configs.mkdir()
    console = Console(file=io.StringIO(), width=20)
    child = _Settled(worker, MeshSettings(), ports, run_dir, "secret", console).prepare()
    held |= taken
    assert child.released() is not bool(taken)
    assert child.renew() is bool(taken)
    written = yaml.safe_load((run_dir.configs / "context-0.yaml").read_text())
    events = written["kv_cache_config"]["kv_events_config"]
    now = [int(events[field].rpartition(":")[2]) for field in ("endpoint", "replay_endpoint")]
    moved = [f"{old} is now {new}" for old, new in zip((5557, 5657), now, strict=True) if old in taken]
    assert [new for new in now if new not in (5557, 5657)] == now[: len(moved)]
    told = f"event ports of context-0 are taken: {', '.join(moved)}\n" if moved else ""
    assert console.file.getvalue() == told
    assert child.released()
    assert not child.renew(), "once is enough"


def test_a_picker_knows_what_it_picked_and_lost():
    taken: set[int] = set()
    ports = PortPicker(free=lambda _host, port: port not in taken, seed=1)
    ports.claim("h", 1)
    assert (ports.pick("h", 2), ports.pick_run("h", 2, 3)) == (2, 3)
    assert ports.repick("h", 2) == 2
    taken |= {1, 2, 4}
    assert ports.lost() == [2, 4]
    assert ports.repick("h", 2) not in (1, 2, 3, 4)
    assert ports.lost() == [4]


def test_a_run_of_ports_moves_as_a_whole():
    taken: set[int] = set()
    ports = PortPicker(free=lambda _host, port: port not in taken, seed=1)
    assert ports.pick_run("h", 2, 10) == 10
    assert ports.repick("h", 10, 2) == 10
    taken |= {11}
    assert LOWEST <= ports.repick("h", 10, 2) < HIGHEST
    assert ports.lost() == []


def test_attention_dp_ranks_get_ports_and_memory_of_their_own():
    ranks = WorkerSettings(enable_attention_dp=True, tensor_parallel_size=8)
    asked: list[tuple[int, int]] = []

    class Ports(PortPicker):
        def pick_run(self, host: str, count: int, preferred: int) -> int:
            asked.append((count, preferred))
            return super().pick_run(host, count, preferred)

    mesh = MeshSettings(num_context=2, context=ranks)
    plan = plan_mesh(mesh, Machine(4, 1 << 30), Ports(free=lambda _host, _port: True), "s")
    assert asked == [(17, 5557), (17, 5657)]
    memory = {child.name: child.settings.device_memory_bytes for child in plan.children if child.stop_rank == 1}
    assert memory["context-0"] == 8 * memory["generation-0"] == 8 * (128 << 20)
