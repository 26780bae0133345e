"""EndpointSlices of Kubernetes as data: the objects of ``discovery.k8s.io`` v1 and v1beta1, and who is where by them.

Both versions have the fields that are read here. ``ready`` unset means yes; ``serving`` and ``terminating`` exist
since 1.20 and may be unset too.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

__all__ = ["SliceList", "SliceStore", "Status", "WatchEvent", "decode_event", "decode_list"]


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _Endpoint(msgspec.Struct):
    addresses: list[str] | None = None
    conditions: _Conditions | None = None


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""


class _Slice(msgspec.Struct, rename="camel"):
    metadata: _Metadata
    address_type: str = "IPv4"
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _ListMetadata(msgspec.Struct, rename={"resource_version": "resourceVersion", "more": "continue"}):
    resource_version: str = ""
    more: str = ""


class SliceList(msgspec.Struct):
    """``EndpointSliceList``, or a page of one."""

    metadata: _ListMetadata
    items: list[_Slice] | None = None


class Status(msgspec.Struct):
    """``Status``: what the API server says when something fails."""

    code: int = 0
    message: str = ""
    reason: str = ""


class WatchEvent(msgspec.Struct):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


_lists = msgspec.json.Decoder(SliceList)
_events = msgspec.json.Decoder(WatchEvent)
_slices = msgspec.json.Decoder(_Slice)
_statuses = msgspec.json.Decoder(Status)


def decode_list(data: bytes) -> SliceList:
    """A list's body. Raises ``msgspec.DecodeError``."""
    return _lists.decode(data)


def decode_event(line: bytes) -> tuple[str, _Slice | Status]:
    """A watch's line: its type, and the object that it is about. Raises ``msgspec.DecodeError``."""
    event = _events.decode(line)
    return event.type, (_statuses if event.type == "ERROR" else _slices).decode(event.object)


class SliceStore:
    """The slices of one Service.

    Args:
        port: name or number of the port that counts.
        scheme: of the servers' URLs.
    """

    def __init__(self, port: str, scheme: str) -> None:
        self._port = port
        self._scheme = scheme
        self._slices: dict[str, _Slice] = {}

    def replace(self, slices: Iterable[_Slice]) -> None:
        """All of them anew."""
        self._slices = {one.metadata.name: one for one in slices}

    def apply(self, kind: str, changed: _Slice) -> None:
        """``ADDED``, ``MODIFIED`` or ``DELETED``."""
        if kind == "DELETED":
            self._slices.pop(changed.metadata.name, None)
        else:
            self._slices[changed.metadata.name] = changed

    def urls(self) -> dict[str, bool]:
        """Base URL of each pod -> whether it takes new work.

        One that terminates, or is not ready, is there still, and takes none. An address may be in two slices for a
        moment while it moves; it takes work if one of them says so.
        """
        found: dict[str, bool] = {}
        for one in self._slices.values():
            port = self._port_of(one)
            if port is None:
                continue
            for endpoint in one.endpoints or ():
                takes_work = _takes_work(endpoint.conditions or _Conditions())
                for address in endpoint.addresses or ():
                    host = f"[{address}]" if one.address_type == "IPv6" else address
                    url = f"{self._scheme}://{host}:{port}"
                    found[url] = takes_work or found.get(url, False)
        return found

    def ports(self) -> set[str]:
        """Names of all ports, to tell when none is the one that counts."""
        return {port.name or str(port.port) for one in self._slices.values() for port in one.ports or ()}

    def _port_of(self, one: _Slice) -> int | None:
        return next(
            (port.port for port in one.ports or () if self._port in (port.name, str(port.port)) and port.port), None
        )


def _takes_work(conditions: _Conditions) -> bool:
    # A Service that publishes pods that are not ready calls them all ready; `serving` is the pod's own word.
    serving = conditions.ready if conditions.serving is None else conditions.serving
    return serving is not False and conditions.ready is not False and not conditions.terminating
