"""How the CPU kernels run: threads, instruction-set level; and the counter-based random generator."""

from __future__ import annotations

import ctypes
import os
from typing import Final

import numpy as np
import numpy.typing as npt

from kvmesh.kernels.library import KernelError, check, load_cpu

__all__ = ["cpu_level", "get_num_threads", "philox_uint32", "set_cpu_level", "set_num_threads"]

_MASK64: Final = (1 << 64) - 1

_cpu = load_cpu()
_philox = _cpu.kernel("philox")
_set_num_threads = _cpu.function("set_num_threads", None, ctypes.c_int)
_num_threads = _cpu.function("num_threads", ctypes.c_int)
_set_cpu_level = _cpu.function("set_level", ctypes.c_int, ctypes.c_char_p)
_cpu_level = _cpu.function("level", ctypes.c_char_p)


def set_num_threads(count: int) -> None:
    """Set how many threads, the caller included, one operation may use. Starts at 1; threads start when first needed.

    Idle threads sleep. An operation called while another thread is inside one runs on its caller alone.
    """
    _set_num_threads(max(1, count))


def get_num_threads() -> int:
    """Return what `set_num_threads` set last."""
    count: int = _num_threads()
    return count


def cpu_level() -> str:
    """Return the instruction-set level in use: `avx512`, `avx2` or `baseline`."""
    name: str = _cpu_level().decode()
    return name


def set_cpu_level(name: str) -> None:
    """Use another instruction-set level than the best one. Not while an operation runs.

    The environment variable KVMESH_CPU_LEVEL does the same when this module is imported.

    Raises:
        KernelError: This CPU lacks the level, or there is none of that name.
    """
    if _set_cpu_level(name.encode()) != 0:
        msg = f"this CPU has no level {name!r}; it is one of baseline, avx2, avx512"
        raise KernelError(msg)


def philox_uint32(key: int, counter: int, blocks: int, *, rounds: int = 10) -> npt.NDArray[np.uint32]:
    """Return Philox4x32 blocks `counter`, `counter + 1`, ...: random words that depend on (key, counter) alone.

    Args:
        key: 64-bit key (a seed).
        counter: 128-bit number of the first block.
        blocks: How many blocks of four words.
        rounds: 10 is the standard strength.

    Returns:
        uint32 `[blocks, 4]`.

    Raises:
        KernelError: `rounds` is below 1.
    """
    words = np.empty((blocks, 4), dtype=np.uint32)
    low, high = counter & _MASK64, counter >> 64 & _MASK64
    check(_philox(words.ctypes.data, key & _MASK64, low, high, blocks, rounds), "philox_uint32")
    return words


if _wanted_level := os.environ.get("KVMESH_CPU_LEVEL"):
    set_cpu_level(_wanted_level)
