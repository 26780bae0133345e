"""Where a coordinator looks for servers that do not register themselves: fixed lists, DNS, Kubernetes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from kvmesh.config.base import StrictModel
from kvmesh.config.endpoints import MAX_PORT, HttpUrl
from kvmesh.config.service import Seconds

__all__ = ["SOURCE_TYPES", "DnsSource", "EndpointSliceSource", "ServerSource", "StaticSource"]

SOURCE_TYPES = ("static", "dns", "endpointslice")

_KUBERNETES_FILES = "/var/run/secrets/kubernetes.io/serviceaccount"


class _FoundServers(StrictModel):
    """What is known of a source's servers beforehand."""

    role: Literal["context", "generation", "both"] | None = None
    """What they do; a server that says otherwise is not taken in. Needed for servers that do not say it."""
    dialect: str = "kvmesh"
    """How a router speaks to those that do not say it: ``kvmesh``, or the name of another engine."""
    trusted: bool = False
    """Whether whoever answers there is shown the API key, also without a verified certificate (``https`` addresses and
    ``tls.ca_file``), so that it can ask for one. Servers of other dialects never are."""

    @model_validator(mode="after")
    def require_role_of_others(self) -> Self:
        """Servers of other engines do not say which leg they take."""
        if self.dialect != "kvmesh" and self.role is None:
            raise ValueError(f"servers of dialect {self.dialect!r} do not say their role; state it")
        return self


class StaticSource(_FoundServers):
    """Servers at fixed addresses."""

    type: Literal["static"] = "static"
    """The source's name."""
    urls: Annotated[list[HttpUrl], Field(min_length=1)]
    """Base URLs."""


class DnsSource(_FoundServers):
    """Every address (A and AAAA records) of a name: a service of compose, a headless Service of Kubernetes."""

    type: Literal["dns"] = "dns"
    """The source's name."""
    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name that is looked up, by the system's resolver."""
    port: Annotated[int, Field(gt=0, le=MAX_PORT)]
    """Port of the HTTP face at each address."""
    interval_s: Seconds = 2.0
    """Seconds between two look-ups."""
    scheme: Literal["http", "https"] | None = None
    """How the servers are spoken to; unset: ``https`` where the coordinator itself has a certificate."""


class EndpointSliceSource(_FoundServers):
    """The pods behind a Service of Kubernetes, from a watch of its EndpointSlices."""

    type: Literal["endpointslice"] = "endpointslice"
    """The source's name."""
    service: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    """Name of the Service."""
    namespace: str | None = None
    """Its namespace; unset: that of this pod."""
    port: Annotated[str, Field(min_length=1)] = "http"
    """Name or number of the Service's port that is the HTTP face."""
    scheme: Literal["http", "https"] | None = None
    """How the servers are spoken to; unset: ``https`` where the coordinator itself has a certificate."""
    api_url: HttpUrl | None = None
    """The API server; unset: that of the cluster that this process is a pod of."""
    token_file: str = f"{_KUBERNETES_FILES}/token"
    """Bearer token for the API server; read anew for each connection."""
    api_ca_file: str = f"{_KUBERNETES_FILES}/ca.crt"
    """Authority that the API server's certificate is verified by."""


def _source_type(value: Any) -> str | None:
    """The tag of a source."""
    tag = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return tag if isinstance(tag, str) else None


ServerSource = Annotated[
    Annotated[StaticSource, Tag("static")]
    | Annotated[DnsSource, Tag("dns")]
    | Annotated[EndpointSliceSource, Tag("endpointslice")],
    Discriminator(
        _source_type,
        custom_error_type="unknown_source",
        custom_error_message=f"unknown source of servers; type is {', '.join(SOURCE_TYPES[:-1])} or {SOURCE_TYPES[-1]}",
    ),
]
"""One of the sources, told apart by ``type``."""
