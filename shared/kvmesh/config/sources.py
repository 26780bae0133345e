"""The layers that settings come from: YAML files, environment variables and flags, each as nested plain data."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kvmesh.config.errors import ConfigError

__all__ = ["ENV_PREFIX", "env_layer", "merged", "nested", "read_yaml"]

ENV_PREFIX = "KVMESH_"
_NESTING = "__"


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML (or JSON) file; an empty file is an empty mapping.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds something else than a mapping.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read configuration file {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, not a {type(data).__name__}")
    return {str(key): value for key, value in data.items()}


def env_layer(model: type[BaseModel], env: Mapping[str, str]) -> dict[str, Any]:
    """The fields of ``model`` set by the environment: ``KVMESH_PORT``, ``KVMESH_KV_CACHE_CONFIG__MAX_TOKENS``.

    Variables that name no field of ``model`` belong to other services and are left alone; below a field, a wrong name
    is kept so that validation reports it.
    """
    layer: dict[str, Any] = {}
    for variable in sorted(env):
        if not variable.startswith(ENV_PREFIX):
            continue
        path = variable.removeprefix(ENV_PREFIX).lower().split(_NESTING)
        if path[0] in model.model_fields:
            _put(layer, path, _parse(_field_at(model, path), env[variable]), variable)
    return layer


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted keys (``kv_cache_config.max_tokens``) into nested mappings; nested ones are kept as they are."""
    layer: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split(".")
        wrapped: Any = {last: value}
        for parent in reversed(parents):
            wrapped = {parent: wrapped}
        layer = merged(layer, wrapped)
    return layer


def merged(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """``lower`` overlaid by ``upper``, key by key through nested mappings; neither is changed."""
    result = dict(lower)
    for key, value in upper.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def _put(layer: dict[str, Any], path: list[str], value: Any, variable: str) -> None:
    for part in path[:-1]:
        layer = layer.setdefault(part, {})
        if not isinstance(layer, dict):
            raise ConfigError(f"{variable} sets part of something that another variable sets as a whole")
    if isinstance(layer.get(path[-1]), dict) and not isinstance(value, dict):
        raise ConfigError(f"{variable} sets as a whole what other variables set in part")
    layer[path[-1]] = value


def _field_at(model: type[BaseModel], path: list[str]) -> FieldInfo | None:
    """The field that a path leads to, or None where it leaves the known models."""
    field: FieldInfo | None = None
    candidates: list[type[BaseModel]] = [model]
    for part in path:
        field = next((m.model_fields[part] for m in candidates if part in m.model_fields), None)
        if field is None:
            return None
        candidates = [
            kind for kind in _kinds(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
    return field


def _parse(field: FieldInfo | None, text: str) -> Any:
    """A variable's text as plain data: lists and mappings are YAML (or comma-separated), the rest pydantic converts."""
    if field is None:
        return text
    kinds = _kinds(field.annotation)
    if type(None) in kinds and text.strip().lower() in ("", "none", "null"):
        return None
    origins = {typing.get_origin(kind) or kind for kind in kinds}
    if list in origins and not text.lstrip().startswith(("[", "- ")):
        return [part.strip() for part in text.split(",") if part.strip()]
    if list in origins or any(_is_model(kind) for kind in kinds):
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            if not field.repr:  # a secret, which the error would quote
                raise ConfigError("a secret in the environment is not valid YAML") from None
            raise ConfigError(f"{text!r} in the environment is not valid YAML: {error}") from error
    return text


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
