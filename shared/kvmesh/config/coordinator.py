"""``CoordinatorSettings``: membership and the ledger of transfers."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from kvmesh.config.discovery import ServerSource
from kvmesh.config.endpoints import EtcdEndpoints, HttpUrl, Port
from kvmesh.config.service import Seconds, ServiceSettings
from kvmesh.config.tls import EtcdTlsSettings

__all__ = ["CoordinatorSettings"]


class CoordinatorSettings(ServiceSettings):
    """Settings of the transfer coordinator."""

    port: Port = 8400
    """Port of the HTTP face."""
    lease_s: Seconds = 10.0
    """Seconds without a heartbeat after which a member is dead."""
    ledger_max: Annotated[int, Field(gt=0)] = 100_000
    """Transfers remembered; the oldest finished ones are forgotten first."""
    history_max: Annotated[int, Field(gt=0)] = 10_000
    """Membership changes remembered for watchers; one that fell further behind gets the whole list."""
    etcd_endpoints: EtcdEndpoints = ()
    """Members of an etcd cluster, ``HOST:PORT``, ``etcd://HOST:PORT``, ``http://`` or ``https://``, as a list or with
    commas between. Members and open transfers are kept there, so that they survive the coordinator, and a second one
    with the same list takes over when the first is gone. Unset: in memory only."""
    etcd_tls: EtcdTlsSettings = Field(default_factory=EtcdTlsSettings)
    """Certificates towards etcd; unset: those of ``tls``, without its ``server_name``."""
    etcd_user: str | None = None
    """User at an etcd whose authentication is on, with ``readwrite`` on the prefix ``/kvmesh/``."""
    etcd_password_file: str | None = None
    """File with the password of ``etcd_user``, read whenever etcd asks."""
    cluster_name: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9._-]*$")] = ""
    """Namespace in etcd: coordinators of different meshes may share a cluster."""
    etcd_lease_s: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 5.0
    """Seconds after which another coordinator at the same etcd takes over from a silent one."""
    advertise_url: HttpUrl | None = None
    """Where other coordinators send members to while this one leads; unset: the address that it binds."""
    discovery: list[ServerSource] = Field(default_factory=list)
    """Where servers are found that do not register themselves, as a list of sources (``StaticSource``, ``DnsSource``,
    ``EndpointSliceSource``): whoever answers there as a server becomes a member."""

    @model_validator(mode="after")
    def require_password(self) -> Self:
        """A user is nobody without a password."""
        if (self.etcd_user is None) != (self.etcd_password_file is None):
            missing = "etcd_user" if self.etcd_user is None else "etcd_password_file"
            raise ValueError(f"etcd_user and etcd_password_file go together; {missing} is missing")
        return self
