#!/usr/bin/env python3
"""Prints the chart's ``values.schema.json``: the chart's own values, and every setting of the services from its class.

usage: values_schema.py > k8s/chart/values.schema.json     (after a change of settings or of values.yaml)
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from kvmesh.config import (
    CacheTransceiverConfig,
    CoordinatorSettings,
    IndexerSettings,
    KvCacheConfig,
    KVEventsConfig,
    RouterSettings,
    WorkerSettings,
)

Schema = dict[str, Any]

# What the chart itself sets, from other values or from the pod: not to be given among the `settings`.
OF_ALL = {"host", "port", "log_level", "log_format", "otlp_endpoint", "api_keys_file", "tls", "curve"}
OF_CHART: dict[type[BaseModel], set[str]] = {
    RouterSettings: {
        "model",
        "served_model_name",
        "coordinator_url",
        "indexer_url",
        "indexer_match_endpoint",
        "api_keys",
    },
    WorkerSettings: {
        *("role", "model", "served_model_name", "instance_id", "transfer_bind_host", "coordinator_url"),
        *("cluster_secret", "cluster_secret_file", "kv_cache_config", "cache_transceiver_config"),
    },
    IndexerSettings: {"match_endpoint", "coordinator_url", "snapshot_path"},
    CoordinatorSettings: {
        *("etcd_endpoints", "etcd_tls", "etcd_user", "etcd_password_file", "advertise_url", "discovery"),
    },
}

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
OBJECTS: Schema = {"type": "array", "items": OBJECT}
TEXTS: Schema = {"type": "array", "items": TEXT}
TEXT_MAP: Schema = {"type": "object", "additionalProperties": TEXT}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
QUANTITY: Schema = {"type": ["string", "number"]}
PULL_POLICY: Schema = {"enum": ["Always", "IfNotPresent", "Never"]}
SOME_TEXT: Schema = {"type": "string", "minLength": 1}
NAME: Schema = {"type": "string", "pattern": "^([a-z]([-a-z0-9]*[a-z0-9])?)?$"}
"""Of objects; empty: one that the chart makes up."""
POD_LABELS: Schema = {
    "type": "object",
    "additionalProperties": TEXT,
    "patternProperties": {"^app\\.kubernetes\\.io/(name|instance|component)$": {"not": {}}},
}
"""The chart's own choose the pods of Services and cannot be others."""
URL_PATH: Schema = {"type": "string", "pattern": "^/"}
DURATION: Schema = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
"""Of the Gateway API."""
VOLUME_SOURCES = (
    *("persistentVolumeClaim", "hostPath", "nfs", "csi", "ephemeral", "emptyDir", "image", "projected"),
    *("configMap", "secret", "iscsi", "fc", "cephfs", "glusterfs", "rbd", "flexVolume", "azureFile", "azureDisk"),
    *("awsElasticBlockStore", "gcePersistentDisk", "portworxVolume", "quobyte", "scaleIO", "storageos"),
    *("photonPersistentDisk", "vsphereVolume", "cinder", "flocker"),
)
VOLUME: Schema = {
    "type": "object",
    "maxProperties": 1,
    "additionalProperties": False,
    "patternProperties": {f"^({'|'.join(VOLUME_SOURCES)})$": OBJECT},
}
"""One source of a volume."""


def main() -> None:
    """Print the schema."""
    print(json.dumps(values_schema(), indent=1))


def values_schema() -> Schema:
    """The schema of the whole ``values.yaml``."""
    definitions: Schema = {}
    cache = of_class(KvCacheConfig, definitions, without={"kv_events_config"})
    transceiver = of_class(CacheTransceiverConfig, definitions)
    events = of_class(KVEventsConfig, definitions)
    public = {"kv_cache_config": cache, "cache_transceiver_config": transceiver, "kv_events_config": events}
    settings = {kind: of_class(kind, definitions, without=OF_ALL | own) for kind, own in OF_CHART.items()}

    worker = record(
        **pod_values(spread=True),
        **scaling_values(),
        **public,
        settings=settings[WorkerSettings],
        gpu=record(count=whole(0), resourceName=TEXT, runtimeClassName=TEXT),
        startupFailureThreshold=whole(1),
        extraVolumes=OBJECTS,
        extraVolumeMounts=OBJECTS,
    )
    router = record(
        **pod_values(spread=True),
        **scaling_values(),
        settings=settings[RouterSettings],
        service=record(type={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}, port=PORT, annotations=TEXT_MAP),
        preStopSeconds=whole(0),
    )
    coordinator = record(
        **pod_values(spread=True),
        replicas=whole(1, 8),
        podDisruptionBudget=budget(),
        settings=settings[CoordinatorSettings],
    )
    etcd = record(
        **{key: value for key, value in pod_values().items() if key != "extraEnv"},
        mode={"enum": ["bundled", "external", "none"]},
        endpoints={"type": "array", "items": {"type": "string", "pattern": "^[^@ ]+$"}},
        tls=record(existingSecret=TEXT, clientCertificate=FLAG, serverName=TEXT),
        auth=record(user=TEXT, existingSecret=TEXT, key=SOME_TEXT),
        replicas={"enum": [1, 3, 5]},
        podDisruptionBudget=budget(),
        image=record(repository=SOME_TEXT, tag=SOME_TEXT, pullPolicy=PULL_POLICY, command=TEXTS),
        persistence=record(enabled=FLAG, size=QUANTITY, storageClass=TEXT),
    )
    accounts = dict.fromkeys(("router", "context", "generation", "indexer", "coordinator", "etcd"), TEXT)
    monitor = record(enabled=FLAG, labels=TEXT_MAP)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the KVMesh chart",
        "definitions": definitions,
        **record(
            **public,
            **{"global": OBJECT},
            nameOverride=NAME,
            fullnameOverride=NAME,
            image=record(
                repository=SOME_TEXT,
                lightTag=SOME_TEXT,
                engineTag=SOME_TEXT,
                pullPolicy=PULL_POLICY,
                pullSecrets=OBJECTS,
            ),
            model=record(name=SOME_TEXT, servedName=TEXT, fetch=FLAG, volume=VOLUME),
            log=record(level={"enum": ["debug", "info", "warning", "error"]}, format={"enum": ["json", "console"]}),
            otlpEndpoint=TEXT,
            clusterSecret=record(
                value={"type": "string", "pattern": "^(.{16,})?$"}, existingSecret=TEXT, key=SOME_TEXT
            ),
            apiKeys=record(keys=TEXTS, existingSecret=TEXT, key=SOME_TEXT),
            tls=record(
                enabled=FLAG,
                existingSecret=TEXT,
                serverName=SOME_TEXT,
                extraNames=TEXTS,
                days=whole(1),
                clientAuth={"enum": ["none", "required"]},
                curve=record(existingSecret=TEXT),
            ),
            discovery={"enum": ["none", "dns", "endpointslice"]},
            bindHost=SOME_TEXT,
            router=router,
            context=worker,
            generation=worker,
            indexer=record(
                **pod_values(), replicas=whole(1), podDisruptionBudget=budget(), settings=settings[IndexerSettings]
            ),
            coordinator=coordinator,
            etcd=etcd,
            serviceAccount=record(create=FLAG, annotations=TEXT_MAP, existing=record(**accounts)),
            networkPolicy=record(enabled=FLAG, clients=OBJECTS, monitoring=OBJECTS),
            ingress=record(enabled=FLAG, className=TEXT, annotations=TEXT_MAP, host=TEXT, path=URL_PATH, tls=OBJECTS),
            gateway=record(enabled=FLAG, parentRefs=OBJECTS, hostnames=TEXTS, path=URL_PATH, timeout=DURATION),
            monitoring=record(
                serviceMonitor=record(enabled=FLAG, labels=TEXT_MAP, interval=TEXT),
                prometheusRule=monitor,
                dashboards=monitor,
            ),
            podSecurityContext={"type": "object", "properties": {"runAsUser": whole(1)}},
        ),
    }


def pod_values(*, spread: bool = False) -> Schema:
    """Values of every pod."""
    amounts = {"type": "object", "additionalProperties": QUANTITY}
    values = {
        "resources": record(requests=amounts, limits=amounts, claims=OBJECTS),
        "podAnnotations": TEXT_MAP,
        "podLabels": POD_LABELS,
        "nodeSelector": TEXT_MAP,
        "tolerations": OBJECTS,
        "affinity": OBJECT,
        "priorityClassName": TEXT,
        "extraEnv": OBJECTS,
    }
    return values | ({"topologySpreadConstraints": OBJECTS} if spread else {})


def scaling_values() -> Schema:
    """Values of what can have any number of replicas and is drained when it goes."""
    return {
        "replicas": {"type": ["integer", "null"], "minimum": 0},
        "terminationGracePeriodSeconds": {"type": ["integer", "null"], "minimum": 1},
        "podDisruptionBudget": budget(),
        "autoscaling": record(
            enabled=FLAG,
            minReplicas=whole(1),
            maxReplicas=whole(1),
            targetCPUUtilizationPercentage={"type": ["integer", "null"], "minimum": 1},
            metrics=OBJECTS,
            behavior=OBJECT,
        ),
    }


def budget() -> Schema:
    """Values of a PodDisruptionBudget."""
    some: Schema = {"anyOf": [whole(1), {"type": "string", "pattern": "^([1-9][0-9]?|100)%$"}]}
    return record(enabled=FLAG, maxUnavailable=some)


def whole(minimum: int, maximum: int | None = None) -> Schema:
    """A whole number within bounds."""
    return {"type": "integer", "minimum": minimum} | ({} if maximum is None else {"maximum": maximum})


def record(**properties: Schema) -> Schema:
    """An object with these keys and no others.

    A key that somebody sets to null is missing, which templates fail on: only what may be null may be missing.
    """
    optional = {"global", "claims", "requests", "limits"}
    required = sorted(name for name, schema in properties.items() if not may_be_null(schema) and name not in optional)
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": required}


def may_be_null(schema: Schema) -> bool:
    """Whether null is a value of it."""
    return bool("null" in schema.get("type", ""))


def of_class(kind: type[BaseModel], definitions: Schema, without: frozenset[str] | set[str] = frozenset()) -> Schema:
    """A settings class by its fields; nothing is required, for a value that is left out is the class's default."""
    schema = kind.model_json_schema(ref_template="#/definitions/{model}")
    for name, nested in schema.pop("$defs", {}).items():
        definitions[name] = bare(nested)
    unknown = without - OF_ALL - set(kind.model_fields)
    if unknown:
        raise SystemExit(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    schema["properties"] = {name: value for name, value in schema["properties"].items() if name not in without}
    return bare(schema)


def bare(schema: Any, *, names: bool = False) -> Any:
    """Without what only documents: titles, descriptions and defaults are in docs/configuration.md.

    Args:
        schema: any part of a schema.
        names: its keys are names of properties, not words of the schema language.
    """
    if isinstance(schema, list):
        return [bare(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    dropped = set() if names else {"title", "description", "default", "discriminator"}
    return {
        key: bare(value, names=key == "properties" and not names) for key, value in schema.items() if key not in dropped
    }


if __name__ == "__main__":
    main()
