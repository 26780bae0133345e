"""The small files of a checkpoint, read alike from GGUF metadata and from a Hugging Face directory."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvmesh.models.errors import ModelError
from kvmesh.models.gguf_file import GgufFile

__all__ = ["fingerprint", "int_set", "open_gguf", "read_json"]

_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16


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


def fingerprint(path: Path) -> str:
    """A digest of a checkpoint's content (hex), the same on every machine that has a copy of it.

    Covers every file's name and size, its ends, and samples between: milliseconds for any size, and no two models
    that were trained apart agree in it.

    Raises:
        ModelError: a file cannot be read.
    """
    files = [path] if path.is_file() else [path / "config.json", *sorted(path.glob("*.safetensors"))]
    digest = hashlib.sha256()
    try:
        for file in files:
            size = file.stat().st_size
            digest.update(f"{'' if file == path else file.name}\0{size}\0".encode())
            with file.open("rb") as data:
                for index in range(_SAMPLES):
                    data.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                    digest.update(data.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ModelError(f"Cannot read the model files at {path}: {error}.") from error
    return digest.hexdigest()
