"""One value encrypts a release on a real Kubernetes, and strangers are refused (``make k8s-test``)."""

from __future__ import annotations

import base64
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import zmq
from helm_chart import CHART
from kube_cluster import Cluster
from kube_release import ANSWER, Release, ask, small_values

from kvmesh.config.curve import CurveSettings
from kvmesh.net.curve import CurveSecurity

pytestmark = pytest.mark.timeout(900)

LISTEN_MS = 5000


@pytest.fixture(scope="module")
def release(cluster: Cluster, models: Path) -> Iterator[Release]:
    """With TLS and CURVE by keys that the chart made, certificates asked of services, and a watch of EndpointSlices."""
    values = small_values(models) | {
        "tls": {"enabled": True, "clientAuth": "required"},
        "discovery": "endpointslice",
        "etcd": {"persistence": {"enabled": False}, **small_values(models)["etcd"]},
    }
    values["generation"]["replicas"] = 1
    installed = Release(cluster, "secure", values)
    installed.install()
    yield installed
    installed.helm("uninstall", installed.name, "--wait", "--timeout", "200s")


@pytest.fixture(scope="module")
def files(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The keys of the release."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("tls", "curve"):
        (secret,) = release.get("secrets", f"--field-selector=metadata.name={release.full}-{name}")
        for key, value in secret["data"].items():
            (folder / key).write_bytes(base64.b64decode(value))
            (folder / key).chmod(0o400)
    return folder


def trusting(files: Path, *, presenting: bool) -> ssl.SSLContext:
    """Trusts the release's authority; pods and Services are reached by addresses, which no certificate bears."""
    context = ssl.create_default_context(cafile=files / "ca.crt")
    context.check_hostname = False
    if presenting:
        context.load_cert_chain(files / "tls.crt", files / "tls.key")
    return context


@pytest.fixture(scope="module")
def client(release: Release, files: Path) -> Iterator[openai.OpenAI]:
    http = openai.DefaultHttpxClient(verify=trusting(files, presenting=False))
    with release.client(base_url=f"https://{release.address('router')}/v1", http_client=http) as client:
        yield client


def test_clients_need_no_certificate(client: openai.OpenAI) -> None:
    assert ask(client) == ANSWER


def test_the_charts_own_test_passes(release: Release) -> None:
    assert "Phase:          Succeeded" in release.helm("test", release.name)


def test_plain_clients_are_refused(release: Release) -> None:
    with pytest.raises((urllib.error.URLError, ConnectionError, OSError)):
        urllib.request.urlopen(f"http://{release.address('router')}/health", timeout=10)


def test_services_refuse_who_presents_no_certificate(release: Release, files: Path) -> None:
    for component, port in (("context", 8100), ("generation", 8200), ("indexer", 8300), ("coordinator", 8400)):
        url = f"https://{release.pods(component)[0]['status']['podIP']}:{port}/health"
        with urllib.request.urlopen(url, timeout=10, context=trusting(files, presenting=True)) as answer:
            assert answer.status == 200
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            urllib.request.urlopen(url, timeout=10, context=trusting(files, presenting=False))


def test_events_are_heard_by_those_who_have_the_key(release: Release, files: Path, client: openai.OpenAI) -> None:
    security = CurveSecurity.load(CurveSettings(key_file=str(files / "kvmesh.key_secret")))
    assert security is not None
    endpoint = f"tcp://{release.pods('context')[0]['status']['podIP']}:5557"
    with zmq.Context() as context, context.socket(zmq.SUB) as member, context.socket(zmq.SUB) as stranger:
        security.apply_client(member)
        for socket in (member, stranger):
            socket.linger = 0
            socket.subscribe(b"")
            socket.connect(endpoint)

        def heard() -> bool:
            ask(client, f"Tell me a long story about number {next(numbers)}, a bear and a very small house.")
            return bool(member.poll(LISTEN_MS))

        numbers = iter(range(1000))
        release.wait("the member hears of a new prompt", heard, timeout_s=120)
        assert not stranger.poll(0)


def test_the_router_asks_the_indexer_over_the_encrypted_socket(release: Release, files: Path) -> None:
    address = release.address("router")
    assert number(address, files, "kvmesh_router_match_answered_total") > 0
    assert number(address, files, "kvmesh_router_context_servers") == 1


def test_only_the_coordinator_may_watch_and_only_endpoint_slices(release: Release) -> None:
    slices = "endpointslices.discovery.k8s.io"
    assert all(release.may("coordinator", verb, slices) for verb in ("get", "list", "watch"))
    for verb, what in (("delete", slices), ("create", slices), ("list", "pods"), ("get", "secrets")):
        assert not release.may("coordinator", verb, what)
    assert not release.may("router", "list", slices)


def test_the_coordinator_finds_the_servers_by_endpoint_slices(release: Release, files: Path) -> None:
    """With its own token, at an API server that has them as v1beta1 only."""

    def found() -> bool:
        return any(
            number(f"{pod['status']['podIP']}:8400", files, "kvmesh_coordinator_discovery_addresses") == 2
            for pod in release.pods("coordinator")
        )

    release.wait("both servers are found", found, timeout_s=120)


def number(address: str, files: Path, name: str) -> float:
    """A metric of one series."""
    url = f"https://{address}/metrics"
    with urllib.request.urlopen(url, timeout=10, context=trusting(files, presenting=True)) as answer:
        lines = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#"))
    return float(lines[name])


def test_a_certificate_follows_the_names_while_services_run(release: Release, files: Path) -> None:
    """The same authority signs a new one, and the router serves it without a restart."""
    before = {pod["metadata"]["uid"] for component in ("router", "context") for pod in release.pods(component)}
    names = ("--set", "tls.extraNames={more.example}")
    release.helm("upgrade", release.name, CHART, "-f", release.file, *names, "--wait", "--timeout", "200s")
    host, _, port = release.address("router").partition(":")

    def served() -> bool:
        with (
            socket.create_connection((host, int(port)), timeout=30) as plain,
            trusting(files, presenting=False).wrap_socket(plain) as connection,
        ):
            return ("DNS", "more.example") in (connection.getpeercert() or {}).get("subjectAltName", ())

    release.wait("the router serves the new certificate", served)
    assert before == {pod["metadata"]["uid"] for component in ("router", "context") for pod in release.pods(component)}
