"""The Helm chart, rendered by real Helm and taken apart: what the tests of the chart ask of it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "k8s" / "chart"
CACHE = Path(os.environ.get("KVMESH_DEPLOY_CACHE", Path.home() / ".cache" / "kvmesh-deploy"))
HELMS = ("helm3", "helm4")
RELEASE = "r1"
SECRET = "0123456789abcdef"  # a stated secret, where a generated one would differ from one rendering to the next

EVERYTHING: dict[str, Any] = {
    "clusterSecret": {"value": SECRET},
    "apiKeys": {"keys": ["key-one", "key-two"]},
    "otlpEndpoint": "http://otel:4318/v1/traces",
    "image": {"pullSecrets": [{"name": "registry"}]},
    "model": {"servedName": "tiny"},
    "router": {
        "replicas": 3,
        "autoscaling": {"enabled": True, "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}}},
        "service": {"type": "LoadBalancer", "port": 80, "annotations": {"a": "b"}},
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    },
    "context": {
        "gpu": {"count": 2, "runtimeClassName": "nvidia"},
        "kv_cache_config": {"tokens_per_block": 64, "host_cache_size": 1 << 30},
        "autoscaling": {
            "enabled": True,
            "metrics": [
                {
                    "type": "Pods",
                    "pods": {
                        "metric": {"name": "kvmesh_engine_requests_waiting"},
                        "target": {"type": "AverageValue", "averageValue": "4"},
                    },
                }
            ],
        },
    },
    "generation": {"gpu": {"count": 1}, "replicas": 4},
    "etcd": {"replicas": 3},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"name": "apps"}}}],
        "monitoring": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
    },
    "ingress": {"enabled": True, "className": "nginx", "tls": [{"secretName": "t", "hosts": ["kvmesh.example.com"]}]},
    "gateway": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["kvmesh.example.com"]},
    "monitoring": {
        "serviceMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "dashboards": {"enabled": True},
    },
}
TLS: dict[str, Any] = {
    "clusterSecret": {"value": SECRET},
    "apiKeys": {"keys": ["team-a key-one"]},
    "tls": {
        "enabled": True,
        "existingSecret": "mesh-tls",
        "clientAuth": "required",
        "curve": {"existingSecret": "mesh-curve"},
    },
    "discovery": "endpointslice",
    "monitoring": {"serviceMonitor": {"enabled": True}},
    "etcd": {"persistence": {"enabled": False}},
}
LEAST: dict[str, Any] = {
    "clusterSecret": {"existingSecret": "mine", "key": "token"},
    "model": {"fetch": False, "volume": {"persistentVolumeClaim": {"claimName": "models"}}},
    "context": {"replicas": 1, "podDisruptionBudget": {"enabled": False}},
    "coordinator": {"replicas": 1},
    "etcd": {"mode": "none"},
    "serviceAccount": {"create": False, "existing": {"router": "given"}},
    "networkPolicy": {"enabled": False},
}
DEFAULT: dict[str, Any] = {"clusterSecret": {"value": SECRET}}
EXTERNAL: dict[str, Any] = {
    "clusterSecret": {"value": SECRET},
    "etcd": {
        "mode": "external",
        "endpoints": ["https://etcd.example:2379"],
        "tls": {"existingSecret": "etcd-client", "clientCertificate": True, "serverName": "etcd.example"},
        "auth": {"user": "kvmesh", "existingSecret": "etcd-user"},
    },
}
CASES = {"external": EXTERNAL, "default": DEFAULT, "everything": EVERYTHING, "tls": TLS, "least": LEAST}


class HelmError(Exception):
    """What Helm wrote instead of a rendering."""


def helm(name: str = "helm4") -> Path:
    """A Helm of that major version; the test is skipped where none has been fetched."""
    binary = CACHE / name / "helm"
    if not binary.exists():
        pytest.skip(f"there is no {binary}; 'make k8s-tools' fetches it")
    return binary


def run_helm(binary: Path, *arguments: str | Path, timeout_s: float = 60) -> str:
    """What a Helm command prints.

    Raises:
        HelmError: it failed.
    """
    with tempfile.TemporaryDirectory() as home:
        places = {f"HELM_{kind}_HOME": home for kind in ("CACHE", "CONFIG", "DATA")}
        done = subprocess.run(
            [binary, *arguments], capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **places}
        )
    if done.returncode:
        raise HelmError(done.stdout + done.stderr)
    return done.stdout


def render_text(values: Mapping[str, Any], name: str = "helm4", *flags: str) -> str:
    """``helm template`` of the chart with these values; each combination is rendered once.

    Raises:
        HelmError: the chart or its schema refuses them.
    """
    return _render_text(json.dumps(values), name, flags)


@functools.cache
def _render_text(values: str, name: str, flags: tuple[str, ...]) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(values)
        file.flush()
        return run_helm(helm(name), "template", RELEASE, CHART, "--namespace", "mesh", "--values", file.name, *flags)


class Chart(NamedTuple):
    """A rendered chart by kind and name."""

    objects: list[dict[str, Any]]

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        """All objects of these kinds."""
        return [item for item in self.objects if item["kind"] in kinds]

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """The object of that name, without the release's prefix.

        Raises:
            KeyError: there is none.
        """
        full = f"{RELEASE}-kvmesh-{name}"
        for item in self.of_kind(kind):
            if item["metadata"]["name"] == full:
                return item
        raise KeyError(f"{kind} {full}")

    def pods(self) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        """Component, metadata and spec of every kind of pod."""
        for item in self.of_kind("Deployment", "StatefulSet", "Pod"):
            template = item if item["kind"] == "Pod" else item["spec"]["template"]
            yield template["metadata"]["labels"]["app.kubernetes.io/component"], template["metadata"], template["spec"]

    def pod(self, component: str) -> dict[str, Any]:
        """The pod spec of a component."""
        return next(spec for name, _, spec in self.pods() if name == component)

    def settings(self, component: str) -> dict[str, Any]:
        """The configuration file of a service."""
        return yaml.safe_load(self.get("ConfigMap", component)["data"][f"{component}.yaml"])


def render(values: Mapping[str, Any], name: str = "helm4", *flags: str) -> Chart:
    """The chart with these values, parsed."""
    return Chart([item for item in yaml.safe_load_all(render_text(values, name, *flags)) if item])


def containers(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All containers of a pod, those that run before the others included."""
    return [*spec.get("initContainers", []), *spec["containers"]]
