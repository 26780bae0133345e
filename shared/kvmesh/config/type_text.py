"""Types, defaults and constraints of configuration fields as text."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable
from typing import Any

import annotated_types
from pydantic import BaseModel, Strict
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

__all__ = ["constraint_text", "default_text", "type_text"]

_BOUNDS = (
    (annotated_types.Gt, "gt", ">"),
    (annotated_types.Ge, "ge", ">="),
    (annotated_types.Lt, "lt", "<"),
    (annotated_types.Le, "le", "<="),
)


def type_text(annotation: Any) -> str:
    """A field's type as a user would write it: ``int | None``, ``list[int]``, ``"null" | "zmq"``."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_text(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(type_text(argument) for argument in arguments))
    if origin is typing.Literal:
        return " | ".join(repr(value) for value in arguments)
    if origin is not None:
        inner = ", ".join(type_text(argument) for argument in arguments)
        return f"{type_text(origin)}[{inner}]"
    if annotation is type(None):
        return "None"
    return getattr(annotation, "__name__", str(annotation))


def default_text(field: FieldInfo) -> str:
    """A field's default as YAML would have it, or empty for a required field; nested classes have their own."""
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return ""
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, BaseModel):
        return type(default).__name__
    return repr(default) if isinstance(default, str) else str(default)


def constraint_text(field: FieldInfo) -> str:
    """A field's bounds, wherever in its type they stand: ``> 0, <= 1``, ``not empty; each strict, > 0``."""
    own = ", ".join(_constraints([*field.metadata, *_metadata(field.annotation)]))
    each = ", ".join(_constraints(_element_metadata(field.annotation)))
    return "; ".join([*([own] if own else []), *([f"each {each}"] if each else [])])


def _constraints(metadata: Iterable[Any]) -> Iterable[str]:
    for item in metadata:
        for kind, attribute, sign in _BOUNDS:
            if isinstance(item, kind):
                yield f"{sign} {getattr(item, attribute):g}"
        if isinstance(item, annotated_types.MinLen):
            yield "not empty"
        if isinstance(item, Strict) and item.strict:
            yield "strict"
        if getattr(item, "allow_inf_nan", None) is False:
            yield "finite"


def _metadata(annotation: Any) -> list[Any]:
    """What is attached to a type or to the members of a union, but not to the elements of a list."""
    if typing.get_origin(annotation) is typing.Annotated:
        inner, *metadata = typing.get_args(annotation)
        flat = [part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return [*flat, *_metadata(inner)]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [item for member in typing.get_args(annotation) for item in _metadata(member)]
    return []


def _element_metadata(annotation: Any) -> list[Any]:
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is list:
        return _metadata(arguments[0])
    if origin is typing.Annotated or origin in (typing.Union, types.UnionType):
        members = arguments[:1] if origin is typing.Annotated else arguments
        return [item for member in members for item in _element_metadata(member)]
    return []
