"""Whether the ports of KV event publishers on one host fit beside each other."""

from __future__ import annotations

from kvmesh.config.endpoints import MAX_PORT, tcp_port

__all__ = ["event_port_problems"]


def event_port_problems(
    endpoint: str,
    replay_endpoint: str | None,
    *,
    ranks_per_host: int = 1,
    world_size: int = 1,
) -> list[str]:
    """Why the ports base + rank of the publishers cannot be bound, one sentence each; empty when they can.

    Only TCP endpoints with a fixed port are judged.

    Args:
        endpoint: base endpoint of the publishers.
        replay_endpoint: base endpoint of the replay sockets, if there are any.
        ranks_per_host: ranks that share one host, and so its ports.
        world_size: ranks in all; the last one binds base + ``world_size`` - 1.
    """
    problems = []
    publish = tcp_port(endpoint)
    replay = tcp_port(replay_endpoint) if replay_endpoint is not None else None
    for name, base in (("endpoint", publish), ("replay_endpoint", replay)):
        if base is not None and base + world_size - 1 > MAX_PORT:
            last = f"port {base} + {world_size - 1}"
            problems.append(f"kv_events_config.{name}: {last} is above the maximum port {MAX_PORT}")
    if publish is not None and replay is not None and abs(publish - replay) < ranks_per_host:
        problems.append(
            f"kv_events_config: publish ports from {publish} and replay ports from {replay} overlap; "
            f"keep them at least {ranks_per_host} apart"
        )
    return problems
