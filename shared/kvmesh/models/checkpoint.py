"""The small files of a checkpoint, read alike from GGUF metadata and from a Hugging Face directory."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvmesh.models.errors import ModelError
from kvmesh.models.gguf_file import GgufFile

__all__ = ["int_set", "open_gguf", "read_json"]


@lru_cache(maxsize=4)
def open_gguf(path: Path) -> GgufFile:
    """The GGUF file at ``path``; configuration, tokenizer and weights of one process share one mapping."""
    return GgufFile(path)


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """The JSON object in ``path``; ``{}`` when it is absent and not ``required``.

    Raises:
        ModelError: the file is missing though required, or holds no JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        if not required:
            return {}
        raise ModelError(f"{path.parent} has no {path.name}, which a Hugging Face checkpoint needs.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"Cannot read {path}: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object.")
    return value


def int_set(value: int | list[int] | None) -> frozenset[int]:
    """``eos_token_id`` of Hugging Face files: absent, one id, or a list of ids."""
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list) else frozenset((value,))
