"""Builds the transceiver that a configuration asks for, or says why it cannot."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial

from kvmesh.cache.layout import PageLayout
from kvmesh.config.cache_transceiver import CacheTransceiverConfig
from kvmesh.config.transfer_backend import (
    Resolved,
    ServerFacts,
    TransceiverConfigError,
    installed_backends,
    resolve,
)
from kvmesh.net.clock import Clock, SystemClock
from kvmesh.net.doorbell import Doorbell
from kvmesh.telemetry import get_logger
from kvmesh.transceiver.bounce import BounceGates, BounceRegions
from kvmesh.transceiver.channels.factory import create_channel
from kvmesh.transceiver.planes.base import DataPlane, PlaneError
from kvmesh.transceiver.planes.builtin import BuiltinPlane, PlaneChoice
from kvmesh.transceiver.planes.nixl import NixlPlane
from kvmesh.transceiver.staged.plane import StagedPlane
from kvmesh.transceiver.staged.region import region_size
from kvmesh.transceiver.tickets import Signer
from kvmesh.transceiver.timing import CONNECT_TIMEOUT_S, BellWaiter, TransferTimes, Waiter
from kvmesh.transceiver.transceiver import Transceiver
from kvmesh.transceiver.types import PeerKey, PoolMemory, StagingStats

__all__ = ["create_transceiver"]


def create_transceiver(
    config: CacheTransceiverConfig,
    *,
    layout: PageLayout,
    pools: Sequence[PoolMemory],
    instance_id: str,
    epoch: int,
    cluster_secret: bytes,
    bind_host: str = "127.0.0.1",
    plane: PlaneChoice = "auto",
    checksums: bool = True,
    digest: str,
    summary: str,
    clock: Clock | None = None,
    facts: ServerFacts | None = None,
    environment: Mapping[str, str] | None = None,
    waiter: Waiter | None = None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    max_seq_len: int | None = None,
) -> Transceiver | None:
    """Build and start the transceiver of an engine.

    Args:
        config: the server's ``cache_transceiver_config``.
        layout: of the cache's pages; ``pools[i]`` is the memory of ``layout.pools[i]``.
        pools: the memory that holds the pages of the device, then, where there is one, of the host tier.
        instance_id: of this engine, unique in the mesh.
        epoch: of this life of it; a higher one fences the lower.
        cluster_secret: shared by the mesh; signs tickets and introductions.
        bind_host: where the control socket and the TCP page server listen.
        plane: which way the built-in plane takes.
        checksums: whether pages are checked on arrival.
        digest: what must be equal at a peer (:meth:`PageLayout.digest`).
        summary: what it covers, for the sentence that says why two engines do not pair.
        clock: the time; the system's by default.
        facts: what else the server is; by default derived from ``pools``.
        environment: for the DEFAULT backend's selectors; the process's by default.
        waiter: how polls wait, and who is told that a session has changed; by default they wait in real time.
        connect_timeout_s: bound of connection set-up.
        max_seq_len: the longest sequence in tokens, which sizes the staging buffers where the configuration does not;
            never more than the pools hold.

    Returns:
        The transceiver, or None when ``config.backend`` is None.

    Raises:
        TransceiverConfigError: the configuration cannot work here.
        OSError: ``bind_host`` cannot be bound.
    """
    environment = os.environ if environment is None else environment
    if facts is None:
        on_cuda = any(pool.device == "cuda" for pool in pools)
        facts = ServerFacts(pool_device="cuda" if on_cuda else "cpu", installed=installed_backends())
    resolved = resolve(config, environment, facts)
    if resolved is None:
        return None
    log = get_logger("transceiver")
    for warning in resolved.warnings:
        log.warning(warning)
    if plane != "auto" and resolved.backend != "BUILTIN":
        log.warning(f"transfer_plane has no effect with backend {resolved.backend}")
    sizes = [pool.page_bytes for pool in layout.pools]
    if [pool.page_bytes for pool in pools] not in (sizes, 2 * sizes):
        raise TransceiverConfigError("the pools' page sizes are not those of the layout")
    if not cluster_secret:
        raise TransceiverConfigError("transfers need a cluster secret (cluster_secret, or a file that holds it)")
    times = TransferTimes.from_config(config, connect_timeout_s)
    if checksums and facts.pool_device == "cuda":
        log.warning("transfer_checksums has no effect on CUDA pools: pages are checked in host memory only")
        checksums = False
    key = PeerKey(instance_id, epoch)
    waiter = waiter or BellWaiter()
    bounce: BounceRegions | None = None
    try:
        if resolved.runtime == "CPP":
            longest = max(pool.num_pages for pool in pools) * layout.tokens_per_block
            if max_seq_len is not None:
                longest = min(longest, max_seq_len)
            size = region_size(layout, config.max_tokens_in_buffer, longest)
            channel = partial(
                create_channel,
                resolved.backend,
                name=str(key),
                bind_host=bind_host,
                connect_timeout_s=times.connect_s,
                choice=plane,
            )
            signer = Signer(cluster_secret, "pieces")
            data_plane: DataPlane = StagedPlane(
                key, pools, size, channel, signer=signer, bind_host=bind_host, times=times
            )
        else:
            bounce = _bounce_regions(config, pools, environment)
            memory = [*pools, *(bounce.pools if bounce is not None else ())]
            data_plane = _paged_plane(resolved, memory, str(key), bind_host, plane, times, waiter.bell)
    except PlaneError as error:
        raise TransceiverConfigError(str(error)) from error
    transceiver = Transceiver(
        key=key,
        layout=layout,
        digest=digest,
        summary=summary,
        pools=pools,
        plane=data_plane,
        cluster_secret=cluster_secret,
        bind_host=bind_host,
        checksums=checksums,
        bounce=bounce,
        times=times,
        clock=clock or SystemClock(),
        waiter=waiter,
        staging=data_plane.stats if isinstance(data_plane, StagedPlane) else StagingStats,
    )
    transceiver.start()
    log.info("transceiver ready", backend=data_plane.name, endpoint=transceiver.control_endpoint)
    return transceiver


def _bounce_regions(
    config: CacheTransceiverConfig, pools: Sequence[PoolMemory], environment: Mapping[str, str]
) -> BounceRegions | None:
    if not config.kv_cache_bounce_size_mb:
        return None
    try:
        gates = BounceGates.from_environment(environment)
    except ValueError as error:
        raise TransceiverConfigError(str(error)) from error
    return BounceRegions(config.kv_cache_bounce_size_mb << 20, pools, gates)


def _paged_plane(
    resolved: Resolved,
    pools: Sequence[PoolMemory],
    name: str,
    bind_host: str,
    choice: PlaneChoice,
    times: TransferTimes,
    bell: Doorbell,
) -> DataPlane:
    if resolved.backend == "NIXL":
        return NixlPlane(pools, name=name, bind_host=bind_host, connect_timeout_s=times.connect_s)
    return BuiltinPlane(pools, choice=choice, bind_host=bind_host, bell=bell)
