"""TLS, API keys and sources of servers as settings: from the environment, over a mesh, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.config import ConfigError, CoordinatorSettings, MeshSettings, RouterSettings, load_settings
from kvmesh.config.discovery import DnsSource, EndpointSliceSource, StaticSource
from kvmesh.config.mesh_plan import plan_mesh

TLS = {"cert_file": "c", "key_file": "k", "ca_file": "a", "client_auth": "required"}


def test_sources_come_from_the_environment() -> None:
    lines = (
        '{type: static, urls: ["10.0.0.7:8100"]}',
        "{type: dns, name: context, port: 8100, role: context}",
        "{type: endpointslice, service: mesh-generation}",
    )
    for text in (f"[{', '.join(lines)}]", "\n".join(f"- {line}" for line in lines)):
        static, dns, slices = load_settings(CoordinatorSettings, env={"KVMESH_DISCOVERY": text}).discovery
        assert static == StaticSource(urls=["http://10.0.0.7:8100"])
        assert dns == DnsSource(name="context", port=8100, role="context")
        assert slices == EndpointSliceSource(service="mesh-generation")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"type": "consul"}, "type is static, dns or endpointslice"),
        ({"urls": ["http://a:1"]}, "type is static, dns or endpointslice"),
        ({"type": "dns", "nme": "x"}, "did you mean 'name'"),
        ({"type": "dns", "name": "x", "port": 0}, "greater than 0"),
        ({"type": "static", "urls": []}, "at least 1"),
        ({"type": "static", "urls": ["ftp://x"]}, "is not an HTTP address"),
        ({"type": "static", "urls": ["http://a:1"], "dialect": "vllm"}, "do not say their role"),
        ({"type": "endpointslice", "service": "A/b"}, "pattern"),
    ],
)
def test_sources_that_cannot_work_are_refused(source: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_settings(CoordinatorSettings, env={}, overrides={"discovery": [source]})


def test_an_empty_variable_is_no_certificate() -> None:
    """Compose files pass variables on whether they are set or not."""
    assert not load_settings(RouterSettings, env={"KVMESH_TLS__CERT_FILE": "", "KVMESH_TLS__KEY_FILE": ""}).tls.serves


def test_a_secret_in_the_environment_is_not_quoted() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(RouterSettings, env={"KVMESH_API_KEYS": "[sk-secret"})
    assert "sk-secret" not in str(caught.value)


def test_a_mesh_has_one_section_and_its_router_asks_clients_for_nothing() -> None:
    plan = plan_mesh(MeshSettings.model_validate({"tls": TLS}), cluster_secret="s", cpu_count=2)
    services = [plan.coordinator, plan.indexer, *plan.workers]
    assert {service.tls.client_auth for service in services} == {"required"}
    assert (plan.router.tls.cert_file, plan.router.tls.client_auth) == ("c", "none")
    assert plan.router.coordinator_url == "https://127.0.0.1:8400"
    assert plan.router.indexer_url == "https://127.0.0.1:8300"
    own = plan_mesh(MeshSettings.model_validate({"tls": TLS, "router": {"tls": TLS}}), cluster_secret="s", cpu_count=2)
    assert own.router.tls.client_auth == "required"


def test_a_coordinator_that_asks_for_keys_asks_all_of_a_mesh() -> None:
    mesh = MeshSettings.model_validate({"coordinator": {"api_keys_file": "keys"}})
    plan = plan_mesh(mesh, cluster_secret="s", cpu_count=2)
    assert {service.api_keys_file for service in (plan.indexer, plan.router, *plan.workers)} == {"keys"}
    plain = plan_mesh(MeshSettings(api_keys_file="clients"), cluster_secret="s", cpu_count=2)
    assert plain.router.api_keys_file == "clients"
    assert {service.api_keys_file for service in (plain.coordinator, plain.indexer, *plain.workers)} == {None}
