"""What both readers of configurations share: typed access to settings, and which layers are local."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kvmesh.models.errors import ModelError

__all__ = ["Keys", "local_layers", "positive", "unsupported_rope"]

T = TypeVar("T")


class Keys:
    """Typed access to a checkpoint's settings, with an error that names the file and the key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self.where = where

    def get(self, key: str, kind: Callable[[Any], T], default: T | None = None) -> T:
        """The value of ``key``, or ``default`` where it is absent or null.

        Raises:
            ModelError: it is absent without a default, or ``kind`` cannot take it.
        """
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.where} lacks {key!r}.")
            return default
        try:
            return kind(value)
        except (TypeError, ValueError) as error:
            raise ModelError(f"{self.where} has an unusable {key!r}: {value!r}.") from error


def positive(value: Any) -> int:
    """``value`` as an integer above 0.

    Raises:
        ValueError: it is none.
    """
    number = int(value)
    if number < 1:
        raise ValueError(f"{number} is not positive")
    return number


def local_layers(num_layers: int, period: int) -> tuple[bool, ...]:
    """Which layers see a window only: all but every ``period``-th one, the first of which has index ``period - 1``."""
    return tuple((layer + 1) % period != 0 for layer in range(num_layers))


def unsupported_rope(kind: str) -> ModelError:
    """The error for a scaling of rotary frequencies that is not built."""
    return ModelError(f"Rotary scaling {kind!r} is not supported yet; supported: default, linear, llama3.")
