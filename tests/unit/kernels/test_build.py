"""The native build: up to date, precise about what is missing, free of code that crosses levels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvmesh.kernels import build


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_second_build_does_nothing():
    first = build.build_cpu()
    times = [path.stat().st_mtime_ns for path in first]
    assert [path.stat().st_mtime_ns for path in build.build_cpu()] == times


def test_a_missing_compiler_is_named_with_its_package(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match=r"`no-such-compiler` is not on PATH.*`apt-get install g"):
        build.build_cpu()


def test_missing_python_headers_are_named_with_their_package(monkeypatch, tmp_path):
    monkeypatch.setattr(build.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(build.BuildError, match=r"Python.h is not in .*apt-get install python3-dev"):
        build.build_cpu()


def test_a_missing_nvcc_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("NVCC", raising=False)
    with pytest.raises(build.BuildError, match="nvcc is not on PATH"):
        build.build_cuda()


def test_compiler_errors_are_shown(monkeypatch, tmp_path):
    for name in ("cpu", "ext", "include", "core"):
        shutil.copytree(build.CSRC / name, tmp_path / "csrc" / name)
    (tmp_path / "csrc" / "cpu" / "pages.cpp").write_text("this is not C++\n")
    monkeypatch.setattr(build, "CSRC", tmp_path / "csrc")
    monkeypatch.setattr(build, "BUILD", tmp_path / "csrc" / "build")
    monkeypatch.setattr(build, "LEVEL_SOURCES", ())
    monkeypatch.setattr(build, "X86_LEVELS", {})
    with pytest.raises(build.BuildError, match="error"):
        build.build_cpu()


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed")
def test_levels_share_no_code():
    """A weak symbol of an AVX-512 object could replace the baseline's and crash CPUs without AVX-512."""
    build.build_cpu()
    objects = [path for path in (build.BUILD / "objects").iterdir() if path.name.startswith(("avx2-", "avx512-"))]
    assert objects or not build.X86_LEVELS
    for path in objects:
        symbols = subprocess.run(
            ["nm", "-C", "--defined-only", path], capture_output=True, text=True, check=True
        ).stdout
        for line in symbols.splitlines():
            kind, name = line.split(maxsplit=2)[1:]
            assert kind not in "WVu", f"{path.name} exports {name} weakly"
            assert kind != "T" or re.match(r"kvmesh::avx(2|512)::", name), f"{path.name} defines {name}"


def test_extension_and_build_need_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import kvmesh.kernels, kvmesh.kernels._native, kvmesh.kernels.build, kvmesh.kernels.library\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_unknown_level_is_refused():
    environment = os.environ | {"KVMESH_CPU_LEVEL": "avx1024"}
    result = subprocess.run(
        [sys.executable, "-c", "import kvmesh.kernels.ops"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=environment,
    )
    assert "this CPU has no level 'avx1024'" in result.stderr


@pytest.mark.slow
def test_the_wheel_carries_the_libraries(tmp_path):
    root = Path(__file__).parents[3]
    hatch = shutil.which("hatchling") or str(Path(sys.executable).with_name("hatchling"))
    subprocess.run(
        [hatch, "build", "-t", "wheel", "-d", str(tmp_path)], cwd=root, check=True, capture_output=True, timeout=150
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert "none-any" not in wheel.name
    listing = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", wheel], capture_output=True, text=True, check=True
    ).stdout
    assert "kvmesh/kernels/libkvmesh_cpu.so" in listing
    assert "kvmesh/kernels/_native." in listing
    assert "csrc/cpu/attention_decode.cpp" in listing
    assert "csrc/build" not in listing
