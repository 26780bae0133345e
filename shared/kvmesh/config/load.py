"""``load_settings``: one settings object out of flags, environment, file and defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kvmesh.config.describe import describe
from kvmesh.config.errors import ConfigError
from kvmesh.config.files import file_layer
from kvmesh.config.sources import env_layer, merged, nested, read_yaml
from kvmesh.config.variables import refuse_misspelt

__all__ = ["load_settings"]

S = TypeVar("S", bound=BaseModel)


def load_settings(
    cls: type[S],
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> S:
    """Read the settings of one service; a flag beats the environment, which beats the file, which beats the default.

    Args:
        cls: the settings class.
        file: a YAML file with the fields of ``cls``, or one of TensorRT-LLM's that concerns such a service.
        env: environment; variables are ``KVMESH_`` and the field in capitals, nested by a double underscore. None
            means that of this process.
        overrides: values of flags, by field name; nested mappings or dotted names. None is a flag that was not given.

    Raises:
        ConfigError: something is wrong; the message names every problem and where it was written.
    """
    flags = nested({key: value for key, value in (overrides or {}).items() if value is not None})
    environment = os.environ if env is None else env
    refuse_misspelt(environment)
    variables = env_layer(cls, environment)
    above_file = merged(variables, flags)
    from_file = file_layer(cls, read_yaml(file), above_file, str(file)) if file is not None else {}
    try:
        return cls.model_validate(merged(from_file, above_file))
    except ValidationError as error:
        layers = {"flags": flags, "the environment": variables, str(file): from_file}
        raise ConfigError(describe(error, layers)) from error
