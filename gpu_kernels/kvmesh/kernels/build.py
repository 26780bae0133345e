"""Build the native libraries: `python -m kvmesh.kernels.build [--force] [--cuda]`.

`libkvmesh_cpu.so` and the extension `_native` are compiled by every install (hatch_build.py calls this module before
the package exists, so only the standard library is imported here). The CUDA library needs nvcc and is built by hand.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BuildError", "build_cpu", "build_cuda", "compile_cuda_object", "cuda_sources", "find_nvcc"]

PACKAGE = Path(__file__).resolve().parent
CSRC = PACKAGE / "csrc"
BUILD = CSRC / "build"

CPU_LIBRARY = PACKAGE / "libkvmesh_cpu.so"
CUDA_LIBRARY = PACKAGE / "libkvmesh_cuda.so"
EXTENSION = PACKAGE / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"

# Levels are chosen at run time (csrc/cpu/level.cpp); -march=native would tie the library to the building machine.
X86_LEVELS = {
    "baseline": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c", "-mbmi2"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c", "-mbmi2",
               "-mprefer-vector-width=512"),
}  # fmt: skip
COMMON_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno",
                "-fno-trapping-math", "-Wall", "-Wextra", "-Wno-psabi", "-pthread")  # fmt: skip
LEVEL_SOURCES = (
    "attention_decode.cpp",
    "attention_prefill.cpp",
    "checksum.cpp",
    "elementwise.cpp",
    "linear.cpp",
    "stream_copy.cpp",
    "table.cpp",
)
CUDA_ARCHITECTURES = ("80", "90", "100")

INSTALL_COMPILER = "apt-get install g++"
INSTALL_HEADERS = "apt-get install python3-dev"


class BuildError(RuntimeError):
    """The native build cannot proceed; the message says what to install or what the compiler reported."""


@dataclass(frozen=True)
class Unit:
    """One compiler run: a source, its flags and the object they give."""

    source: Path
    flags: tuple[str, ...]
    target: Path


def build_cpu(*, force: bool = False, tell: Callable[[str], object] | None = None) -> list[Path]:
    """Build the CPU library and the CPython extension in place, when their sources changed.

    Args:
        force: Compile again even when nothing changed.
        tell: Called with a line each time that another tenth is compiled.

    Returns:
        The two shared objects.

    Raises:
        BuildError: The compiler or Python.h is missing, or a compilation fails.
    """
    compiler = _find_compiler()
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").is_file():
        msg = f"Python.h is not in {include}: install Python's headers with `{INSTALL_HEADERS}`"
        raise BuildError(msg)
    salt = _tree_digest(compiler)
    library_units = list(_library_units(salt))
    extension_units = [_unit(source, (f"-I{include}",), "ext", salt) for source in sorted((CSRC / "ext").glob("*.cpp"))]
    with _build_lock():
        if force:
            shutil.rmtree(BUILD / "objects", ignore_errors=True)
        _compile(compiler, [*library_units, *extension_units], tell)
        _link(compiler, library_units, CPU_LIBRARY)
        _link(compiler, extension_units, EXTENSION)
        _prune([*library_units, *extension_units])
    return [CPU_LIBRARY, EXTENSION]


def build_cuda(*, force: bool = False) -> Path:
    """Build `libkvmesh_cuda.so` with nvcc.

    Args:
        force: Compile again even when nothing changed.

    Returns:
        The shared object.

    Raises:
        BuildError: nvcc is missing or a compilation fails.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        msg = "nvcc is not on PATH: install the CUDA toolkit, or leave out --cuda (the CPU library needs none)"
        raise BuildError(msg)
    digest = _tree_digest(nvcc)
    stamp = BUILD / "cuda.stamp"
    with _build_lock():
        if not force and CUDA_LIBRARY.is_file() and stamp.is_file() and stamp.read_text() == digest:
            return CUDA_LIBRARY
        partial = BUILD / "cuda.so.partial"
        _run([nvcc, *_nvcc_flags(), "-shared", "-o", str(partial), *map(str, cuda_sources())])
        partial.replace(CUDA_LIBRARY)
        stamp.write_text(digest)
    return CUDA_LIBRARY


def cuda_sources() -> list[Path]:
    """Return every CUDA source file."""
    return sorted((CSRC / "cuda").glob("*.cu"))


def compile_cuda_object(source: Path, target: Path, *, architecture: str = "90") -> None:
    """Compile one CUDA file to an object for one architecture, as a check that it compiles.

    Raises:
        BuildError: nvcc is missing or reports an error.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        msg = "nvcc is not on PATH"
        raise BuildError(msg)
    _run([nvcc, *_nvcc_flags((architecture,)), "-c", "-o", str(target), str(source)])


def find_nvcc() -> str | None:
    """Return the path of nvcc, or None where there is none."""
    return os.environ.get("NVCC") or shutil.which("nvcc")


def _nvcc_flags(architectures: Sequence[str] = CUDA_ARCHITECTURES) -> list[str]:
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures]
    return ["-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", "--expt-relaxed-constexpr", *codes]


def _find_compiler() -> str:
    wanted = os.environ.get("CXX") or "g++"
    found = shutil.which(wanted)
    if found is None:
        msg = f"no C++ compiler: `{wanted}` is not on PATH; install one with `{INSTALL_COMPILER}` or set CXX"
        raise BuildError(msg)
    return found


def _levels() -> dict[str, tuple[str, ...]]:
    return X86_LEVELS if platform.machine() in {"x86_64", "AMD64"} else {"baseline": ()}


def _library_units(salt: str) -> Iterator[Unit]:
    cpu = CSRC / "cpu"
    for level, flags in _levels().items():
        for name in LEVEL_SOURCES:
            yield _unit(cpu / name, (*flags, f"-DKVM_LEVEL={level}"), level, salt)
    for source in sorted(cpu.glob("*.cpp")):
        if source.name not in LEVEL_SOURCES:
            yield _unit(source, (), "common", salt)
    yield _unit(CSRC / "ext" / "xxh3.cpp", (), "common", salt)


def _unit(source: Path, flags: tuple[str, ...], group: str, salt: str) -> Unit:
    flags = (*COMMON_FLAGS, *flags)
    key = hashlib.sha256("\0".join([salt, group, *flags]).encode() + source.read_bytes()).hexdigest()[:16]
    return Unit(source, flags, BUILD / "objects" / f"{group}-{source.stem}-{key}.o")


def _tree_digest(compiler: str) -> str:
    """Return a digest of everything that goes into every object: the compiler and all the headers (or CUDA files)."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout  # noqa: S603
    digest = hashlib.sha256(version.encode())
    suffixes = {".h", ".cu", ".cuh"} if "nvcc" in Path(compiler).name else {".h"}
    for path in sorted(CSRC.rglob("*")):
        if path.suffix in suffixes and BUILD not in path.parents:
            digest.update(str(path.relative_to(CSRC)).encode() + path.read_bytes())
    return digest.hexdigest()


def _compile(compiler: str, units: Iterable[Unit], tell: Callable[[str], object] | None) -> None:
    missing = [unit for unit in units if not unit.target.is_file()]
    (BUILD / "objects").mkdir(parents=True, exist_ok=True)

    def compile_one(unit: Unit) -> None:
        partial = unit.target.with_suffix(".partial")
        _run([compiler, *unit.flags, "-c", "-o", str(partial), str(unit.source)])
        partial.replace(unit.target)

    with ThreadPoolExecutor(os.cpu_count()) as executor:
        for number, _ in enumerate(executor.map(compile_one, missing), 1):
            if tell is not None and number * 10 // len(missing) > (number - 1) * 10 // len(missing):
                tell(f"compiled {number} of {len(missing)} native files")


def _link(compiler: str, units: Sequence[Unit], library: Path) -> None:
    """Link, unless the library's stamp names exactly these objects. The replacement is atomic: users keep theirs."""
    stamp = BUILD / f"{library.name}.stamp"
    content = "\n".join(unit.target.name for unit in units)
    if library.is_file() and stamp.is_file() and stamp.read_text() == content:
        return
    partial = BUILD / f"{library.name}.partial"
    _run([compiler, "-shared", "-pthread", "-o", str(partial), *(str(unit.target) for unit in units)])
    partial.replace(library)
    stamp.write_text(content)


def _prune(units: Iterable[Unit]) -> None:
    wanted = {unit.target for unit in units}
    for path in (BUILD / "objects").iterdir():
        if path not in wanted:
            path.unlink()


@contextmanager
def _build_lock() -> Iterator[None]:
    """Let one process build at a time; a second one waits and then finds everything up to date."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if result.returncode != 0:
        msg = f"{' '.join(command)} failed with status {result.returncode}:\n{result.stderr}{result.stdout}"
        raise BuildError(msg)


def _tell(line: str) -> None:
    sys.stdout.write(f"  {line}\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the build from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvmesh.kernels.build", description="Build KVMesh's native code.")
    parser.add_argument("--force", action="store_true", help="compile again even when nothing changed")
    parser.add_argument("--cuda", action="store_true", help="also build the CUDA library with nvcc")
    parser.add_argument("--progress", action="store_true", help="say how far it is, and nothing else")
    options = parser.parse_args(argv)
    try:
        built = build_cpu(force=options.force, tell=_tell if options.progress else None)
        if options.cuda:
            built.append(build_cuda(force=options.force))
    except BuildError as error:
        sys.stderr.write(f"kvmesh: {error}\n")
        return 1
    if not options.progress:
        sys.stdout.writelines(f"{path}\n" for path in built)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
