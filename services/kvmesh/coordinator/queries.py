"""Query parameters of the coordinator's routes."""

from __future__ import annotations

from aiohttp import web

from kvmesh.protocol.errors import bad_request

__all__ = ["float_query", "int_query", "is_set"]


def is_set(request: web.Request, name: str) -> bool:
    """Whether a switch is on."""
    return request.query.get(name, "").lower() in {"1", "true", "yes"}


def int_query(request: web.Request, name: str, default: int) -> int:
    """A number of 19 digits at most.

    Raises:
        ApiError: 400, it is something else.
    """
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise bad_request(f"{name} must be a non-negative integer.", param=name)
    return int(text)


def float_query(request: web.Request, name: str, default: float) -> float:
    """A number of seconds.

    Raises:
        ApiError: 400, it is something else, negative, or has no end.
    """
    try:
        value = float(request.query.get(name, default))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise bad_request(f"{name} must be a non-negative number of seconds.", param=name)
    return value
