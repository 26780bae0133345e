"""T19 (the bounded wait of an idle executor) and T20 (which setting becomes which wait)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvmesh.config.cache_transceiver import CacheTransceiverConfig
from kvmesh.transceiver.timing import TransferTimes, idle_wait_ms


def config(**fields: Any) -> CacheTransceiverConfig:
    return CacheTransceiverConfig(backend="DEFAULT", **fields)


@pytest.mark.parametrize(
    ("fields", "wait_ms"),
    [
        ({}, 5000),
        ({"kv_transfer_poll_interval_ms": None}, 1000),
        ({"kv_transfer_timeout_ms": 1000}, 1000),
        ({"kv_transfer_timeout_ms": None}, 5000),
        ({"kv_transfer_timeout_ms": None, "kv_transfer_poll_interval_ms": None}, 1000),
        ({"kv_transfer_timeout_ms": 200, "kv_transfer_poll_interval_ms": 300}, 200),
    ],
)
def test_an_idle_executor_with_tracked_transfers_waits_a_bounded_time(fields: dict[str, Any], wait_ms: int) -> None:
    assert idle_wait_ms(config(**fields), tracked_transfers=True, busy=False) == wait_ms


def test_a_busy_executor_does_not_wait_and_an_idle_one_without_transfers_has_no_bound_from_them() -> None:
    assert idle_wait_ms(config(), tracked_transfers=True, busy=True) == 0
    assert idle_wait_ms(config(), tracked_transfers=False, busy=True) == 0
    assert idle_wait_ms(config(), tracked_transfers=False, busy=False) is None


def test_the_three_settings_become_the_three_waits() -> None:
    settings = config(
        kv_transfer_timeout_ms=60, kv_transfer_sender_future_timeout_ms=1500, kv_transfer_poll_interval_ms=50
    )
    assert TransferTimes.from_config(settings)[:3] == (0.06, 1.5, 0.05)


def test_unset_waits_fall_back_to_a_second() -> None:
    settings = config(kv_transfer_sender_future_timeout_ms=None, kv_transfer_poll_interval_ms=None)
    times = TransferTimes.from_config(settings)
    assert (times.slice_s, times.poll_s) == (1.0, 1.0)


def test_without_a_timeout_nothing_is_ever_overdue() -> None:
    """§2b: None means no sweeps at all."""
    times = TransferTimes.from_config(config(kv_transfer_timeout_ms=None))
    assert times.timeout_s == math.inf
    assert times.deadline_unix_ms(1000) is None
    assert TransferTimes.from_config(config(kv_transfer_timeout_ms=250)).deadline_unix_ms(1000) == 1250
