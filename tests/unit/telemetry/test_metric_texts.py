"""Router and coordinator say what their numbers are, where Prometheus and Grafana show it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvmesh.config import CoordinatorSettings, RouterSettings
from kvmesh.coordinator import metric_texts as of_coordinator
from kvmesh.coordinator.main import build
from kvmesh.net.service import Service
from kvmesh.router import metric_texts as of_router
from kvmesh.router.app import RouterService


def router() -> Service:
    return RouterService(RouterSettings(indexer_url="http://a:1", indexer_match_endpoint="tcp://a:1"))


def coordinator() -> Service:
    return build(
        CoordinatorSettings(etcd_endpoints=["http://a:1"], discovery=[{"type": "static", "urls": ["http://b:1"]}])
    )


@pytest.mark.parametrize(("make", "texts"), [(router, of_router.TEXTS), (coordinator, of_coordinator.TEXTS)])
def test_every_number_has_a_text(make: Callable[[], Service], texts: dict[str, str]) -> None:
    service = make()
    assert service.statistics().keys() <= texts.keys()
    exposed = service.metrics.render().decode()
    for name, text in texts.items():
        if name in service.statistics():
            assert f"# HELP kvmesh_{service.name}_{name} {text}\n" in exposed
