// A line of the table: as many entries as a line of the processor's cache has room for, compared all at once.
#pragma once

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <cstdint>

#include "index_memory.h"

namespace kvmesh::index {

  // Entries without gaps, then numbers kNone.
  struct alignas(kLineBytes) TableLine {
  static constexpr uint32_t kWidth = 8;

    uint32_t tags[kWidth];
    uint32_t numbers[kWidth];

    bool full() const { return numbers[kWidth - 1] != kNone; }
    // The slots with this tag, as bits; those without an entry may be among them.
    uint32_t same(uint32_t tag) const { return equal(tags, tag); }
    // The slot of an entry, or kWidth and more.
    uint32_t find(uint32_t tag, uint32_t number) const {
      return static_cast<uint32_t>(__builtin_ctz((same(tag) & equal(numbers, number)) | 1u << kWidth));
    }
    // Whether a slot of either line has this tag, or, with as little chance as two tags are the same, had it.
    static bool have(const TableLine& one, const TableLine& other, uint32_t tag) {
#ifdef __SSE2__
      const __m128i wanted = _mm_set1_epi32(static_cast<int>(tag));
      const auto equal = [&](const uint32_t* four) {
        return _mm_cmpeq_epi32(wanted, _mm_load_si128(reinterpret_cast<const __m128i*>(four)));
      };
      const __m128i in_one = _mm_or_si128(equal(one.tags), equal(one.tags + 4));
      return _mm_movemask_epi8(_mm_or_si128(in_one, _mm_or_si128(equal(other.tags), equal(other.tags + 4)))) != 0;
#else
      return (one.same(tag) | other.same(tag)) != 0;
#endif
    }
    uint32_t used() const { return static_cast<uint32_t>(__builtin_ctz(equal(numbers, kNone) | 1u << kWidth)); }
    void put(uint32_t slot, uint32_t tag, uint32_t number) {
      tags[slot] = tag;
      numbers[slot] = number;
    }
    void remove(uint32_t slot) {
      const uint32_t last = used() - 1;
      put(slot, tags[last], numbers[last]);
      put(last, ~tags[last], kNone);
    }

   private:
    static uint32_t equal(const uint32_t* values, uint32_t value) {
#ifdef __SSE2__
      const __m128i wanted = _mm_set1_epi32(static_cast<int>(value));
      const auto* halves = reinterpret_cast<const __m128i*>(values);
      const __m128i low = _mm_cmpeq_epi32(wanted, _mm_load_si128(halves));
      const __m128i high = _mm_cmpeq_epi32(wanted, _mm_load_si128(halves + 1));
      const __m128i words = _mm_packs_epi32(low, high);
      return static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(words, _mm_setzero_si128())));
#else
      uint32_t bits = 0;
      for (uint32_t slot = 0; slot < kWidth; ++slot) bits |= static_cast<uint32_t>(values[slot] == value) << slot;
      return bits;
#endif
    }
  };

}  // namespace kvmesh::index
