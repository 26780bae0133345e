"""The native index when memory ends: nothing is lost that was there, and nothing is left of what did not get in."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from soaks import soak_only

import kvmesh.kernels

SOURCES = Path(kvmesh.kernels.__file__).parent / "csrc" / "ext"

TABLE = r"""
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

CHURN = r"""
#include <cstdio>
#include <vector>

#include "index_table.h"

using kvmesh::index::kNone;
using kvmesh::index::Table;

static uint64_t seed = 1;
static uint32_t drawn() {
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(seed >> 33);
}

static uint32_t spread_out(uint32_t number) { return number * 0x9E3779B1u; }
static uint32_t crowded(uint32_t number) { return number % 3 == 0 ? 0x80000000u : number * 0x9E3779B1u; }
static uint32_t at_the_end(uint32_t number) { return UINT32_MAX - number % 5 * 0x100000u; }

int main() {
  for (auto tag : {spread_out, crowded, at_the_end}) {
    size_t account = 0;
    Table table(&account);
    constexpr uint32_t kNumbers = 1500;
    std::vector<bool> there(kNumbers);
    uint32_t count = 0;
    // Up to nearly all of them and down again, several times.
    for (uint32_t step = 0; step < 40000; ++step) {
      const uint32_t number = drawn() % kNumbers;
      const bool growing = step / 5000 % 2 == 0;
      if (!there[number] && (growing || drawn() % 4 == 0)) {
        if (!table.has_room(1)) table.resize(table.grown_for(table.count() + 1));
        bool plain = false;
        if (step % 2 == 0) {
          Table::Filling filling(table);
          plain = filling.find(tag(number));
          if (plain) filling.put(tag(number), number);
        }
        if (!plain) table.insert(tag(number), number);
        there[number] = true;
        ++count;
      } else if (there[number] && (!growing || drawn() % 4 == 0)) {
        table.erase(tag(number), number);
        there[number] = false;
        --count;
        table.tidy();
      }
      if (step % 500 != 0) continue;
      if (table.count() != count) return 1;
      for (uint32_t other = 0; other < kNumbers; ++other) {
        const uint32_t found = table.find(tag(other), [&](uint32_t at) { return at == other; });
        if (found != (there[other] ? other : kNone)) return 2;
      }
    }
  }
  return 0;
}
"""

CORE = r"""
#include <cstdlib>
#include <new>

#include "index_core.h"

// Of the allocations of small arrays, the one that fails.
static long until_failure = -1;
extern "C" void* aligned_alloc(std::size_t alignment, std::size_t size) {
  if (until_failure >= 0 && until_failure-- == 0) return nullptr;
  void* memory = nullptr;
  return posix_memalign(&memory, alignment, size) == 0 ? memory : nullptr;
}

using namespace kvmesh::index;

int main() {
  int failures = 0;
  for (long nth = 0, failed = 1; failed; ++nth) {
    Core core(1 << 26);
    const uint32_t stream = core.admit(core.nodes.scopes.use("n"));
    const Held& held = core.source(stream).tables[kDevice];
    failed = 0;
    // Hashes with the last home crowd at the table's end, which has to be moved while an entry goes in.
    uint64_t hash = 0;
    until_failure = nth;
    try {
      for (uint64_t block = 1; block <= 200; ++block) {
        do ++hash;
        while (held.tag(hash) < 0xFF000000u);
        core.store(stream, {std::nullopt, 0, {16, 0}, kDevice, std::nullopt, &hash, &block, 1});
      }
    } catch (const std::bad_alloc&) {
      failed = 1;
    }
    until_failure = -1;
    failures += failed;
    core.clear(stream);
    while (core.reclaim(1000)) {
    }
    if (core.nodes.count() != 0) return 1;
  }
  return failures > 0 ? 0 : 2;
}
"""


def run(program: str, folder: Path, *sources: str) -> int:
    """Compiles a program with sources of the index, and returns its exit status."""
    text, binary = folder / "faults.cpp", folder / "faults"
    text.write_text(program)
    paths = [SOURCES / f"{name}.cpp" for name in sources]
    compiler = os.environ.get("CXX") or "g++"
    subprocess.run([compiler, "-std=c++17", "-O0", "-I", SOURCES, text, *paths, "-o", binary], check=True, timeout=300)
    return subprocess.run([binary], timeout=60).returncode


def test_a_table_that_cannot_grow_is_as_it_was(tmp_path: Path) -> None:
    """Entries that lay where they had been before their homes changed were never found again."""
    assert run(TABLE, tmp_path, "index_table") == 0


def test_entries_come_and_go(tmp_path: Path) -> None:
    """Each is found while it is there, and not afterwards, wherever it lies: also where many have one home."""
    assert run(CHURN, tmp_path, "index_table") == 0


@soak_only
def test_a_block_that_finds_no_place_is_held_by_nobody(tmp_path: Path) -> None:
    """It had its holder's bit, but was in no table: the bit was the next source's, which then held the block, too."""
    names = ("bounds", "core", "held", "holding", "membership", "nodes", "placing", "source", "states", "table")
    assert run(CORE, tmp_path, *(f"index_{name}" for name in names), "xxh3") == 0
