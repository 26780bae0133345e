// The online softmax: a running maximum and sum that tiles of scores are folded into (base-2 exponentials).
#pragma once

#include <math.h>

#include "platform.h"

KVM_BEGIN

// Scores are pre-multiplied by log2(e), so every exponential is exp2. The initial maximum is finite so that a row
// whose first tiles are wholly masked never computes (-inf) - (-inf).
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kMaximumOfNothing = -1e30f;

struct SoftmaxState { float maximum, sum; };

// What both sides of a merge of two partial softmax results must be multiplied by, and the merged state.
struct SoftmaxMerge { SoftmaxState state; float left, right; };

KVM_HD SoftmaxMerge merge_softmax(SoftmaxState a, SoftmaxState b) {
  float maximum = a.maximum > b.maximum ? a.maximum : b.maximum;
  float left = exp2f(a.maximum - maximum), right = exp2f(b.maximum - maximum);
  return {{maximum, a.sum * left + b.sum * right}, left, right};
}

// Gemma's soft cap, on a score already multiplied by the attention scale; the result is in base-2 units.
KVM_HD float soft_cap_score(float score, float cap) { return cap * tanhf(score / cap) * kLog2E; }

// Whether the query at `query` may see the key at `key`: causal, and within `window` positions (0: unlimited).
KVM_HD bool attends(int32_t query, int32_t key, int32_t window) {
  return key <= query && (window <= 0 || key > query - window);
}

KVM_END
