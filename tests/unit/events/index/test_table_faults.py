"""The native table when memory ends: nothing is lost that was in it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import kvmesh.kernels

SOURCES = Path(kvmesh.kernels.__file__).parent / "csrc" / "ext"

PROGRAM = r"""
#include <cstdio>
#include <cstdlib>
#include <new>

#include "index_table.h"

// Of the allocations with operator new, the one that fails.
static long until_failure = -1;
void* operator new(std::size_t size) {
  if (until_failure >= 0 && until_failure-- == 0) throw std::bad_alloc();
  void* memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

using kvmesh::index::Table;

static bool complete(const Table& table, uint32_t count, uint32_t (*tag)(uint32_t)) {
  for (uint32_t number = 0; number < count; ++number)
    if (table.find(tag(number), [&](uint32_t found) { return found == number; }) != number) return false;
  return table.count() == count;
}

static uint32_t spread_out(uint32_t number) { return number * 0x9E3779B1u; }
static uint32_t crowded(uint32_t) { return 0x80000000u; }
static uint32_t at_the_end(uint32_t number) { return UINT32_MAX - number % 3; }

int main() {
  int failures = 0;
  for (auto tag : {spread_out, crowded, at_the_end}) {
    const uint32_t count = 600;
    bool failed = true;
    for (long nth = 0; failed; ++nth) {
      size_t account = 0;
      Table table(&account);
      table.resize(count);
      for (uint32_t number = 0; number < count; ++number) table.insert(tag(number), number);
      failed = false;
      for (size_t size : {2 * count, 3 * count + 7, count}) {
        until_failure = nth;
        try {
          table.resize(size);
        } catch (const std::bad_alloc&) {
          failed = true;
        }
        until_failure = -1;
        if (!complete(table, count, tag)) return 1;
      }
      failures += failed;
      for (uint32_t number = count; number-- > 0;) {
        table.erase(tag(number), number);
        if (number % 100 == 0 && !complete(table, number, tag)) return 2;
      }
    }
  }
  return failures > 0 ? 0 : 3;
}
"""


def test_a_table_that_cannot_grow_is_as_it_was(tmp_path: Path) -> None:
    """Entries that lay where they had been before their homes changed were never found again."""
    program, source = tmp_path / "faults", tmp_path / "faults.cpp"
    source.write_text(PROGRAM)
    compiler = os.environ.get("CXX") or "g++"
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-I", SOURCES, source, SOURCES / "index_table.cpp", "-o", program],
        check=True,
        timeout=120,
    )
    assert subprocess.run([program], timeout=60).returncode == 0
