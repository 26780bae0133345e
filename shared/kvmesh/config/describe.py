"""A pydantic error as sentences for the person who wrote the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from kvmesh.config.routing import POLICY_TYPES

__all__ = ["describe"]


def describe(error: ValidationError, layers: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """Every problem as ``path: what is wrong (from where)``; values are left out, they may be secrets."""
    lines = []
    for detail in error.errors(include_url=False, include_input=False, include_context=False):
        # A policy's type is in the location of its fields, but not in what the user wrote.
        path = [str(part) for part in detail["loc"] if part not in POLICY_TYPES]
        where = f"{'.'.join(path)}: " if path else ""
        sources = _sources(path, layers or {})
        lines.append(f"{where}{detail['msg'].removeprefix('Value error, ')}{f' (from {sources})' if sources else ''}")
    return "; ".join(lines)


def _sources(path: list[str], layers: Mapping[str, Mapping[str, Any]]) -> str:
    """The layers, strongest first, that had a part in the value at ``path``: one if it is plain, else maybe several."""
    names = []
    for name, layer in layers.items():
        node: Any = layer
        for part in path:
            if not isinstance(node, Mapping):
                break
            node = node.get(part)
        if node is None or node == {}:
            continue
        names.append(name)
        if not isinstance(node, Mapping):
            break
    return " and ".join(names)
