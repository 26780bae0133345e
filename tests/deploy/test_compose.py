"""The mesh in containers, as people run it, seen from outside; the tests build on each other, in this order."""

from __future__ import annotations

import ssl
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import zmq
import zmq.auth
from containers.asking import Ask, asking
from containers.engine import Docker
from containers.project import Project
from meshes.process import request, until

from kvmesh.models.store import DEFAULT_MODEL
from kvmesh.protocol.events import BlockStored, EventBatch

Tell = Callable[[str, float], None]
Items = list[dict[str, Any]]

SERVICES = {"router", "coordinator", "indexer", "etcd", "memory", "context", "generation"}
LEASE_S = 10.0
KEEPERS = ("router", "coordinator", "indexer", "etcd", "context", "generation")
"""Services that have a place for secrets."""


def wait_for_members(mesh: Project, context: int, generation: int, timeout_s: float = 60.0) -> float:
    """Seconds until the membership is that."""
    begin_s = time.monotonic()
    wanted = {"router": 1, "context": context, "generation": generation}
    until(lambda: mesh.members().items() >= wanted.items(), f"members {wanted}, not {mesh.members()}", timeout_s)
    return time.monotonic() - begin_s


def check_golden(ask: Ask, golden: Items) -> None:
    with ThreadPoolExecutor(len(golden)) as together:
        answers = list(together.map(lambda item: ask(item["prompt"]), golden))
    for item, (prompt_ids, tokens) in zip(golden, answers, strict=True):
        assert prompt_ids == item["prompt_ids"]
        assert tokens[: len(item["certain"])] == item["certain"]


def test_everyone_is_there(mesh: Project) -> None:
    found = [facts["Config"]["Labels"]["com.docker.compose.service"] for facts in mesh.inspect()]
    assert {name: found.count(name) for name in found} == {**dict.fromkeys(SERVICES, 1), "context": 2, "generation": 2}
    wait_for_members(mesh, 2, 2)


def test_the_answers_are_the_references(mesh: Project, ask: Ask, golden: Items) -> None:
    check_golden(ask, golden)
    transfers = mesh.get("/transfers")
    assert transfers["counts"].get("completed", 0) >= len(golden)


def test_shared_memory_between_containers(mesh: Project) -> None:
    """And the log says so."""
    planes = {line["plane"] for line in mesh.logs("generation") if line["event"] == "paired"}
    assert planes == {"memfd"}


def test_containers_are_locked(mesh: Project, docker: Docker) -> None:
    for facts in mesh.inspect():
        name = facts["Name"]
        host = facts["HostConfig"]
        assert host["ReadonlyRootfs"], name
        assert host["CapDrop"] == ["ALL"], name
        assert host["SecurityOpt"] == ["no-new-privileges:true"], name
        assert not host["Privileged"], name
        assert facts["Config"]["User"] == "10001:10001", name
        bindings = [binding for bound in (host["PortBindings"] or {}).values() for binding in bound]
        assert all(binding["HostIp"] == "127.0.0.1" for binding in bindings), name
        status = Path(f"/proc/{facts['State']['Pid']}/status")
        if status.exists():  # the engine is on this machine
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            assert {int(fields[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {0}, name
            assert fields["NoNewPrivs"] == "1", name
            assert fields["Uid"].split() == ["10001"] * 4, name
        if "etcd" not in name:
            written = docker("exec", facts["Id"], "sh", "-c", "touch /opt/x /x /var/lib/kvmesh/x", check=False)
            assert written.count("Read-only file system") == 3, name


def test_no_secret_is_told(mesh: Project, docker: Docker) -> None:
    server = mesh.containers("context")[0]
    secret = docker("exec", server, "cat", "/run/kvmesh/cluster_secret").strip()
    assert len(secret) >= 32
    assert docker("exec", server, "stat", "-c", "%a %u", "/run/kvmesh/cluster_secret").strip() == "600 10001"
    found = {service: secrets_in(mesh, docker, service) for service in KEEPERS}
    assert {service for service in KEEPERS if found[service]} == {"context", "generation"}
    everything = mesh.compose("logs", "--no-color") + str(mesh.inspect()) + mesh.compose("config")
    everything += "".join(docker("exec", each, "env") for each in mesh.containers())
    assert secret not in everything
    for each in mesh.containers():
        for pid in docker("top", each, "-eo", "pid").split()[1:]:
            process = Path("/proc", pid)
            if process.exists():  # the engine is on this machine
                shown = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
                assert secret.encode() not in shown


def secrets_in(mesh: Project, docker: Docker, service: str) -> set[str]:
    """What a service has in its own place for secrets."""
    listed = docker("exec", mesh.containers(service)[0], "sh", "-c", "cd /run/kvmesh && find . -type f")
    return {line.removeprefix("./") for line in listed.split()}


def test_a_subscriber_outside_reads_the_events(mesh: Project, ask: Ask) -> None:
    """All servers' events, in one stream."""
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(mesh.events_endpoint)
    asked = 0

    def stored() -> bool:
        # A subscription takes a moment to arrive, so the question is asked again, and is new each time.
        nonlocal asked
        asked += 1
        prompt, _ = ask([1000 + (7 * token + 31 * asked) % 40_000 for token in range(100)], 2)
        while socket.poll(2000):
            _topic, _sequence, payload = socket.recv_multipart()
            for event in msgspec.msgpack.decode(payload, type=EventBatch).events:
                told = list(event.token_ids) if isinstance(event, BlockStored) else []
                if told and told == prompt[: len(told)]:
                    return True
        return False

    try:
        until(stored, "blocks of a prompt are told", 60)
    finally:
        socket.close(linger=0)
        context.term()


def test_scale_up_and_down(mesh: Project, ask: Ask, golden: Items, told: Tell) -> None:
    begin_s = time.monotonic()
    mesh.up("--no-recreate", "--scale", "context=4", "--scale", "generation=3")
    wait_for_members(mesh, 4, 3)
    told("scaled from 2 + 2 to 4 + 3 servers", time.monotonic() - begin_s)
    check_golden(ask, golden)
    begin_s = time.monotonic()
    mesh.up("--no-recreate", "--scale", "context=2", "--scale", "generation=2")
    wait_for_members(mesh, 2, 2)
    told("scaled back", time.monotonic() - begin_s)
    ask("The capital of France is", 4)


@pytest.mark.parametrize("service", ["context", "generation"])
def test_a_killed_server_under_load(mesh: Project, docker: Docker, ask: Ask, told: Tell, service: str) -> None:
    """Clients are answered or told of a failure; the others go on; nothing is stuck."""
    stop = threading.Event()
    answered: list[int] = []
    failed: list[str] = []

    def client(number: int) -> None:
        count = 0
        while not stop.is_set():
            count += 1
            prompt = [(number * 1000 + 13 * count + token) % 40_000 for token in range(64)]
            try:
                _, tokens = ask(prompt, 16)
                answered.append(len(tokens))
            except openai.APIError as error:
                failed.append(f"{type(error).__name__}: {error}")

    def reached(count: int) -> Callable[[], bool]:
        return lambda: len(answered) >= count

    with ThreadPoolExecutor(4) as clients:
        running = [clients.submit(client, number) for number in range(4)]
        try:
            until(reached(8), "answers before", 60)
            docker("kill", mesh.containers(service)[0])
            left = {"context": 2, "generation": 2, service: 1}
            seconds = wait_for_members(mesh, left["context"], left["generation"], LEASE_S * 4)
            told(f"a killed {service} server leaves the membership", seconds)
            before = len(failed)
            until(reached(len(answered) + 12), "answers after", 60)
        finally:
            stop.set()
        for each in running:
            each.result()
    print(f"\n{service} killed: {len(answered)} answered, {len(failed)} failed: {sorted(set(failed))[:3]}")
    assert set(answered) == {16}
    assert len(failed) - before <= 0, failed[before:]  # whoever asks once the death is known is served
    assert len(failed) <= 8, failed
    until(lambda: not open_transfers(mesh), "no transfer is open", 60)
    assert mesh.get("/transfers?stuck=1")["transfers"] == []
    mesh.up("--no-recreate")
    wait_for_members(mesh, 2, 2)


def open_transfers(mesh: Project) -> list[dict[str, Any]]:
    answer: list[dict[str, Any]] = mesh.get("/transfers?open=1")["transfers"]
    return answer


def test_sigterm_drains(mesh: Project, docker: Docker, told: Tell) -> None:
    """Streams that run when every service is told to stop still end as they should."""
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        stream = client.completions.create(
            model=DEFAULT_MODEL,
            prompt="Once upon a time",
            max_tokens=300,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        pieces = iter(stream)
        next(pieces)
        begin_s = time.monotonic()
        containers = mesh.containers("router", "generation")
        with ThreadPoolExecutor(1) as beside:
            stopping = beside.submit(docker, "stop", "--time", "60", *containers, timeout_s=120)
            reasons = [piece.choices[0].finish_reason for piece in pieces if piece.choices]
            stopping.result()
        told("router and generation servers stopped in mid-answer", time.monotonic() - begin_s)
    assert reasons[-1] == "length"
    assert {facts["State"]["ExitCode"] for facts in docker.inspect(*containers)} == {0}
    mesh.up("--no-recreate")
    wait_for_members(mesh, 2, 2)


def test_keys_of_clients(mesh: Project, docker: Docker) -> None:
    """A file beside the cluster secret; a wrong key gets 401."""
    [router] = mesh.containers("router")
    image = docker.inspect(router)[0]["Config"]["Image"]
    volume = f"{mesh.name}_secrets:/run/kvmesh"
    docker(
        "run",
        "--rm",
        "-v",
        volume,
        "--entrypoint",
        "sh",
        image,
        "-c",
        "umask 077; echo sk-deploy >/run/kvmesh/api_keys",
    )
    keys = {"KVMESH_API_KEYS_FILE": "/run/kvmesh/api_keys"}
    mesh.up("router", **keys)
    assert secrets_in(mesh, docker, "router") == {"api_keys"}
    statuses = {}
    for key in ("sk-wrong", "sk-deploy"):
        with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key=key, max_retries=0, timeout=60) as client:
            try:
                client.completions.create(model=DEFAULT_MODEL, prompt="Hello", max_tokens=1)
                statuses[key] = 200
            except openai.APIStatusError as error:
                statuses[key] = error.status_code
    assert statuses == {"sk-wrong": 401, "sk-deploy": 200}
    assert "sk-deploy" not in mesh.compose("logs", "--no-color", "router") + str(mesh.inspect("router"))
    mesh.up("--no-deps", "router")


def test_encrypted(mesh: Project, docker: Docker, tmp_path: Path, golden: Items, told: Tell) -> None:
    """One switch: plain clients and those without a certificate are refused; the answers are the same.

    Each server is in a process id namespace of its own, too, so that pages go by TCP, and the log says so.
    """
    begin_s = time.monotonic()
    mesh.env |= {"KVMESH_ENCRYPTED": "1", "KVMESH_CLIENT_AUTH": "required", "KVMESH_SERVER_PID": ""}
    mesh.up()
    told("all started again, encrypted", time.monotonic() - begin_s)
    plain_url, plain_coordinator = mesh.url, mesh.coordinator_url
    mesh.encrypt(tmp_path)
    wait_for_members(mesh, 2, 2)
    assert mesh.tls is not None
    with asking(mesh, verify=mesh.tls) as ask:
        check_golden(ask, golden)
    assert {line["plane"] for line in mesh.logs("generation") if line["event"] == "paired"} == {"tcp"}
    # 400: a sentence for people who have left out the s.
    assert request(f"{plain_url}/v1/models")[0] in (0, 400)
    assert request(f"{plain_coordinator}/members")[0] in (0, 400)
    stranger = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    with asking(mesh, verify=stranger) as ask:
        ask("The capital of France is", 2)  # a client of the router needs none
    with pytest.raises(OSError, match=r"(?i)certificate|reset|closed|eof"):
        urllib.request.urlopen(f"{mesh.coordinator_url}/members", timeout=10, context=stranger)
    [indexer] = mesh.containers("indexer")
    pair = tmp_path / "kvmesh.key_secret"
    pair.write_text(docker("exec", indexer, "cat", "/run/kvmesh/curve/kvmesh.key_secret"))
    pairs = {"tls/ca.crt", "tls/tls.crt", "tls/tls.key"}
    assert secrets_in(mesh, docker, "context") == pairs | {"cluster_secret", "curve/kvmesh.key_secret"}
    assert secrets_in(mesh, docker, "indexer") == pairs | {"curve/kvmesh.key_secret"}
    assert secrets_in(mesh, docker, "coordinator") == secrets_in(mesh, docker, "etcd") == pairs
    told = mesh.compose("logs", "--no-color") + str(mesh.inspect())
    told += "".join(docker("exec", each, "env") for each in mesh.containers())
    private = {
        docker("exec", mesh.containers(service)[0], "cat", "/run/kvmesh/tls/tls.key").split("\n")[1]
        for service in KEEPERS
    }
    assert len(private) == len(KEEPERS) - 1, "each has a key of its own, context and generation servers the same"
    assert not [key for key in private if key in told]
    assert shakes_hands(mesh.events_endpoint, pair)
    assert not shakes_hands(mesh.events_endpoint, None)


def shakes_hands(endpoint: str, pair: Path | None) -> bool:
    """Whether an event socket takes a subscriber with this key pair, or with none."""
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    try:
        if pair is not None:
            public, secret = zmq.auth.load_certificate(pair)
            socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = public, secret, public
        socket.connect(endpoint)
        return bool(monitor.poll(3000))
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=0)
        context.term()


def test_down_leaves_nothing(mesh: Project, docker: Docker, told: Tell) -> None:
    begin_s = time.monotonic()
    mesh.compose("down", timeout_s=180)
    told("down", time.monotonic() - begin_s)
    left = mesh.left_over()
    assert left["containers"] == left["networks"] == []
    # The model, the secrets (all, the authority's, of six kinds of services) and etcd's data stay until asked for.
    assert len(left["volumes"]) == 10
    mesh.compose("down", "--volumes")
    assert mesh.left_over() == {"containers": [], "networks": [], "volumes": []}
    assert set(docker("volume", "ls", "--quiet").split()) == mesh.foreign_volumes
