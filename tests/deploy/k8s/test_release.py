"""The chart on a real Kubernetes: installed, asked, hurt, upgraded, rolled back, removed (``make k8s-test``)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from helm_chart import CACHE, CHART, HelmError, run_helm
from kube_cluster import BINARIES, PROGRAMS, Cluster, is_ready

from kvmesh.models.store import DEFAULT_MODEL, fetch

pytestmark = [
    pytest.mark.skipif("KVMESH_K8S_TEST" not in os.environ, reason="starts a whole Kubernetes: run 'make k8s-test'"),
    pytest.mark.timeout(900),
]

BINARY_DIR = Path(os.environ.get("KVMESH_K8S_BIN", CACHE / "kubernetes"))
IMAGES = Path(os.environ.get("KVMESH_IMAGES", CACHE / "images.tar"))
NAMESPACE = "mesh"
RELEASE = "r1"
READY_S = 400.0
ANSWER = "The capital of France is Paris."
SMALL = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "2Gi"}}


class Release(NamedTuple):
    """The installed chart."""

    cluster: Cluster
    values: Path

    def helm(self, *arguments: str | Path, version: str = "helm4") -> str:
        """A Helm command on this cluster."""
        place = ("--kubeconfig", self.cluster.kubeconfig, "--namespace", NAMESPACE)
        return run_helm(CACHE / version / "helm", *arguments, *place, timeout_s=READY_S + 60)

    def kubectl(self, *arguments: str, timeout_s: float = 120) -> str:
        """A kubectl command in the release's namespace."""
        return self.cluster.kubectl("--namespace", NAMESPACE, *arguments, timeout_s=timeout_s)

    def pods(self, component: str) -> list[dict[str, Any]]:
        """Pods of a component."""
        return self.cluster.get("pods", "-n", NAMESPACE, "-l", f"app.kubernetes.io/component={component}")

    def address(self, service: str) -> str:
        """Of a Service, as the cluster routes it."""
        (found,) = self.cluster.get(
            "services", "-n", NAMESPACE, f"--field-selector=metadata.name={RELEASE}-kvmesh-{service}"
        )
        return f"http://{found['spec']['clusterIP']}:{found['spec']['ports'][0]['port']}"

    def client(self) -> openai.OpenAI:
        """A client of the router; it does not try again by itself."""
        return openai.OpenAI(base_url=f"{self.address('router')}/v1", api_key="key-one", max_retries=0, timeout=170)

    def condition(self) -> str:
        """What there is to say when something does not work: pods, events, ends of logs."""
        parts = [self.kubectl("get", "pods", "-o", "wide"), self.kubectl("get", "events", "--sort-by=.lastTimestamp")]
        for pod in self.cluster.get("pods", "-n", NAMESPACE):
            if not is_ready(pod):
                log = self.kubectl("logs", "--all-containers", "--tail=15", pod["metadata"]["name"])
                parts.append(f"{pod['metadata']['name']}:\n{log}")
        return "\n".join(parts)

    def wait(self, what: str, holds: Callable[[], bool], timeout_s: float = READY_S) -> None:
        """Until something holds; what the pods say is told when it does not."""
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline_s:
                pytest.fail(f"not within {timeout_s} s: {what}\n{self.condition()}")
            time.sleep(0.5)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    absent = [name for name in BINARIES if not (BINARY_DIR / name).exists()]
    if absent:
        pytest.skip(f"{BINARY_DIR} has no {', '.join(absent)}: 'make k8s-build' builds them once")
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"missing: {', '.join(missing)}")
    if not IMAGES.exists():
        pytest.skip(f"there is no {IMAGES}: 'make k8s-images' makes it")
    with Cluster(BINARY_DIR, CACHE / "helm4" / "kubectl", CACHE / "k8s-state", [IMAGES]) as running:
        yield running


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Release:
    """Installed with Helm 4, with etcd on a volume, two coordinators and API keys, and every pod ready."""
    models = cluster.run_dir / "models"
    shutil.copytree(fetch(DEFAULT_MODEL).path.parent, models / DEFAULT_MODEL)
    subprocess.run(["chmod", "-R", "a+rX", models], check=True)
    subprocess.run(["chown", "-R", "10001:10001", models], check=True)
    volume = cluster.run_dir / "etcd-volume"
    volume.mkdir(mode=0o700)
    os.chown(volume, 10001, 10001)
    cluster.kubectl("create", "namespace", NAMESPACE)
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(persistent_volume(volume)))
    values = cluster.run_dir / "values.json"
    values.write_text(json.dumps(values_of(models)))
    installed = Release(cluster, values)
    try:
        installed.helm("install", RELEASE, CHART, "-f", values, "--wait", "--timeout", f"{READY_S:.0f}s")
    except HelmError as error:
        pytest.fail(f"{error}\n{installed.condition()}")
    return installed


def values_of(models: Path) -> dict[str, Any]:
    """Small pods: two cores run them all."""
    server = {"settings": {"num_threads": 1, "drain_s": 60, "device_memory_bytes": 1 << 28}, "resources": SMALL}
    return {
        # The init container finds the model complete: pods of this cluster reach nothing outside.
        "model": {"volume": {"hostPath": {"path": str(models), "type": "Directory"}}},
        "apiKeys": {"keys": ["key-one"]},
        "router": {"resources": SMALL, "preStopSeconds": 2},
        "context": {"replicas": 1, **server},
        "generation": {"replicas": 2, **server},
        "indexer": {"resources": SMALL},
        "coordinator": {"replicas": 2, "resources": SMALL, "settings": {"lease_s": 5}},
        "etcd": {"resources": SMALL},
    }


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


def ask(client: openai.OpenAI, *, max_tokens: int = 16, question: str = "What is the capital of France?") -> str:
    reply = client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=max_tokens,
    )
    return reply.choices[0].message.content or ""


def test_every_pod_is_ready_and_answers(release: Release) -> None:
    found = {component: len(release.pods(component)) for component in COMPONENTS}
    assert found == {"router": 1, "context": 1, "generation": 2, "indexer": 1, "coordinator": 2, "etcd": 1}
    assert all(is_ready(pod) for component in COMPONENTS for pod in release.pods(component))
    assert ask(release.client()) == ANSWER


COMPONENTS = ("router", "context", "generation", "indexer", "coordinator", "etcd")


def test_streams_and_wrong_keys(release: Release) -> None:
    stream = release.client().chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=16,
        stream=True,
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == ANSWER
    with pytest.raises(openai.AuthenticationError):
        ask(release.client().with_options(api_key="wrong"))


def test_the_charts_own_test_passes(release: Release) -> None:
    assert "Phase:          Succeeded" in release.helm("test", RELEASE)
    assert "Paris" in release.kubectl("logs", f"{RELEASE}-kvmesh-test-chat")


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


def test_service_accounts_may_do_nothing(release: Release) -> None:
    """None of the services asks Kubernetes for anything, unless the coordinator watches EndpointSlices."""
    for component in COMPONENTS:
        for verb, what in (("list", "pods"), ("get", "secrets"), ("list", "endpointslices.discovery.k8s.io")):
            assert not may(release, component, verb, what)


def may(release: Release, component: str, verb: str, what: str) -> bool:
    account = f"system:serviceaccount:{NAMESPACE}:{RELEASE}-kvmesh-{component}"
    place = ("--kubeconfig", release.cluster.kubeconfig, "--namespace", NAMESPACE)
    done = subprocess.run(
        [release.cluster.kubectl_binary, *place, "auth", "can-i", verb, what, "--as", account],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() in ("yes", "no"), done.stderr
    return done.stdout.strip() == "yes"


def test_deleting_a_generation_pod_under_load_loses_nothing(release: Release) -> None:
    """The pod drains: its requests end there, new ones go to the other."""
    with ThreadPoolExecutor(6) as pool:
        client = release.client()
        answers: list[Future[str]] = [
            pool.submit(ask, client, max_tokens=32, question=f"Count from {i} to ten.") for i in range(24)
        ]
        release.wait("requests run", lambda: sum(answer.done() for answer in answers) >= 4)
        release.kubectl("delete", "pod", f"{RELEASE}-kvmesh-generation-0", "--wait=false")
        texts = [answer.result(timeout=170) for answer in answers]
    assert len(texts) == 24
    assert all(texts)
    wait_ready(release, "generation", 2)


def wait_ready(release: Release, component: str, count: int) -> None:
    def ready() -> bool:
        pods = release.pods(component)
        return len(pods) == count and all(is_ready(pod) and "deletionTimestamp" not in pod["metadata"] for pod in pods)

    release.wait(f"{count} {component} pods are ready", ready)


def test_killing_a_generation_pod_under_load_is_answered(release: Release) -> None:
    """Without a warning: what had not been answered yet is tried elsewhere; nobody waits for ever."""
    with ThreadPoolExecutor(6) as pool:
        client = release.client()
        answers: list[Future[str]] = [
            pool.submit(ask, client, max_tokens=32, question=f"Count from {i} to twenty.") for i in range(18)
        ]
        release.wait("requests run", lambda: sum(answer.done() for answer in answers) >= 4)
        release.kubectl("delete", "pod", f"{RELEASE}-kvmesh-generation-1", "--grace-period=0", "--force")
        errors = [error for answer in answers if (error := answer.exception(timeout=170)) is not None]
    assert all(isinstance(error, openai.APIStatusError) for error in errors), errors
    assert len(errors) <= 6, "no more than ran at the time"
    wait_ready(release, "generation", 2)
    assert ask(release.client()) == ANSWER


def test_a_coordinator_takes_over_from_the_other(release: Release) -> None:
    leader = leading(release)
    release.kubectl("delete", "pod", leader, "--grace-period=0", "--force")
    assert ask(release.client()) == ANSWER, "nothing waits for a coordinator"
    wait_ready(release, "coordinator", 2)
    release.wait("one leads", lambda: leading(release) is not None)
    members = json.loads(release.kubectl("exec", leading(release), "--", *get("http://127.0.0.1:8400/members")))
    roles = sorted(member["role"] for member in (entry.get("member", entry) for entry in members["members"]))
    assert roles.count("generation") == 2
    assert roles.count("context") == 1


def leading(release: Release) -> str | None:
    """The coordinator that leads, if one does."""
    for pod in release.pods("coordinator"):
        name = pod["metadata"]["name"]
        if is_ready(pod):
            metrics = release.kubectl("exec", name, "--", *get("http://127.0.0.1:8400/metrics"))
            if "kvmesh_coordinator_leading 1.0" in metrics.splitlines():
                return name
    return None


def get(url: str) -> list[str]:
    """A command for a container of ours that prints what is at an address."""
    return ["python3", "-c", f"import urllib.request as r; print(r.urlopen('{url}', timeout=5).read().decode())"]


def test_upgrade_and_rollback(release: Release) -> None:
    """More servers with other settings, and back; the cluster secret stays what it was."""
    secret = release.kubectl("get", "secret", f"{RELEASE}-kvmesh-cluster-secret", "-o", "jsonpath={.data}")
    more = ("--set", "context.replicas=2", "--set", "router.settings.max_inflight=77", "--wait", "--timeout", "300s")
    release.helm("upgrade", RELEASE, CHART, "-f", release.values, *more)
    wait_ready(release, "context", 2)
    router = release.pods("router")
    assert "max_inflight: 77" in release.kubectl("get", "configmap", f"{RELEASE}-kvmesh-router", "-o", "yaml")
    assert ask(release.client()) == ANSWER
    release.helm("rollback", RELEASE, "1", "--wait", "--timeout", "300s")
    wait_ready(release, "context", 1)
    release.wait("the router is the earlier one", lambda: len(release.pods("router")) == 1)
    assert release.pods("router")[0]["metadata"]["name"] != router[0]["metadata"]["name"]
    assert ask(release.client()) == ANSWER
    assert secret == release.kubectl("get", "secret", f"{RELEASE}-kvmesh-cluster-secret", "-o", "jsonpath={.data}")
    assert [entry["status"] for entry in json.loads(release.helm("history", RELEASE, "-o", "json"))][-1] == "deployed"


def test_uninstall_leaves_only_the_volume(release: Release) -> None:
    release.helm("uninstall", RELEASE, "--wait", "--timeout", "200s")
    release.wait("its pods are gone", lambda: not release.cluster.get("pods", "-n", NAMESPACE))
    kinds = "deployments,statefulsets,services,configmaps,secrets,serviceaccounts,networkpolicies,roles,rolebindings"
    left = {item["metadata"]["name"] for item in release.cluster.get(kinds, "-n", NAMESPACE)}
    assert not [name for name in left if RELEASE in name]
    assert len(release.cluster.get("persistentvolumeclaims", "-n", NAMESPACE)) == 1


def test_helm_3_installs_upgrades_and_uninstalls_it(release: Release) -> None:
    """The API server takes what Helm 3 sends, too; without waiting for pods."""
    few = ("--set", "etcd.mode=none", "--set", "coordinator.replicas=1", "--set", "context.replicas=0")
    release.helm("install", "r3", CHART, *few, version="helm3")
    release.helm("upgrade", "r3", CHART, *few, "--set", "router.replicas=2", version="helm3")
    release.helm("rollback", "r3", "1", version="helm3")
    (router,) = release.cluster.get("deployments", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=router")
    assert router["spec"]["replicas"] == 1
    release.helm("uninstall", "r3", version="helm3")
    assert release.cluster.get("deployments", "-n", NAMESPACE) == []
