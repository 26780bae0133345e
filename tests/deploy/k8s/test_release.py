"""The chart on a real Kubernetes: installed, asked, hurt, upgraded, rolled back, removed (``make k8s-test``)."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from helm_chart import CHART
from kube_cluster import Cluster, is_ready
from kube_release import ANSWER, COMPONENTS, QUESTION, Release, ask, small_values

from kvmesh.models.store import DEFAULT_MODEL

pytestmark = pytest.mark.timeout(900)

WAITING = ("--wait", "--timeout", "400s")


@pytest.fixture(scope="module")
def release(cluster: Cluster, models: Path) -> Release:
    """Installed with Helm 4, with etcd on a volume, two coordinators and API keys, and every pod ready."""
    volume = cluster.run_dir / "etcd-volume"
    volume.mkdir(mode=0o700)
    os.chown(volume, 10001, 10001)
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(persistent_volume(volume)))
    installed = Release(cluster, "mesh", small_values(models))
    installed.install()
    return installed


@pytest.fixture(scope="module")
def client(release: Release) -> Iterator[openai.OpenAI]:
    with release.client() as client:
        yield client


def persistent_volume(path: Path) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "etcd"},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": str(path), "type": "Directory"},
        },
    }


def test_every_pod_is_ready_and_answers(release: Release, client: openai.OpenAI) -> None:
    found = {component: len(release.pods(component)) for component in COMPONENTS}
    assert found == {"router": 1, "context": 1, "generation": 2, "indexer": 1, "coordinator": 2, "etcd": 1}
    assert all(is_ready(pod) for component in COMPONENTS for pod in release.pods(component))
    assert ask(client) == ANSWER


def test_streams_and_wrong_keys(release: Release, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=16,
        stream=True,
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == ANSWER
    with release.client(api_key="wrong") as stranger, pytest.raises(openai.AuthenticationError):
        ask(stranger)


def test_the_charts_own_test_passes(release: Release) -> None:
    assert "Phase:          Succeeded" in release.helm("test", release.name)
    assert "Paris" in release.kubectl("logs", f"{release.full}-test-chat")


def test_containers_are_confined(release: Release) -> None:
    """uid 10001, nothing writable but the volumes, no capability, and no secret among the variables."""
    for component in ("router", "generation", "coordinator"):
        name = release.pods(component)[0]["metadata"]["name"]
        status = release.kubectl("exec", name, "--", "cat", "/proc/1/status")
        fields = dict(line.split(":", 1) for line in status.splitlines())
        assert fields["Uid"].split() == ["10001"] * 4
        assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
        assert fields["NoNewPrivs"].strip() == "1"
        assert fields["Seccomp"].strip() == "2"
        with pytest.raises(AssertionError, match="Read-only file system"):
            release.kubectl("exec", name, "--", "touch", "/opt/kvmesh/new")
        variables = release.kubectl("exec", name, "--", "env")
        assert "SECRET" not in variables
        assert "key-one" not in variables


def test_logs_have_no_secrets(release: Release) -> None:
    (secret,) = release.get("secrets", f"--field-selector=metadata.name={release.full}-cluster-secret")
    value = base64.b64decode(secret["data"]["cluster-secret"]).decode()
    for component in COMPONENTS:
        for pod in release.pods(component):
            log = release.kubectl("logs", "--all-containers", pod["metadata"]["name"])
            assert value not in log
            assert "key-one" not in log


def test_service_accounts_may_do_nothing(release: Release) -> None:
    """None of the services asks Kubernetes for anything, unless the coordinator watches EndpointSlices."""
    for component in COMPONENTS:
        for verb, what in (("list", "pods"), ("get", "secrets"), ("list", "endpointslices.discovery.k8s.io")):
            assert not release.may(component, verb, what)


def test_deleting_a_generation_pod_under_load_loses_nothing(release: Release, client: openai.OpenAI) -> None:
    """The pod drains: its requests end there, new ones go to the other."""
    with ThreadPoolExecutor(6) as pool:
        answers: list[Future[str]] = [
            pool.submit(ask, client, f"Count from {i} to ten.", max_tokens=32) for i in range(24)
        ]
        release.wait("requests run", lambda: sum(answer.done() for answer in answers) >= 4)
        release.kubectl("delete", "pod", f"{release.full}-generation-0", "--wait=false")
        texts = [answer.result(timeout=170) for answer in answers]
    assert len(texts) == 24
    assert all(texts)
    release.wait_ready("generation", 2)


def test_killing_a_generation_pod_under_load_is_answered(release: Release, client: openai.OpenAI) -> None:
    """Without a warning: what had not been answered yet is tried elsewhere; nobody waits for ever."""
    with ThreadPoolExecutor(6) as pool:
        answers: list[Future[str]] = [
            pool.submit(ask, client, f"Count from {i} to twenty.", max_tokens=32) for i in range(18)
        ]
        release.wait("requests run", lambda: sum(answer.done() for answer in answers) >= 4)
        release.kubectl("delete", "pod", f"{release.full}-generation-1", "--grace-period=0", "--force")
        errors = [error for answer in answers if (error := answer.exception(timeout=170)) is not None]
    assert all(isinstance(error, openai.APIStatusError) for error in errors), errors
    assert len(errors) <= 6, "no more than ran at the time"
    release.wait_ready("generation", 2)
    assert ask(client) == ANSWER


def test_a_coordinator_takes_over_from_the_other(release: Release, client: openai.OpenAI) -> None:
    leader = leading(release)
    assert leader is not None
    release.kubectl("delete", "pod", leader, "--grace-period=0", "--force")
    assert ask(client) == ANSWER, "nothing waits for a coordinator"
    release.wait_ready("coordinator", 2)
    release.wait("one leads and knows all", lambda: roles(release) == ["context", "generation", "generation"])
    assert ask(client) == ANSWER


def leading(release: Release) -> str | None:
    """The coordinator that leads, if one does."""
    for pod in release.pods("coordinator"):
        name: str = pod["metadata"]["name"]
        try:
            metrics = release.fetch("coordinator", "/metrics", pod=name)
        except AssertionError:
            continue  # it has just been killed, or has not begun to serve
        if "kvmesh_coordinator_leading 1.0" in metrics.splitlines():
            return name
    return None


def roles(release: Release) -> list[str]:
    """Of the servers that the leading coordinator knows."""
    leader = leading(release)
    if leader is None:
        return []
    try:
        members = json.loads(release.fetch("coordinator", "/members", pod=leader))["members"]
    except AssertionError:
        return []
    return sorted(role for entry in members if (role := entry["role"]) in ("context", "generation"))


def test_upgrade_and_rollback(release: Release, client: openai.OpenAI) -> None:
    """More servers, another setting of the router, and back; the cluster secret and the other servers stay."""
    secret = release.kubectl("get", "secret", f"{release.full}-cluster-secret", "-o", "jsonpath={.data}")
    servers = {pod["metadata"]["uid"] for pod in release.pods("generation")}
    more = ("--set", "context.replicas=2", "--set", "router.settings.max_inflight=77")
    release.helm("upgrade", release.name, CHART, "-f", release.file, *more, *WAITING)
    release.wait_ready("context", 2)
    release.wait_ready("router", 1)
    router = release.pods("router")[0]["metadata"]["name"]
    assert "max_inflight: 77" in release.kubectl("get", "configmap", f"{release.full}-router", "-o", "yaml")
    assert ask(client) == ANSWER
    release.helm("rollback", release.name, "1", *WAITING)
    release.wait_ready("context", 1)
    release.wait_ready("router", 1)
    assert release.pods("router")[0]["metadata"]["name"] != router
    assert ask(client) == ANSWER
    assert secret == release.kubectl("get", "secret", f"{release.full}-cluster-secret", "-o", "jsonpath={.data}")
    assert servers == {pod["metadata"]["uid"] for pod in release.pods("generation")}
    assert json.loads(release.helm("history", release.name, "-o", "json"))[-1]["status"] == "deployed"


def test_uninstall_leaves_only_the_volume(release: Release) -> None:
    release.helm("uninstall", release.name, *WAITING)
    release.wait("its pods are gone", lambda: not release.get("pods", "-l", "app.kubernetes.io/component!=test"))
    kinds = "deployments,statefulsets,services,configmaps,secrets,serviceaccounts,networkpolicies,roles,rolebindings"
    left = {item["metadata"]["name"] for item in release.get(kinds)}
    assert not [name for name in left if release.full in name]
    assert len(release.get("persistentvolumeclaims")) == 1


def test_helm_3_installs_upgrades_and_uninstalls_it(release: Release) -> None:
    """The API server takes what Helm 3 sends, too; without waiting for pods."""
    few = ("--set", "etcd.mode=none", "--set", "coordinator.replicas=1", "--set", "context.replicas=0")
    release.helm("install", "older", CHART, *few, version="helm3")
    release.helm("upgrade", "older", CHART, *few, "--set", "router.replicas=2", version="helm3")
    release.helm("rollback", "older", "1", version="helm3")
    (router,) = release.get("deployments", "-l", "app.kubernetes.io/component=router")
    assert router["spec"]["replicas"] == 1
    release.helm("uninstall", "older", version="helm3")
    assert release.get("deployments") == []
