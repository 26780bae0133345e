"""``CurveSettings``: encryption of the ZeroMQ sockets of one service."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from kvmesh.config.base import StrictModel

__all__ = ["CurveSettings"]


class CurveSettings(StrictModel):
    """Keys of a service's ZeroMQ sockets: KV events, replays, matches. Not of the KV cache transfers.

    With ``key_file`` all of them are encrypted by ZMQ CURVE, and clients that have no key, or another, are refused. One
    pair for the whole mesh is enough: the other two settings are for clients that have pairs of their own.
    """

    key_file: str | None = None
    """File of this service's own key pair, as ``kvmesh keys curve DIR`` makes it (``*.key_secret``); unset: the sockets
    are plain."""
    server_key_file: str | None = None
    """File with the public key of the services that this one connects to; unset: it is the same pair as its own."""
    client_keys: str | None = None
    """Public keys that may connect: one file, or a directory of ``*.key`` files, read again when it changes; unset:
    only this service's own pair."""

    @model_validator(mode="after")
    def require_own_pair(self) -> Self:
        """The other keys are of no use without one's own."""
        if self.key_file is None:
            lonely = [name for name in ("server_key_file", "client_keys") if getattr(self, name) is not None]
            if lonely:
                raise ValueError(f"{' and '.join(lonely)} need key_file; 'kvmesh keys curve DIR' makes a pair")
        return self
