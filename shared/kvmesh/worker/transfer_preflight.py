"""What is wrong with a server's transfer settings on this machine, before anything is started. Never imports torch."""

from __future__ import annotations

import socket

from kvmesh.cache.layout import PageLayout
from kvmesh.cache.probe import available_host_bytes
from kvmesh.config import ConfigError, WorkerSettings
from kvmesh.config.transfer_backend import RuntimeName

__all__ = ["check_staging_memory", "check_transfer_settings"]

REGIONS = 2
"""Staging buffers, or bounce regions, of an engine: one to send from, one to receive into."""


def check_transfer_settings(settings: WorkerSettings, runtime: RuntimeName) -> None:
    """Refuse sizes and addresses that no model makes possible.

    Raises:
        ConfigError: the message names the field and says what to do.
    """
    _check_bind_host(settings.transfer_bind_host)
    transfers, page_tokens = settings.cache_transceiver_config, settings.kv_cache_config.tokens_per_block
    if runtime == "PYTHON":
        size_mb = transfers.kv_cache_bounce_size_mb
        _check_memory(settings, size_mb << 20, f"kv_cache_bounce_size_mb {size_mb}", "bounce regions")
    elif (tokens := transfers.max_tokens_in_buffer) is not None and tokens < page_tokens:
        raise ConfigError(
            f"cache_transceiver_config.max_tokens_in_buffer is {tokens}, less than the {page_tokens} tokens of one "
            f"page; set at least {page_tokens}, better the longest prompt, or leave it out"
        )


def check_staging_memory(settings: WorkerSettings, layout: PageLayout) -> None:
    """Refuse staging buffers of a stated size (runtime CPP) that this machine has no memory for.

    Args:
        settings: of the server.
        layout: of the pages of one engine.

    Raises:
        ConfigError: the message names the field and says what to do.
    """
    tokens = settings.cache_transceiver_config.max_tokens_in_buffer
    if tokens is not None:
        page_bytes = sum(layout.pools[group.pool].page_bytes for group in layout.groups)
        nbytes = -(-tokens // layout.tokens_per_block) * page_bytes
        _check_memory(settings, nbytes, f"max_tokens_in_buffer {tokens}", "staging buffers")


def _check_memory(settings: WorkerSettings, nbytes: int, setting: str, what: str) -> None:
    wanted, available = REGIONS * settings.dp_size * nbytes, available_host_bytes()
    if 0 < available < wanted:
        raise ConfigError(
            f"cache_transceiver_config.{setting} takes {wanted} bytes for {what}, but {available} bytes of memory are "
            "available; lower it"
        )


def _check_bind_host(host: str) -> None:
    """Bind once what the engine will bind: an address of another machine is found here."""
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise ConfigError(
            f"transfer_bind_host {host} cannot be bound ({(error.strerror or str(error)).partition(' (')[0]}); set an "
            "address of this machine that the other servers reach, or leave it out where all of them are on one machine"
        ) from error
