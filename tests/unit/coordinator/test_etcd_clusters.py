"""Endpoints of an etcd that turn out to be of two clusters: nobody is told two stories."""

from __future__ import annotations

import pytest
from aiohttp import web

from kvmesh.coordinator.etcd import EtcdClient, EtcdError
from kvmesh.net.http import json_response
from kvmesh.net.service import Service, serving
from kvmesh.protocol.errors import ApiError


class FakeEtcd(Service):
    """One member; its cluster has no keys."""

    def __init__(self, cluster: int) -> None:
        super().__init__("etcd")
        self.cluster = cluster
        self.away = False
        self.app.router.add_post("/v3/kv/range", self._range)
        self.app.router.add_post("/v3/lease/keepalive", self._keep)

    def _header(self) -> dict[str, str]:
        if self.away:
            raise ApiError(503, "away")
        return {"cluster_id": str(self.cluster), "revision": "7"}

    async def _range(self, _request: web.Request) -> web.Response:
        return json_response({"header": self._header()})

    async def _keep(self, _request: web.Request) -> web.Response:
        return json_response({"result": {"header": self._header(), "ID": "1", "TTL": "5"}})


async def test_endpoints_of_two_clusters_are_refused_from_the_beginning() -> None:
    one, two = FakeEtcd(2**63 + 5), FakeEtcd(6)
    async with serving(one) as first, serving(two) as second, EtcdClient([first, second]) as etcd:
        for _ in range(3):
            with pytest.raises(EtcdError, match="different clusters"):
                await etcd.get("key")
        two.cluster = one.cluster
        assert await etcd.get("key") is None


async def test_a_member_of_another_cluster_does_not_stand_in() -> None:
    """One that was away is found anew as the first of a second cluster."""
    one, two = FakeEtcd(5), FakeEtcd(5)
    async with serving(one) as first, serving(two) as second, EtcdClient([first, second]) as etcd:
        assert await etcd.get("key") is None
        one.away, two.cluster = True, 6
        for _ in range(3):
            with pytest.raises(EtcdError):
                await etcd.get("key")
            with pytest.raises(EtcdError):
                await etcd.keep_alive(1)
        one.away = False
        assert await etcd.get("key") is None
        assert etcd.endpoint == first


async def test_a_cluster_that_is_another_as_a_whole_is_taken() -> None:
    """Restored from a snapshot, say: all members agree."""
    one, two = FakeEtcd(5), FakeEtcd(5)
    async with serving(one) as first, serving(two) as second, EtcdClient([first, second]) as etcd:
        assert await etcd.keep_alive(1)
        one.cluster = two.cluster = 6
        with pytest.raises(EtcdError, match="another cluster"):
            await etcd.keep_alive(1)
        assert await etcd.keep_alive(1)


async def test_one_endpoint_cannot_contradict_itself() -> None:
    one = FakeEtcd(5)
    async with serving(one) as url, EtcdClient([url]) as etcd:
        assert await etcd.get("key") is None
        one.cluster = 6
        assert await etcd.get("key") is None
