"""Helm 3 and 4 render the chart alike, Kubernetes' own schemas accept it, and wrong values are refused."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from typing import Any

import pytest
import yaml
from helm_chart import (
    CACHE,
    CASES,
    CHART,
    DEFAULT,
    EVERYTHING,
    HELMS,
    ROOT,
    HelmError,
    helm,
    render,
    render_text,
    run_helm,
)

OLDEST, NEWEST = "1.25.0", "1.37.0"
WITHOUT_SCHEMA = {"ServiceMonitor", "PrometheusRule", "HTTPRoute"}  # custom resources


@pytest.mark.parametrize("name", HELMS)
def test_lint_finds_nothing(name: str) -> None:
    assert "1 chart(s) linted, 0 chart(s) failed" in run_helm(helm(name), "lint", "--strict", CHART)


@pytest.mark.parametrize("case", CASES)
def test_helm_3_and_4_render_the_same(case: str) -> None:
    """As parsed objects: Helm 4 puts other blank lines between them."""
    texts = [render_text(CASES[case], name, "--kube-version", NEWEST) for name in HELMS]
    older, newer = ([item for item in yaml.safe_load_all(text) if item] for text in texts)
    assert by_name(older) == by_name(newer)
    assert len(older) == len(by_name(older))


def by_name(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(item["kind"], item["metadata"]["name"]): item for item in objects}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("case", ["everything", "tls"])
def test_kubernetes_schemas_accept_it(case: str, version: str, tmp_path) -> None:
    validate = CACHE / "kubernetes-validate" / "bin" / "kubernetes-validate"
    if not validate.exists():
        pytest.skip(f"there is no {validate}; 'make k8s-tools' installs it")
    chart = render(CASES[case], "helm4", "--kube-version", version)
    known = [item for item in chart.objects if item["kind"] not in WITHOUT_SCHEMA]
    assert len(known) > 15
    (tmp_path / "chart.yaml").write_text(yaml.safe_dump_all(known))
    done = subprocess.run(
        [validate, "--strict", "-k", version, tmp_path / "chart.yaml"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_servers_that_are_too_old_are_refused() -> None:
    assert render(DEFAULT, "helm4", "--kube-version", "1.20.0").objects
    with pytest.raises(HelmError, match="kubeVersion"):
        render_text(DEFAULT, "helm4", "--kube-version", "1.19.0")


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"router": {"replicas": "three"}}, "/router/replicas"),
        ({"kv_cache_config": {"max_token": 5}}, "/kv_cache_config"),
        ({"kv_cache_config": {"tokens_per_block": "many"}}, "/kv_cache_config/tokens_per_block"),
        ({"cache_transceiver_config": {"backend": "CARRIER_PIGEON"}}, "/cache_transceiver_config/backend"),
        ({"kv_events_config": {"hwm": 0}}, "/kv_events_config/hwm"),
        (
            {"generation": {"kv_cache_config": {"host_cache_size": "1Gi"}}},
            "/generation/kv_cache_config/host_cache_size",
        ),
        ({"generation": {"settings": {"drain": 5}}}, "/generation/settings"),
        ({"generation": {"settings": {"port": 1}}}, "/generation/settings"),
        ({"router": {"settings": {"context_router": {"type": "fastest"}}}}, "/router/settings/context_router"),
        ({"etcd": {"replicas": 2}}, "/etcd/replicas"),
        ({"etcd": {"mode": "maybe"}}, "/etcd/mode"),
        ({"coordinator": {"replicas": 0}}, "/coordinator/replicas"),
        ({"apiKeys": {"keys": "key"}}, "/apiKeys/keys"),
        ({"routers": {}}, "additional properties 'routers'"),
        ({"fullnameOverride": "UPPER_case"}, "/fullnameOverride"),
        ({"image": {"repository": ""}}, "/image/repository"),
        ({"model": {"volume": {"foo": {}}}}, "/model/volume"),
        ({"gateway": {"timeout": "10m30"}}, "/gateway/timeout"),
        ({"clusterSecret": {"value": "short"}}, "/clusterSecret/value"),
        ({"podSecurityContext": {"runAsUser": 0}}, "/podSecurityContext/runAsUser"),
        ({"router": {"podLabels": {"app.kubernetes.io/component": "x"}}}, "/router/podLabels"),
        ({"context": {"podDisruptionBudget": {"maxUnavailable": 0}}}, "/context/podDisruptionBudget/maxUnavailable"),
        ({"etcd": {"endpoints": ["https://me:secret@etcd:2379"]}}, "/etcd/endpoints/0"),
        ({"context": {"settings": None}}, "missing property 'settings'"),
        ({"context": {"resources": None}}, "missing property 'resources'"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], place: str) -> None:
    with pytest.raises(HelmError) as refused:
        render_text(values)
    assert place in str(refused.value)


def test_older_helm_refuses_them_too() -> None:
    with pytest.raises(HelmError, match=r"router\.replicas: Invalid type"):
        render_text({"router": {"replicas": "three"}}, "helm3")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"etcd": {"mode": "none"}, "coordinator": {"replicas": 2}}, "coordinator.replicas above 1 needs etcd"),
        ({"etcd": {"mode": "external"}}, "etcd.endpoints must name the members"),
        ({"gateway": {"enabled": True}}, "gateway.parentRefs must name a Gateway"),
        ({"etcd": {"replicas": 3, "persistence": {"enabled": False}}}, "etcd.replicas above 1 needs etcd.persistence"),
        ({"model": {"fetch": False}}, "model.volume must name the volume"),
        ({"context": {"terminationGracePeriodSeconds": 1}}, "terminationGracePeriodSeconds 1 would kill pods"),
        (
            {"serviceAccount": {"create": False}, "discovery": "endpointslice"},
            "serviceAccount.existing.coordinator must name an account",
        ),
        ({"etcd": {"auth": {"user": "kvmesh"}}}, "etcd.tls and etcd.auth are for etcd.mode external"),
        (
            {"etcd": {"mode": "external", "endpoints": ["https://e:2379"], "tls": {"serverName": "e"}}},
            "etcd.tls.existingSecret must name the Secret",
        ),
        (
            {"etcd": {"mode": "external", "endpoints": ["https://e:2379"], "auth": {"existingSecret": "s"}}},
            "etcd.auth.user must name the user",
        ),
        (
            {"etcd": {"mode": "external", "endpoints": ["http://e:2379"], "auth": {"user": "kvmesh"}}},
            "etcd.auth.existingSecret must name the Secret",
        ),
        ({"context": {"autoscaling": {"enabled": True}}}, "context.autoscaling.metrics must say by what to scale"),
        (
            {"router": {"autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 2}}},
            "router.autoscaling.minReplicas is above maxReplicas",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(HelmError, match=sentence):
        render_text(values)


def test_the_schema_has_the_settings_of_the_classes() -> None:
    """``make reference`` writes both this file and docs/configuration.md."""
    made = runpy.run_path(str(ROOT / "k8s" / "tools" / "values_schema.py"))["values_schema"]()
    committed = json.loads((CHART / "values.schema.json").read_text())
    for section in ("kv_cache_config", "cache_transceiver_config", "kv_events_config"):
        assert committed["properties"][section] == made["properties"][section], "run 'make reference'"
    for service in ("router", "context", "generation", "indexer", "coordinator"):
        known, written = (schema["properties"][service]["properties"]["settings"] for schema in (made, committed))
        assert known["properties"].keys() >= written["properties"].keys(), "run 'make reference'"


def test_every_default_is_known_to_the_schema() -> None:
    """The schema has no key that values.yaml lacks: whoever reads the file sees everything there is."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert missing(schema, values) == {"global"}


def missing(schema: dict[str, Any], values: dict[str, Any], path: str = "") -> set[str]:
    absent = set()
    for key, part in schema.get("properties", {}).items():
        where = f"{path}{key}"
        if key in ("settings", "resources", "kv_cache_config", "cache_transceiver_config", "kv_events_config"):
            continue
        if key not in values:
            absent.add(where)
        elif "properties" in part:
            absent |= missing(part, values[key], f"{where}.")
    return absent


def test_a_stated_secret_is_the_same_in_both_renderings_and_others_are_made() -> None:
    made = {
        render({**DEFAULT, "clusterSecret": {"value": "", "key": key}}).get("Secret", "cluster-secret")["data"][key]
        for key in ("a", "b")
    }
    assert len(made) == 2
    assert all(len(value) > 40 for value in made)


def test_packaging_keeps_every_template(tmp_path) -> None:
    run_helm(helm(), "package", CHART, "-d", tmp_path)
    package = next(tmp_path.glob("*.tgz"))
    packed = run_helm(helm(), "template", "r1", package, "--namespace", "mesh", *stated())
    assert by_name([o for o in yaml.safe_load_all(packed) if o]) == by_name(render(DEFAULT).objects)


def stated() -> tuple[str, str]:
    return "--set", f"clusterSecret.value={DEFAULT['clusterSecret']['value']}"


def test_everything_is_more_than_the_default() -> None:
    """The case really turns on what it names."""
    kinds = {item["kind"] for item in render(EVERYTHING, "helm4", "--kube-version", NEWEST).objects}
    more = {"Ingress", "HTTPRoute", "HorizontalPodAutoscaler", "ServiceMonitor"}
    assert more <= kinds
    assert not more & {item["kind"] for item in render(DEFAULT).objects}


def test_values_in_documentation_and_examples_are_values_of_the_chart() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    examples = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    files = [example for example in examples if "apiVersion" not in example]
    assert len(files) == 3
    shipped = [yaml.safe_load(path.read_text()) for path in (ROOT / "k8s" / "examples").glob("*.yaml")]
    assert shipped
    for values in files + shipped:
        assert render(values, "helm4", "--kube-version", NEWEST).objects
    (scaled,) = (example for example in examples if example.get("kind") == "ScaledObject")
    target = scaled["spec"]["scaleTargetRef"]
    kinds = {(item["kind"], item["metadata"]["name"].replace("r1-", "mesh-")) for item in render(DEFAULT).objects}
    assert (target["kind"], target["name"]) in kinds


def test_the_table_of_values_names_what_is_there() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    table = page.split("| values | are |\n")[1].split("\n\n")[0]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    named = [name for row in table.splitlines()[1:] for name in re.findall(r"`([\w.*]+)`", row.split("|")[1])]
    assert len(named) > 25
    # Those without a part before them are values of every kind of pod.
    places = [values, values["context"]]
    for name in named:
        first, *rest = name.split(".")
        starts = list(values.values()) if first == "*" else [place.get(first) for place in places if first in place]
        assert any(has(start, rest) for start in starts), name


def has(values: object, path: list[str]) -> bool:
    for key in path:
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True
