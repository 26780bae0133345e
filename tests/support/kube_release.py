"""One installed release of the chart on a test cluster: what tests do with it and ask of it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from helm_chart import CACHE, CHART, HelmError, run_helm
from kube_cluster import Cluster, is_ready

from kvmesh.models.store import DEFAULT_MODEL

READY_S = 400.0
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
COMPONENTS = ("router", "context", "generation", "indexer", "coordinator", "etcd")
SMALL = {"requests": {"cpu": "200m", "memory": "64Mi"}, "limits": {"memory": "2Gi"}}


def small_values(models: Path) -> dict[str, Any]:
    """A mesh of small pods, which two cores run; the init containers find the model complete.

    Args:
        models: a model cache on this machine; pods of a test cluster reach nothing outside.
    """
    server = {"settings": {"num_threads": 1, "drain_s": 60, "device_memory_bytes": 1 << 28}, "resources": SMALL}
    return {
        "model": {"volume": {"hostPath": {"path": str(models), "type": "Directory"}}},
        "apiKeys": {"keys": ["key-one"]},
        "router": {"resources": SMALL, "preStopSeconds": 2},
        "context": {"replicas": 1, **server},
        "generation": {"replicas": 2, **server},
        "indexer": {"resources": SMALL},
        "coordinator": {"replicas": 2, "resources": SMALL, "settings": {"lease_s": 5}},
        "etcd": {"resources": SMALL},
    }


class Release:
    """A release in a namespace of its own; ``install`` makes both.

    Args:
        cluster: where.
        name: of the release and the namespace.
        values: of the chart.
    """

    def __init__(self, cluster: Cluster, name: str, values: dict[str, Any]) -> None:
        self.cluster = cluster
        self.name = name
        self.values = values
        self.full = f"{name}-kvmesh"
        self.file = cluster.run_dir / f"{name}-values.json"
        self.file.write_text(json.dumps(values))

    def install(self) -> None:
        """Install it and wait until every pod is ready; what pods say is told when they are not."""
        self.cluster.kubectl("create", "namespace", self.name)
        try:
            self.helm("install", self.name, CHART, "-f", self.file, "--wait", "--timeout", f"{READY_S:.0f}s")
        except HelmError as error:
            pytest.fail(f"{error}\n{self.condition()}")

    def helm(self, *arguments: str | Path, version: str = "helm4") -> str:
        """A Helm command in the release's namespace."""
        place = ("--kubeconfig", self.cluster.kubeconfig, "--namespace", self.name)
        return run_helm(CACHE / version / "helm", *arguments, *place, timeout_s=READY_S + 60)

    def kubectl(self, *arguments: str, timeout_s: float = 120) -> str:
        """A kubectl command in the release's namespace."""
        return self.cluster.kubectl("--namespace", self.name, *arguments, timeout_s=timeout_s)

    def get(self, kind: str, *arguments: str) -> list[dict[str, Any]]:
        """Objects in the release's namespace."""
        return self.cluster.get(kind, "--namespace", self.name, *arguments)

    def pods(self, component: str) -> list[dict[str, Any]]:
        """Pods of a component."""
        return self.get("pods", "-l", f"app.kubernetes.io/component={component}")

    def address(self, service: str) -> str:
        """Host and port of a Service, as the cluster routes it."""
        (found,) = self.get("services", f"--field-selector=metadata.name={self.full}-{service}")
        return f"{found['spec']['clusterIP']}:{found['spec']['ports'][0]['port']}"

    def client(self, **options: Any) -> openai.OpenAI:
        """A client of the router; it does not try again by itself."""
        url = f"http://{self.address('router')}/v1"
        return openai.OpenAI(**({"base_url": url, "api_key": "key-one", "max_retries": 0, "timeout": 170} | options))

    def fetch(self, component: str, path: str, *, pod: str | None = None) -> str:
        """What a service answers in its own container."""
        port = {"router": 8000, "context": 8100, "generation": 8200, "indexer": 8300, "coordinator": 8400}[component]
        url = f"http://127.0.0.1:{port}{path}"
        code = f"import urllib.request as r; print(r.urlopen('{url}', timeout=5).read().decode())"
        name = pod or self.pods(component)[0]["metadata"]["name"]
        return self.kubectl("exec", name, "--", "python3", "-c", code)

    def may(self, component: str, verb: str, what: str) -> bool:
        """Whether a component's service account may do something (``kubectl auth can-i``)."""
        account = f"system:serviceaccount:{self.name}:{self.full}-{component}"
        place = ("--kubeconfig", self.cluster.kubeconfig, "--namespace", self.name)
        done = subprocess.run(
            [self.cluster.kubectl_binary, *place, "auth", "can-i", verb, what, "--as", account],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout.strip() in ("yes", "no"), done.stderr
        return done.stdout.strip() == "yes"

    def condition(self) -> str:
        """What there is to say when something does not work: pods, events, ends of logs."""
        parts = [self.kubectl("get", "pods", "-o", "wide"), self.kubectl("get", "events", "--sort-by=.lastTimestamp")]
        for pod in self.get("pods"):
            if not is_ready(pod):
                log = self.kubectl("logs", "--all-containers", "--tail=15", pod["metadata"]["name"])
                parts.append(f"{pod['metadata']['name']}:\n{log}")
        return "\n".join(parts)

    def wait(self, what: str, holds: Callable[[], bool], timeout_s: float = READY_S) -> None:
        """Until something holds."""
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline_s:
                pytest.fail(f"not within {timeout_s} s: {what}\n{self.condition()}")
            time.sleep(0.5)

    def wait_ready(self, component: str, count: int) -> None:
        """Until exactly so many pods of a component are there, ready, and none of them ends."""

        def ready() -> bool:
            pods = self.pods(component)
            going = any("deletionTimestamp" in pod["metadata"] for pod in pods)
            return len(pods) == count and not going and all(map(is_ready, pods))

        self.wait(f"{count} {component} pods are ready", ready)


def ask(client: openai.OpenAI, question: str = QUESTION, *, max_tokens: int = 16) -> str:
    """The answer to one question, drawn greedily."""
    reply = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=max_tokens
    )
    return reply.choices[0].message.content or ""
