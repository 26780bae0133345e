"""What the chart refuses to change in a release that runs. Helm asks a fake API server for what is there."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_chart import CHART, DEFAULT, HELMS, RELEASE, HelmError, helm, render, run_helm

SETS = "/apis/apps/v1/namespaces/mesh/statefulsets"


@contextlib.contextmanager
def fake_cluster(running: dict[str, Any] | None) -> Iterator[str]:
    """An API server with this StatefulSet, or with none; gives its URL."""
    resources = [{"name": "statefulsets", "kind": "StatefulSet", "namespaced": True, "verbs": ["get", "list"]}]
    secrets = [{"name": "secrets", "kind": "Secret", "namespaced": True, "verbs": ["get", "list"]}]
    answers: dict[str, Any] = {
        "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": secrets},
        "/apis": {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [
                {
                    "name": "apps",
                    "versions": [{"groupVersion": "apps/v1", "version": "v1"}],
                    "preferredVersion": {"groupVersion": "apps/v1", "version": "v1"},
                }
            ],
        },
        "/apis/apps/v1": {"kind": "APIResourceList", "groupVersion": "apps/v1", "resources": resources},
    }
    if running is not None:
        answers[f"{SETS}/{running['metadata']['name']}"] = running

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            found = path in answers
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(answers.get(path, missing)).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def upgrade(url: str, values: dict[str, Any], folder: Path, name: str) -> str:
    """A rendering by a Helm that sees the cluster."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "fake", "cluster": {"server": url}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
        "users": [{"name": "fake", "user": {"token": "token"}}],
        "current-context": "fake",
    }
    (folder / "config").write_text(yaml.safe_dump(config))
    (folder / "values").write_text(json.dumps(values))
    return run_helm(
        helm(name),
        *("template", RELEASE, CHART, "--namespace", "mesh", "--dry-run=server", "--disable-openapi-validation"),
        *("--kubeconfig", folder / "config", "--values", folder / "values"),
    )


def with_etcd(replicas: int, **values: Any) -> dict[str, Any]:
    return {**DEFAULT, "etcd": {"replicas": replicas}, **values}


@pytest.mark.parametrize("name", HELMS)
@pytest.mark.parametrize(
    ("before", "after", "refused"),
    [
        (with_etcd(1), with_etcd(3), "etcd.replicas cannot change from 1 to 3"),
        (with_etcd(3), with_etcd(3, tls={"enabled": True}), "tls.enabled cannot change while etcd has 3 members"),
        (with_etcd(3, tls={"enabled": True}), with_etcd(3), "tls.enabled cannot change while etcd has 3 members"),
    ],
)
def test_members_of_etcd_stay_who_they_are(
    before: dict[str, Any], after: dict[str, Any], refused: str, name: str, tmp_path: Path
) -> None:
    """Members and their addresses are in etcd's data: other flags make two clusters of one, or none."""
    running = render(before).get("StatefulSet", "etcd")
    with fake_cluster(running) as url, pytest.raises(HelmError) as caught:
        upgrade(url, after, tmp_path, name)
    assert refused in str(caught.value)
    assert "kubectl -n mesh delete statefulset r1-kvmesh-etcd" in str(caught.value)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (with_etcd(1), with_etcd(1, tls={"enabled": True})),
        (with_etcd(3), with_etcd(3, router={"replicas": 3})),
        (None, with_etcd(3, tls={"enabled": True})),
    ],
)
def test_other_upgrades_are_allowed(before: dict[str, Any] | None, after: dict[str, Any], tmp_path: Path) -> None:
    with fake_cluster(None if before is None else render(before).get("StatefulSet", "etcd")) as url:
        assert "--initial-cluster=" in upgrade(url, after, tmp_path, "helm3")


def test_an_autoscaler_begins_with_the_pods_that_run(tmp_path: Path) -> None:
    """Without a number in the manifest, Kubernetes would make it one, and seven of eight servers would drain."""
    running = render({**DEFAULT, "context": {"replicas": 8}}).get("StatefulSet", "context")
    scaled = {
        **DEFAULT,
        "context": {"autoscaling": {"enabled": True, "maxReplicas": 16, "metrics": [{"type": "Pods"}]}},
    }
    for values in (scaled, {**DEFAULT, "context": {"replicas": None}}):
        with fake_cluster(running) as url:
            rendered = yaml.safe_load_all(upgrade(url, values, tmp_path, "helm3"))
        sets = {one["metadata"]["name"]: one for one in rendered if one and one["kind"] == "StatefulSet"}
        assert sets["r1-kvmesh-context"]["spec"]["replicas"] == 8
