// Philox4x32: the counter-based generator (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3").
#pragma once

#include "platform.h"

KVM_BEGIN

struct Philox4 { uint32_t x[4]; };

// The block of four words for (key, counter): no state, so any thread may compute any block. Ten rounds is standard.
KVM_HD Philox4 philox4x32(uint64_t key, uint64_t counter_low, uint64_t counter_high, int rounds) {
  uint32_t c0 = uint32_t(counter_low), c1 = uint32_t(counter_low >> 32);
  uint32_t c2 = uint32_t(counter_high), c3 = uint32_t(counter_high >> 32);
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < rounds; ++round) {
    uint64_t p0 = uint64_t(0xD2511F53u) * c0;
    uint64_t p1 = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c1 = uint32_t(p1);
    c3 = uint32_t(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// A float in [0, 1) with 24 random bits, the most that float32 holds evenly.
KVM_HD float philox_unit_float(uint32_t word) { return float(word >> 8) * (1.0f / 16777216.0f); }

KVM_END
