"""One value of the chart encrypts what the services say to each other and to clients."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from helm_chart import DEFAULT, TLS, Chart, render

from kvmesh.config.curve import CurveSettings
from kvmesh.config.tls import TlsSettings
from kvmesh.net.curve import CurveSecurity
from kvmesh.net.tls import Tls

NEW = ("--kube-version", "1.37.0")
SERVICES = ("router", "context", "generation", "indexer", "coordinator")
MADE: dict[str, Any] = {**DEFAULT, "tls": {"enabled": True}}


@pytest.fixture
def made() -> Chart:
    return render(MADE, "helm4", *NEW)


def files_of(chart: Chart, name: str, folder: Path) -> Path:
    """The files of a Secret, as its volume mounts them."""
    target = folder / name
    target.mkdir(parents=True)
    for key, value in chart.get("Secret", name)["data"].items():
        (target / key).write_bytes(base64.b64decode(value))
        (target / key).chmod(0o440)
    return target


def test_the_made_certificate_serves_and_is_trusted(made: Chart, tmp_path: Path) -> None:
    """Loading it tries a handshake in both roles."""
    files = files_of(made, "tls", tmp_path)
    settings = TlsSettings(
        cert_file=str(files / "tls.crt"),
        key_file=str(files / "tls.key"),
        ca_file=str(files / "ca.crt"),
        client_auth="required",
        server_name="kvmesh.internal",
    )
    certificate = Tls(settings).certificate
    assert certificate is not None
    assert {"kvmesh.internal", "localhost", "r1-kvmesh-router", "r1-kvmesh-router.mesh.svc"} <= set(certificate.names)
    assert "r1-kvmesh-etcd-0.r1-kvmesh-etcd" in certificate.names, "etcd is verified by its own name"


def test_the_made_key_pair_is_one(made: Chart, tmp_path: Path) -> None:
    files = files_of(made, "curve", tmp_path)
    security = CurveSecurity.load(CurveSettings(key_file=str(files / "kvmesh.key_secret")))
    assert security is not None
    assert security.client_keys() == {security.own.public}
    other = files_of(render(MADE, "helm3", *NEW), "curve", tmp_path / "other")
    assert (other / "kvmesh.key_secret").read_bytes() != (files / "kvmesh.key_secret").read_bytes()


@pytest.mark.parametrize("values", [MADE, TLS], ids=["made", "stated"])
def test_every_service_speaks_it(values: dict[str, Any]) -> None:
    chart = render(values, "helm4", *NEW)
    for component in SERVICES:
        settings = chart.settings(component)
        mounts = {mount["mountPath"] for mount in chart.pod(component)["containers"][0]["volumeMounts"]}
        places = [settings["tls"][name] for name in ("cert_file", "key_file", "ca_file")]
        if component != "coordinator":
            places.append(settings["curve"]["key_file"])
        assert {str(Path(place).parent) for place in places} <= mounts
        urls = [settings[name] for name in ("coordinator_url", "indexer_url") if name in settings]
        assert all(part.startswith("https://") for url in urls for part in url.split(","))
    arguments = chart.pod("coordinator")["containers"][0]["args"]
    assert arguments[arguments.index("--advertise-url") + 1].startswith("https://")
    (endpoint, *_) = chart.settings("coordinator")["etcd_endpoints"]
    assert endpoint.startswith("https://")
    etcd = " ".join(chart.pod("etcd")["containers"][0]["args"])
    assert "--client-cert-auth" in etcd
    assert "--peer-client-cert-auth" in etcd, "whoever may speak raft may write anything"
    assert "http://0.0.0.0:2379" not in etcd


def test_certificates_of_callers_are_asked_for_where_stated() -> None:
    """Not at the router, whose clients have keys instead; the kubelet has none, so the service asks itself."""
    chart = render(TLS, "helm4", *NEW)
    assert "client_auth" not in chart.settings("router")["tls"]
    assert "httpGet" in chart.pod("router")["containers"][0]["readinessProbe"]
    for component in SERVICES[1:]:
        assert chart.settings(component)["tls"]["client_auth"] == "required"
        assert chart.pod(component)["containers"][0]["livenessProbe"]["exec"] == {"command": ["kvmesh", "health"]}
    monitor = chart.get("ServiceMonitor", "generation")["spec"]["endpoints"][0]
    assert monitor["scheme"] == "https"
    assert monitor["tlsConfig"]["keySecret"] == {"name": "mesh-tls", "key": "tls.key"}


def test_stated_secrets_are_used_and_none_is_made() -> None:
    chart = render(TLS, "helm4", *NEW)
    assert {item["metadata"]["name"] for item in chart.of_kind("Secret")} == {
        "r1-kvmesh-cluster-secret",
        "r1-kvmesh-api-keys",
    }


def test_without_it_nothing_is_mounted() -> None:
    for component, _, spec in render(DEFAULT).pods():
        assert not {"tls", "curve"} & {volume["name"] for volume in spec.get("volumes", [])}, component


def test_the_coordinator_may_watch_endpoint_slices_where_it_does() -> None:
    chart = render(TLS, "helm4", *NEW)
    (role,) = chart.of_kind("Role")
    assert role["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    ]
    (binding,) = chart.of_kind("RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "r1-kvmesh-coordinator", "namespace": "mesh"}]
    sources = chart.settings("coordinator")["discovery"]
    services = {item["metadata"]["name"] for item in chart.of_kind("Service")}
    assert {source["service"] for source in sources} <= services
    assert not render(DEFAULT).of_kind("Role", "RoleBinding")


def test_dns_needs_no_role() -> None:
    chart = render({**DEFAULT, "discovery": "dns"})
    assert not chart.of_kind("Role")
    assert chart.settings("coordinator")["discovery"] == [
        {"type": "dns", "name": "r1-kvmesh-context", "port": 8100, "role": "context"},
        {"type": "dns", "name": "r1-kvmesh-generation", "port": 8200, "role": "generation"},
    ]
    policy = chart.get("NetworkPolicy", "context")["spec"]["ingress"][0]["from"][0]["podSelector"]
    assert "coordinator" in policy["matchExpressions"][0]["values"]
