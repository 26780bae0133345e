"""Sources of servers out of a coordinator's settings."""

from __future__ import annotations

from collections.abc import Iterable

from kvmesh.config.discovery import DnsSource as DnsSettings
from kvmesh.config.discovery import EndpointSliceSource, ServerSource, StaticSource
from kvmesh.coordinator.discovery.dns import DnsSource
from kvmesh.coordinator.discovery.fixed import FixedSource
from kvmesh.coordinator.discovery.kubernetes import KubernetesSource, api_server
from kvmesh.coordinator.discovery.source import Expected, Source
from kvmesh.net.clock import Clock

__all__ = ["make_sources"]


def make_sources(settings: Iterable[ServerSource], *, scheme: str, clock: Clock) -> list[Source]:
    """The sources; opens nothing.

    Args:
        settings: one a source.
        scheme: of servers of whose source none is stated.
        clock: of intervals and waits.

    Raises:
        ConfigError: a source cannot work where this process runs.
    """
    return [_make(one, scheme, clock) for one in settings]


def _make(settings: StaticSource | DnsSettings | EndpointSliceSource, scheme: str, clock: Clock) -> Source:
    expected = Expected(settings.role, settings.dialect, settings.trusted)
    if isinstance(settings, StaticSource):
        return FixedSource(settings.urls, expected)
    scheme = settings.scheme or scheme
    if isinstance(settings, DnsSettings):
        return DnsSource(settings.name, settings.port, scheme, expected, clock=clock, interval_s=settings.interval_s)
    return KubernetesSource(settings.service, api_server(settings), settings.port, scheme, expected, clock=clock)
