"""The rendered objects fit together, and fit KVMesh: names, ports, references, probes, commands and settings."""

from __future__ import annotations

import argparse
import base64
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_chart import CASES, CHART, DEFAULT, EVERYTHING, EXTERNAL, LEAST, ROOT, SECRET, TLS, Chart, containers, render

from kvmesh.cli import chat, health, model, services
from kvmesh.cli.flags import load_from_flags
from kvmesh.config import CoordinatorSettings, IndexerSettings, RouterSettings, WorkerSettings
from kvmesh.coordinator import etcd_guard
from kvmesh.coordinator.main import build
from kvmesh.indexer.app import IndexerService
from kvmesh.net.service import Service
from kvmesh.router.app import RouterService
from kvmesh.worker.server import WorkerService

SETTINGS = {
    "router": RouterSettings,
    "context": WorkerSettings,
    "generation": WorkerSettings,
    "indexer": IndexerSettings,
    "coordinator": CoordinatorSettings,
}
NEW = ("--kube-version", "1.37.0")


@pytest.fixture(params=CASES)
def chart(request: pytest.FixtureRequest) -> Chart:
    return render(CASES[request.param], "helm4", *NEW)


def test_selectors_choose_their_own_pods_and_no_others(chart: Chart) -> None:
    labels = {component: metadata["labels"] for component, metadata, _ in chart.pods()}
    for item in chart.of_kind("Deployment", "StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy"):
        spec = item["spec"]
        selector = spec.get("podSelector") or spec["selector"]
        chosen = matching(labels, selector.get("matchLabels", selector))
        assert chosen == {item["metadata"]["labels"]["app.kubernetes.io/component"]}, item["metadata"]["name"]


def matching(labels: dict[str, dict[str, str]], selector: dict[str, str]) -> set[str]:
    return {component for component, own in labels.items() if selector.items() <= own.items()}


def test_services_lead_to_ports_that_their_pods_open(chart: Chart) -> None:
    for service in chart.of_kind("Service"):
        component = service["metadata"]["labels"]["app.kubernetes.io/component"]
        opened = {port["name"]: port for port in chart.pod(component)["containers"][0]["ports"]}
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in opened
            assert port["protocol"] == opened[port["targetPort"]]["protocol"] == "TCP"


def test_pods_open_the_ports_that_their_settings_name(chart: Chart) -> None:
    for component in SETTINGS:
        opened = {port["name"]: port["containerPort"] for port in chart.pod(component)["containers"][0]["ports"]}
        settings = chart.settings(component)
        assert opened["http"] == settings["port"]
        if component == "indexer":
            assert settings["match_endpoint"].endswith(f":{opened['match']}")
        if events := settings.get("kv_cache_config", {}).get("kv_events_config"):
            assert events["endpoint"].endswith(f":{opened['events']}")
            assert events["replay_endpoint"].endswith(f":{opened['replay']}")


def test_stateful_sets_name_their_headless_service(chart: Chart) -> None:
    for item in chart.of_kind("StatefulSet"):
        service = next(s for s in chart.of_kind("Service") if s["metadata"]["name"] == item["spec"]["serviceName"])
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True
        assert item["spec"]["podManagementPolicy"] == "Parallel"


def test_what_pods_refer_to_exists(chart: Chart) -> None:
    there = {(item["kind"], item["metadata"]["name"]): set(item.get("data", {})) for item in chart.objects}
    outside = {("Secret", name) for name in ("mine", "mesh-tls", "mesh-curve", "etcd-client", "etcd-user")}
    for _, _, spec in chart.pods():
        for kind, name, keys in references(spec):
            if (kind, name) not in outside:
                assert keys <= there[kind, name], (kind, name)
        account = spec.get("serviceAccountName", "default")
        assert account in ("default", "given") or ("ServiceAccount", account) in there


def references(spec: dict[str, Any]) -> Iterator[tuple[str, str, set[str]]]:
    for volume in spec.get("volumes", []):
        if source := volume.get("configMap"):
            yield "ConfigMap", source["name"], {entry["key"] for entry in source.get("items", [])}
        if source := volume.get("secret"):
            yield "Secret", source["secretName"], {entry["key"] for entry in source.get("items", [])}
    for container in containers(spec):
        for variable in container.get("env", []):
            if source := variable.get("valueFrom", {}).get("secretKeyRef"):
                yield "Secret", source["name"], set() if source.get("optional") else {source["key"]}


def test_mounts_have_volumes_and_volumes_are_mounted(chart: Chart) -> None:
    for component, _, spec in chart.pods():
        mounted = {mount["name"] for container in containers(spec) for mount in container.get("volumeMounts", [])}
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        if component == "etcd":
            volumes |= {claim["metadata"]["name"] for claim in claims(chart)}
        assert mounted == volumes, component
        assert all(len(volume) == 2 for volume in spec.get("volumes", [])), "a name and one source each"


def claims(chart: Chart) -> list[dict[str, Any]]:
    return chart.get("StatefulSet", "etcd")["spec"].get("volumeClaimTemplates", [])


def test_every_container_is_confined(chart: Chart) -> None:
    """Not root, no way to become it, no capability, nothing to write to but its volumes, the usual system calls."""
    for component, _, spec in chart.pods():
        pod = spec["securityContext"]
        assert (pod["runAsNonRoot"], pod["runAsUser"]) == (True, 10001), component
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["enableServiceLinks"] is False, "a Service named kvmesh would set KVMESH_PORT"
        watches = component == "coordinator" and bool(chart.of_kind("Role"))
        assert spec["automountServiceAccountToken"] is watches
        for container in containers(spec):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["readOnlyRootFilesystem"] is True
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]


def test_no_secret_is_outside_of_secrets(chart: Chart) -> None:
    for item in chart.objects:
        if item["kind"] != "Secret":
            text = yaml.safe_dump(item)
            assert SECRET not in text
            assert "key-one" not in text


def test_api_keys_are_lines_of_a_file() -> None:
    secret = render(EVERYTHING, "helm4", *NEW).get("Secret", "api-keys")["data"]
    assert base64.b64decode(secret["api-keys"]) == b"key-one\nkey-two\n"
    assert base64.b64decode(secret["client-key"]) == b"key-one"
    named = render(TLS, "helm4", *NEW).get("Secret", "api-keys")["data"]
    assert base64.b64decode(named["api-keys"]) == b"team-a key-one\n", "a name and its key"
    assert base64.b64decode(named["client-key"]) == b"key-one"


def test_services_start_with_the_settings_that_the_chart_states(
    chart: Chart, tmp_path: Path, image_environment
) -> None:
    for component, settings in started(chart, tmp_path):
        assert settings.host == "0.0.0.0"
        assert settings.log_format == "json"
        if component in ("context", "generation"):
            assert settings.role == component
            assert settings.instance_id == "pod-0"
            assert settings.transfer_bind_host == "10.0.0.7"
            assert settings.cluster_secret == SECRET
            assert settings.cache_transceiver_config.backend == "DEFAULT"
            assert settings.kv_cache_config.kv_events_config.publisher == "zmq"


def test_values_go_before_the_environment_of_the_image(tmp_path: Path, image_environment: None) -> None:
    values = {**DEFAULT, "bindHost": "::", "log": {"format": "console", "level": "debug"}}
    for _, settings in started(render(values), tmp_path):
        assert (settings.host, settings.log_format, settings.log_level) == ("::", "console", "debug")


@pytest.fixture
def image_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the image sets; a variable goes before a file."""
    for line in (ROOT / "compose" / "Dockerfile").read_text().splitlines():
        if found := re.search(r"\b(KVMESH_\w+)=(\S+)", line):
            monkeypatch.setenv(found[1], found[2])


def started(chart: Chart, folder: Path) -> Iterator[tuple[str, Any]]:
    """The settings of each service as its container's process gets them, from files with the content of the chart's."""
    (folder / "secret").write_text(SECRET)
    (folder / "keys").write_text("key-one\n")
    places = {
        "$(POD_NAME)": "pod-0",
        "$(POD_IP)": "10.0.0.7",
        "/etc/kvmesh/cluster-secret/secret": str(folder / "secret"),
        "/etc/kvmesh/api-keys/keys": str(folder / "keys"),
    }
    for component, kind in SETTINGS.items():
        (container,) = chart.pod(component)["containers"]
        file = folder / f"{component}.yaml"
        file.write_text(replaced(chart.get("ConfigMap", component)["data"][f"{component}.yaml"], places))
        arguments = [
            replaced(part, {**places, f"/etc/kvmesh/{component}.yaml": str(file)}) for part in container["args"]
        ]
        fixed = {"role": component} if kind is WorkerSettings else {}
        parser = argparse.ArgumentParser(allow_abbrev=False)
        services.add_arguments(parser, component)
        assert arguments[0] == component
        yield component, load_from_flags(parser.parse_args(arguments[1:]), kind, fixed)


def replaced(text: str, places: dict[str, str]) -> str:
    for old, new in places.items():
        text = text.replace(old, new)
    return text


def test_the_public_sections_are_the_values_word_for_word() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for component in ("context", "generation"):
        settings = render(DEFAULT).settings(component)
        cache = dict(settings["kv_cache_config"])
        assert cache.pop("kv_events_config") == values["kv_events_config"]
        assert cache == values["kv_cache_config"]
        assert settings["cache_transceiver_config"] == values["cache_transceiver_config"]


def test_a_servers_own_sections_go_before_the_common_ones() -> None:
    chart = render(EVERYTHING, "helm4", *NEW)
    context = chart.settings("context")["kv_cache_config"]
    assert (context["tokens_per_block"], context["host_cache_size"]) == (64, 1 << 30)
    assert context["enable_block_reuse"] is True
    assert chart.settings("generation")["kv_cache_config"]["tokens_per_block"] == 32


def test_command_lines_are_those_of_the_command(chart: Chart) -> None:
    for _, _, spec in chart.pods():
        for container in containers(spec):
            if "command" not in container:
                command, *arguments = container["args"]
                parser = argparse.ArgumentParser(exit_on_error=False)
                module = {"model": model, "chat": chat, "health": health}.get(command, services)
                module.add_arguments(parser, command)
                assert parser.parse_known_args(arguments)[1] == []


def test_probes_ask_for_paths_that_the_services_have(chart: Chart, tmp_path: Path) -> None:
    for component, service in built(chart, tmp_path):
        gets = {route.resource.canonical for route in service.app.router.routes() if route.resource is not None}
        container = chart.pod(component)["containers"][0]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if command := container[probe].get("exec"):
                assert command["command"] == ["kvmesh", "health"]
                continue
            assert container[probe]["httpGet"]["path"] in gets
            assert container[probe]["httpGet"]["port"] == "http"
            assert container[probe]["httpGet"]["scheme"] == ("HTTPS" if "tls" in chart.settings(component) else "HTTP")


def built(chart: Chart, folder: Path) -> Iterator[tuple[str, Service]]:
    for component, settings in started(chart, folder):
        kinds = {"router": RouterService, "indexer": IndexerService, "coordinator": build}
        # Without what only a pod has: mounted files, and an API server.
        absent = ("tls", "curve", "discovery", "etcd_tls")
        plain = {name: type(getattr(settings, name))() for name in absent if hasattr(settings, name)}
        plain["etcd_user"] = None
        yield component, kinds.get(component, WorkerService)(settings.model_copy(update=plain))


def test_probes_are_patient_at_first_and_later_soon(chart: Chart) -> None:
    for component in SETTINGS:
        container = chart.pod(component)["containers"][0]
        patience = {
            name: container[f"{name}Probe"]["periodSeconds"] * container[f"{name}Probe"]["failureThreshold"]
            for name in ("startup", "readiness", "liveness")
        }
        assert patience["readiness"] < patience["liveness"] <= patience["startup"], component
        assert patience["startup"] >= (600 if component in ("context", "generation") else 60)


def test_routers_live_while_there_are_no_servers() -> None:
    """/health of a router is 503 while no server is there; a restart would not bring one."""
    router = render(DEFAULT).pod("router")["containers"][0]
    assert router["livenessProbe"]["httpGet"]["path"] == router["startupProbe"]["httpGet"]["path"] == "/version"
    assert router["readinessProbe"]["httpGet"]["path"] == "/health"


def test_pods_have_time_to_drain(chart: Chart, tmp_path: Path) -> None:
    for component, settings in started(chart, tmp_path):
        spec = chart.pod(component)
        hook = spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])
        assert spec["terminationGracePeriodSeconds"] >= settings.drain_s + float(hook[1]) + 10, component


def test_the_time_to_drain_follows_the_setting_and_can_be_stated() -> None:
    values = {
        **DEFAULT,
        "context": {"settings": {"drain_s": 299.5}},
        "generation": {"terminationGracePeriodSeconds": 77},
    }
    chart = render(values)
    assert chart.pod("context")["terminationGracePeriodSeconds"] == math.ceil(299.5) + 15
    assert chart.pod("generation")["terminationGracePeriodSeconds"] == 77


def test_replicas_keep_apart() -> None:
    for component in ("router", "context", "generation", "coordinator"):
        spec = render(DEFAULT).pod(component)
        term = spec["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"][0]
        spread = spec["topologySpreadConstraints"][0]
        own = {"app.kubernetes.io/component": component}
        assert own.items() <= term["podAffinityTerm"]["labelSelector"]["matchLabels"].items()
        assert own.items() <= spread["labelSelector"]["matchLabels"].items()
        assert spread["whenUnsatisfiable"] == "ScheduleAnyway"


def test_graphics_processors_are_asked_for_where_stated() -> None:
    chart = render(EVERYTHING, "helm4", *NEW)
    assert chart.pod("context")["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert chart.pod("context")["runtimeClassName"] == "nvidia"
    assert "nvidia.com/gpu" not in yaml.safe_dump(render(DEFAULT).objects)


def test_scalers_have_the_say_over_replicas() -> None:
    """A chart that states replicas beside a scaler would undo it with each upgrade."""
    chart = render(EVERYTHING, "helm4", *NEW)
    for scaler in chart.of_kind("HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        item = next(i for i in chart.of_kind(target["kind"]) if i["metadata"]["name"] == target["name"])
        assert "replicas" not in item["spec"]
        assert scaler["spec"]["metrics"]
    assert {item["metadata"]["name"] for item in chart.of_kind("HorizontalPodAutoscaler")} == {
        "r1-kvmesh-router",
        "r1-kvmesh-context",
    }
    assert chart.get("StatefulSet", "generation")["spec"]["replicas"] == 4
    own = render({**DEFAULT, "generation": {"replicas": None}, "router": {"replicas": None}})
    assert "replicas" not in own.get("StatefulSet", "generation")["spec"]
    assert "replicas" not in own.get("Deployment", "router")["spec"]


def test_members_know_every_coordinator_by_name() -> None:
    chart = render(DEFAULT)
    urls = chart.settings("router")["coordinator_url"].split(",")
    assert urls == [f"http://r1-kvmesh-coordinator-{i}.r1-kvmesh-coordinator:8400" for i in range(2)]
    assert chart.settings("coordinator")["etcd_endpoints"] == ["http://r1-kvmesh-etcd-0.r1-kvmesh-etcd:2379"]
    arguments = chart.pod("coordinator")["containers"][0]["args"]
    advertised = arguments[arguments.index("--advertise-url") + 1]
    # With the namespace: what is stored in an external etcd must not be taken for another mesh's.
    assert advertised == urls[1].replace("r1-kvmesh-coordinator-1", "$(POD_NAME)").replace(":8400", ".mesh:8400")
    assert "etcd_endpoints" not in render(LEAST).settings("coordinator")


def test_servers_that_hold_a_gpu_compute_on_it() -> None:
    assert render(EVERYTHING, "helm4", *NEW).settings("context")["device"] == "cuda"
    assert "device" not in render(DEFAULT).settings("context")
    chosen = {**DEFAULT, "context": {"gpu": {"count": 1}, "settings": {"device": "auto"}}}
    assert render(chosen).settings("context")["device"] == "auto"


def test_meshes_at_one_etcd_do_not_meet() -> None:
    assert render(DEFAULT).settings("coordinator")["cluster_name"] == "mesh.r1-kvmesh"
    chosen = {**DEFAULT, "coordinator": {"settings": {"cluster_name": "shared"}}}
    assert render(chosen).settings("coordinator")["cluster_name"] == "shared"
    CoordinatorSettings(cluster_name=render(DEFAULT).settings("coordinator")["cluster_name"])


def test_an_external_etcd_is_shown_a_certificate_and_a_user() -> None:
    chart = render(EXTERNAL)
    settings = chart.settings("coordinator")
    mounts = {mount["mountPath"] for mount in chart.pod("coordinator")["containers"][0]["volumeMounts"]}
    read = CoordinatorSettings(**{name: settings[name] for name in settings if name.startswith("etcd_")})
    assert (read.etcd_user, read.etcd_tls.server_name) == ("kvmesh", "etcd.example")
    places = [read.etcd_password_file, read.etcd_tls.ca_file, read.etcd_tls.cert_file, read.etcd_tls.key_file]
    assert {str(Path(str(place)).parent) for place in places} <= mounts
    assert not chart.of_kind("ServiceMonitor")
    trusted = {"existingSecret": "etcd-client"}
    bare = render({**EXTERNAL, "etcd": {"mode": "external", "endpoints": ["https://e:2379"], "tls": trusted}})
    assert bare.settings("coordinator")["etcd_tls"] == {"ca_file": "/etc/kvmesh/etcd-tls/ca.crt"}
    plain = render({**EXTERNAL, "etcd": {"mode": "external", "endpoints": ["http://e:2379"]}}).settings("coordinator")
    assert not {"etcd_tls", "etcd_user", "etcd_password_file"} & plain.keys()


def test_members_of_etcd_are_guarded_by_what_they_are_started_with(chart: Chart) -> None:
    """The guard is told of the same members as etcd itself, and looks where etcd keeps them."""
    if not [item for item in chart.of_kind("StatefulSet") if item["metadata"]["name"].endswith("-etcd")]:
        return
    (guard,) = chart.pod("etcd")["initContainers"]
    told = dict(argument.removeprefix("--").split("=", 1) for argument in guard["args"])
    etcd = dict(
        argument.removeprefix("--").split("=", 1)
        for argument in chart.pod("etcd")["containers"][0]["args"]
        if "=" in argument
    )
    assert (told["members"], told["name"], told["data-dir"]) == (
        etcd["initial-cluster"],
        etcd["name"],
        etcd["data-dir"],
    )
    assert ("tls" in told) == ("cert-file" in etcd)
    assert guard["command"] == ["python3", "-m", etcd_guard.__name__]


def test_a_pod_that_does_not_get_ready_keeps_no_node_from_being_drained() -> None:
    for version, policy in (("1.37.0", "AlwaysAllow"), ("1.26.0", None)):
        for budget in render(DEFAULT, "helm4", "--kube-version", version).of_kind("PodDisruptionBudget"):
            assert budget["spec"].get("unhealthyPodEvictionPolicy") == policy


def test_only_who_uses_the_cluster_secret_bears_a_mark_of_it() -> None:
    def marks(secret: str) -> dict[str, str]:
        chart = render({"clusterSecret": {"value": secret}})
        return {c: m["annotations"]["checksum/secret"] for c, m, _ in chart.pods() if "checksum/secret" in str(m)}

    one, other = marks("0123456789abcdef"), marks("fedcba9876543210")
    assert {component for component in one if one[component] != other[component]} == {"context", "generation"}


def test_a_renewed_certificate_starts_nobody_anew() -> None:
    def templates(**tls: Any) -> list[tuple[str, Any]]:
        chart = render({**DEFAULT, "tls": {"enabled": True, **tls}})
        return [(component, metadata.get("annotations")) for component, metadata, _ in chart.pods()]

    assert templates() == templates(extraNames=["more.example"], days=90)


def test_networks_admit_who_needs_it() -> None:
    chart = render(EVERYTHING, "helm4", *NEW)
    policies = {
        p["metadata"]["name"].removeprefix("r1-kvmesh-"): p["spec"]["ingress"] for p in chart.of_kind("NetworkPolicy")
    }
    who = {
        component: set(rule["from"][0]["podSelector"]["matchExpressions"][0]["values"])
        for component, (rule, *_) in policies.items()
        if component != "router"
    }
    assert who["etcd"] == {"coordinator", "etcd"}
    assert who["indexer"] == {"router", "coordinator"}
    assert who["generation"] == who["context"] == {"router", "context", "generation", "indexer", "coordinator"}
    clients = policies["router"][0]["from"]
    assert {"namespaceSelector": {"matchLabels": {"name": "apps"}}} in clients
    assert all(len(rules) == 2 for rules in policies.values()), "monitoring may scrape each service"
    assert policies["etcd"][1]["ports"] == [{"port": 2381, "protocol": "TCP"}], "nothing but metrics"
    assert "from" not in {
        k: v
        for p in render(DEFAULT).of_kind("NetworkPolicy")
        if p["metadata"]["name"].endswith("-router")
        for k, v in p["spec"]["ingress"][0].items()
    }


def test_models_are_fetched_before_the_server_or_mounted() -> None:
    fetched, mounted = render(DEFAULT), render(LEAST)
    for component in ("router", "context", "generation"):
        (init,) = fetched.pod(component)["initContainers"]
        assert init["args"] == ["model", "fetch", "SmolLM2-135M-Instruct"]
        assert "initContainers" not in mounted.pod(component)
        (volume,) = (v for v in mounted.pod(component)["volumes"] if v["name"] == "models")
        assert volume["persistentVolumeClaim"] == {"claimName": "models"}
        (mount,) = (m for m in mounted.pod(component)["containers"][0]["volumeMounts"] if m["name"] == "models")
        assert mount["readOnly"] is True


def test_changed_settings_start_new_pods() -> None:
    def checksum(values: dict[str, Any]) -> str:
        return next(m["annotations"]["checksum/config"] for c, m, _ in render(values).pods() if c == "context")

    assert checksum(DEFAULT) != checksum({**DEFAULT, "kv_cache_config": {"tokens_per_block": 64}})


def test_the_route_leads_to_the_router() -> None:
    chart = render(EVERYTHING, "helm4", *NEW)
    (ingress,) = chart.of_kind("Ingress")
    (place,) = ingress["spec"]["rules"][0]["http"]["paths"]
    assert (place["path"], place["pathType"]) == ("/v1", "Prefix"), "metrics are not for those who come in that way"
    backend = place["backend"]["service"]
    service = chart.get("Service", "router")
    assert backend == {"name": service["metadata"]["name"], "port": {"name": service["spec"]["ports"][0]["name"]}}
    (route,) = chart.of_kind("HTTPRoute")
    (match,) = route["spec"]["rules"][0]["matches"]
    assert match["path"] == {"type": "PathPrefix", "value": "/v1"}
    (target,) = route["spec"]["rules"][0]["backendRefs"]
    assert target == {"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}
