from __future__ import annotations

import pytest

from kvmesh.config import ConfigError, CoordinatorSettings
from kvmesh.coordinator.main import build
from kvmesh.net.clock import ManualClock


def test_settings_reach_the_service():
    clock = ManualClock()
    service = build(CoordinatorSettings(lease_s=3, drain_s=2), clock)
    assert service.drain_s == 2
    assert service.statistics()["members"] == 0


def test_each_life_has_a_name_of_its_own():
    incarnations = {build(CoordinatorSettings())._registry.incarnation for _ in range(3)}
    assert len(incarnations) == 3


def test_keys_that_cannot_be_read_are_refused():
    with pytest.raises(ConfigError, match="cannot be read"):
        build(CoordinatorSettings(api_keys_file="/nowhere/keys"))


def test_a_coordinator_with_etcd_is_built_outside_of_any_loop():
    service = build(CoordinatorSettings(etcd_endpoints="etcd://127.0.0.1:9,127.0.0.1:10", cluster_name="blue"))
    assert not service.health().ok, "it has not read what is stored"
    assert service.statistics()["leading"] == 0
