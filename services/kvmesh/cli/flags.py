"""Command-line flags out of the settings classes: one flag a field, dotted below a section."""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kvmesh.cli.errors import UserError
from kvmesh.config import ConfigError, load_settings

__all__ = ["add_settings_flags", "load_from_flags", "parse_assignments"]

S = TypeVar("S", bound=BaseModel)

_DESTINATION = "setting:"
"""Prefix of the argparse destinations that are settings; the rest is the field's dotted path."""


class _Flag(NamedTuple):
    path: str
    field: FieldInfo


def add_settings_flags(
    parser: argparse.ArgumentParser, settings: type[BaseModel], skip: frozenset[str] = frozenset()
) -> None:
    """Add ``--config`` and a flag for each field of ``settings``, grouped by section.

    Args:
        parser: gets the flags.
        settings: their source; help texts are the fields' descriptions.
        skip: fields (dotted paths) without a flag.
    """
    parser.usage = "%(prog)s [flags]"
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with these settings; flags override it")
    groups: dict[str, Any] = {}
    for flag in _flags(settings, ""):
        section, _, _ = flag.path.rpartition(".")
        if flag.path in skip or section in skip:
            continue
        group = groups.get(section)
        if group is None:
            group = groups[section] = parser.add_argument_group(section or "settings")
        _add_flag(group, flag)


def load_from_flags(args: argparse.Namespace, settings: type[S], fixed: Mapping[str, Any] | None = None) -> S:
    """The settings that the flags, the environment, the file of ``--config`` and the defaults make.

    Args:
        args: parsed by a parser that :func:`add_settings_flags` prepared.
        settings: the same class.
        fixed: values that no flag can change.

    Raises:
        UserError: something is wrong with them.
    """
    given = {
        key.removeprefix(_DESTINATION): value
        for key, value in vars(args).items()
        if key.startswith(_DESTINATION) and value is not None
    }
    try:
        return load_settings(settings, args.config, overrides=_nested({**given, **(fixed or {})}))
    except ConfigError as error:
        raise UserError(str(error)) from error


def parse_assignments(texts: list[str]) -> dict[str, Any]:
    """``["a.b=1", ...]`` as nested mappings; values are YAML.

    Raises:
        UserError: one has no ``=``, or its value is not YAML.
    """
    flat = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise UserError(f"--set {text!r} is not KEY=VALUE, such as context.kv_cache_config.max_tokens=4096")
        flat[key.strip().replace("-", "_")] = _yaml(value, f"--set {key}")
    return _nested(flat)


def _flags(model: type[BaseModel], prefix: str) -> Iterator[_Flag]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        section = next((kind for kind in _kinds(field.annotation) if _is_model(kind)), None)
        if section is not None and len([kind for kind in _kinds(field.annotation) if _is_model(kind)]) == 1:
            yield from _flags(section, f"{path}.")
        else:
            yield _Flag(path, field)


def _add_flag(group: Any, flag: _Flag) -> None:
    name = "--" + flag.path.replace("_", "-")
    kinds = [kind for kind in _kinds(flag.field.annotation) if kind is not type(None)]
    description = " ".join((flag.field.description or "").replace("``", "").split()).replace("%", "%%")
    common: dict[str, Any] = {
        "dest": _DESTINATION + flag.path,
        "default": None,
        "help": description + _default(flag.field),
    }
    literals = [
        str(value) for kind in kinds if typing.get_origin(kind) is typing.Literal for value in typing.get_args(kind)
    ]
    if kinds == [bool]:
        group.add_argument(name, action=argparse.BooleanOptionalAction, **common)
    elif literals and all(typing.get_origin(kind) is typing.Literal for kind in kinds):
        group.add_argument(name, choices=literals, **common)
    elif any(typing.get_origin(kind) in (list, dict) or _is_model(kind) for kind in kinds):
        group.add_argument(name, type=_structured(name), metavar="YAML", **common)
    else:
        optional = type(None) in _kinds(flag.field.annotation)
        group.add_argument(name, type=_scalar(optional), metavar=flag.path.rpartition(".")[2].upper(), **common)


class _Unset:
    """The text ``none`` on the command line: argparse keeps None for a flag that was not given."""


def _scalar(optional: bool) -> Any:
    return lambda text: _Unset if optional and text.lower() in ("none", "null") else text


def _structured(name: str) -> Any:
    def parse(text: str) -> Any:
        value = _yaml(text, name)
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value

    return parse


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{where}: {text!r} is not valid YAML: {error}") from error


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, last = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = None if value is _Unset else value
    return tree


def _default(field: FieldInfo) -> str:
    value = field.default
    if field.is_required() or field.default_factory is not None or value is None:
        return ""
    return f" (default: {str(value).lower() if isinstance(value, bool) else value})"


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _kinds(annotation: Any) -> list[Any]:
    """The members of a union, looked at through ``Annotated``."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _kinds(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [kind for member in typing.get_args(annotation) for kind in _kinds(member)]
    return [annotation]
