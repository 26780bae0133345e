"""What the chart refuses to change in a release that runs. Helm asks a fake API server for what is there."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.x509 import load_pem_x509_certificate
from helm_chart import CHART, DEFAULT, HELMS, RELEASE, HelmError, helm, render, run_helm

from kvmesh.config.tls import TlsSettings
from kvmesh.net.tls import Tls

PLACES = {
    "StatefulSet": "/apis/apps/v1/namespaces/mesh/statefulsets",
    "Secret": "/api/v1/namespaces/mesh/secrets",
}


@contextlib.contextmanager
def fake_cluster(*there: dict[str, Any] | None) -> Iterator[str]:
    """An API server with these objects (None: none); gives its URL."""
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
    for item in filter(None, there):
        answers[f"{PLACES[item['kind']]}/{item['metadata']['name']}"] = item

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


DAY_S = 86_400
ENCRYPTED: dict[str, Any] = {**DEFAULT, "tls": {"enabled": True, "curve": {"existingSecret": "mesh-curve"}}}


def secrets_of(text: str) -> dict[str, dict[str, Any]]:
    rendered = yaml.safe_load_all(text)
    return {
        one["metadata"]["name"].removeprefix("r1-kvmesh-"): one for one in rendered if one and one["kind"] == "Secret"
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is made at the first install. (Helm 4 would ask the fake server for every kind of object.)"""
    with fake_cluster() as url:
        return secrets_of(upgrade(url, ENCRYPTED, tmp_path_factory.mktemp("made"), "helm3"))


def test_certificates_of_the_chart_stay(made: dict[str, Any], tmp_path: Path) -> None:
    with fake_cluster(*made.values()) as url:
        after = secrets_of(upgrade(url, {**ENCRYPTED, "router": {"replicas": 3}}, tmp_path, "helm3"))
    assert after == made


def test_the_authority_is_mounted_by_nobody(made: dict[str, Any]) -> None:
    assert set(made["authority"]["data"]) == {"ca.crt", "ca.key"}
    assert set(made["tls"]["data"]) == {"ca.crt", "tls.crt", "tls.key"}
    assert "r1-kvmesh-authority" not in json.dumps([spec for _, _, spec in render(ENCRYPTED).pods()])


@pytest.mark.parametrize(
    ("values", "bears"),
    [
        ({"ingress": {"enabled": True, "host": "mesh.example.org"}}, "mesh.example.org"),
        (
            {"gateway": {"enabled": True, "parentRefs": [{"name": "g"}], "hostnames": ["api.example.org"]}},
            "api.example.org",
        ),
        ({"tls": {**ENCRYPTED["tls"], "extraNames": ["10.example.org"]}}, "10.example.org"),
        ({"tls": {**ENCRYPTED["tls"], "extraNames": ["10.1.2.3"]}}, "10.1.2.3"),
    ],
)
def test_a_certificate_follows_the_names(
    made: dict[str, Any], values: dict[str, Any], bears: str, tmp_path: Path
) -> None:
    with fake_cluster(*made.values()) as url:
        after = secrets_of(upgrade(url, {**ENCRYPTED, **values}, tmp_path, "helm3"))
    assert after["authority"] == made["authority"], "who trusts it need not learn another one"
    assert after["tls"]["data"]["tls.key"] != made["tls"]["data"]["tls.key"]
    assert bears in names_in(after["tls"], tmp_path)


def names_in(secret: dict[str, Any], folder: Path) -> set[str]:
    """Of a certificate, once its authority in the same Secret has verified it."""
    files = {}
    for key, value in secret["data"].items():
        files[key] = folder / key
        files[key].write_bytes(base64.b64decode(value))
    settings = TlsSettings(
        cert_file=str(files["tls.crt"]), key_file=str(files["tls.key"]), ca_file=str(files["ca.crt"])
    )
    certificate = Tls(settings).certificate
    assert certificate is not None
    return set(certificate.names)


@pytest.mark.parametrize(("left_days", "renewed"), [(2000, False), (1200, True), (-1, True)])
def test_a_certificate_is_renewed_in_its_last_third(
    made: dict[str, Any], left_days: int, renewed: bool, tmp_path: Path
) -> None:
    aged = json.loads(json.dumps(made))
    aged["tls"]["metadata"]["annotations"]["kvmesh/not-after"] = str(int(time.time()) + left_days * DAY_S)
    with fake_cluster(*aged.values()) as url:
        after = secrets_of(upgrade(url, ENCRYPTED, tmp_path, "helm3"))
    assert (after["tls"]["data"] != made["tls"]["data"]) is renewed
    assert after["tls"]["data"]["ca.crt"] == made["tls"]["data"]["ca.crt"]


def test_a_certificate_ends_with_its_authority(made: dict[str, Any], tmp_path: Path) -> None:
    aged = json.loads(json.dumps(made))
    aged["authority"]["metadata"]["annotations"]["kvmesh/not-after"] = str(int(time.time()) + 100 * DAY_S)
    aged["tls"]["metadata"]["annotations"]["kvmesh/not-after"] = "0"
    with fake_cluster(*aged.values()) as url:
        after = secrets_of(upgrade(url, ENCRYPTED, tmp_path, "helm3"))
    ends = int(after["tls"]["metadata"]["annotations"]["kvmesh/not-after"])
    assert 98 * DAY_S < ends - time.time() <= 100 * DAY_S
    certificate = load_pem_x509_certificate(base64.b64decode(after["tls"]["data"]["tls.crt"]))
    assert abs(certificate.not_valid_after_utc.timestamp() - ends) < DAY_S


def test_a_release_whose_authority_was_not_kept_keeps_its_certificate(made: dict[str, Any], tmp_path: Path) -> None:
    """As earlier charts left it: without the key nothing can be signed anew."""
    old = json.loads(json.dumps(made["tls"]))
    del old["metadata"]["annotations"]
    with fake_cluster(old) as url:
        after = secrets_of(upgrade(url, ENCRYPTED, tmp_path, "helm3"))
    assert "authority" not in after
    assert after["tls"]["data"] == old["data"]
