"""A pydantic error as sentences for the person who wrote the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from kvmesh.config.routing import POLICY_TYPES

__all__ = ["WORKER_SECTIONS", "describe"]

WORKER_SECTIONS = ("context", "generation", "aggregated")
"""Of a mesh: a worker's key without a section goes to all of them."""


_PLAIN = {
    "int_parsing": "must be an integer",
    "int_from_float": "must be an integer",
    "int_type": "must be an integer",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
}
"""What is wrong by pydantic's type of error, where its own words are a programmer's."""


def describe(error: ValidationError, layers: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """Every problem as ``path: what is wrong (from where)``; values are left out, they may be secrets."""
    lines: list[tuple[str, str]] = []
    for detail in error.errors(include_url=False, include_context=False):
        # A policy's type is in the location of its fields, but not in what the user wrote.
        path = [str(part) for part in detail["loc"] if part not in POLICY_TYPES]
        sources = _sources(path, layers or {})
        what = _PLAIN.get(detail["type"]) or detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "literal_error" and f"'{detail['input']}'".lower() in what.lower():
            what += ", in just these letters"
        lines.append((".".join(path), f"{what}{f' (from {sources})' if sources else ''}"))
    return "; ".join(f"{where}: {what}" if where else what for where, what in _said_once(lines))


def _said_once(lines: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """What is wrong in the same way for every kind of worker, once and without their sections."""
    said: list[tuple[str, str]] = []
    for where, what in lines:
        section, _, field = where.partition(".")
        everywhere = section in WORKER_SECTIONS and all((f"{one}.{field}", what) in lines for one in WORKER_SECTIONS)
        if everywhere and section == WORKER_SECTIONS[0]:
            said.append((field, what))
        elif not everywhere:
            said.append((where, what))
    return said


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
