"""The numeric core: the generator against published vectors, fp4 through a small program."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest

from kvmesh.kernels import build, ops

# Random123's known answers for philox4x32-10: counter, key, result.
KNOWN = [
    (0, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (2**128 - 1, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        0x0370734413198A2E85A308D3243F6A88,
        0x299F31D0A4093822,
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_known_answers(counter, key, expected):
    assert ops.philox_uint32(key, counter, 1)[0].tolist() == expected


def test_philox_blocks_are_numbered_and_carry():
    start = 2**64 - 2
    together = ops.philox_uint32(5, start, 4, rounds=7)
    single = [ops.philox_uint32(5, start + i, 1, rounds=7)[0] for i in range(4)]
    assert np.array_equal(together, np.stack(single))
    with pytest.raises(ops.KernelError):
        ops.philox_uint32(5, 0, 1, rounds=0)


FP4 = """
#include <math.h>
#include <stdio.h>
#include "core/float_formats.h"
int main() {
  for (int code = 0; code < 16; ++code) {
    float value = kvmesh::e2m1_to_float(code);
    printf("%g ", value);
    if (kvmesh::float_to_e2m1(value) != code) return 1;
  }
  const float inputs[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f, 100.0f, 0.26f, 2.4f, -INFINITY};
  for (float input : inputs) printf("%g ", kvmesh::e2m1_to_float(kvmesh::float_to_e2m1(input)));
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_fp4_round_trip_and_ties(tmp_path):
    source, program = tmp_path / "fp4.cpp", tmp_path / "fp4"
    source.write_text(FP4)
    subprocess.run(["g++", "-std=c++17", f"-I{build.CSRC}", "-o", program, source], check=True)
    result = subprocess.run([program], capture_output=True, text=True, check=True)
    codes, rounded = [0, 0.5, 1, 1.5, 2, 3, 4, 6], [0, 1, 1, 2, 2, 4, 4, 6, 0.5, 2, -6]
    assert [float(x) for x in result.stdout.split()] == [*codes, *(-x for x in codes), *rounded]
