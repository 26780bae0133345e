// Blocks that one step changes all alike, which is what most runs are made of.
#pragma once

#include "index_core.h"

namespace kvmesh::index {

// Those that a step has changed, and which are yet to be counted.
struct Core::Plain {
  States& states;
  Counters& counters;
  const Step& step;
  const int64_t residencies;  // that each block brings
  uint32_t uncounted = 0;
  uint64_t num_blocks = 0, sum = 0;

  ~Plain() { settle(); }
  void add(uint64_t hash) { add(1, mixed(hash)); }
  // Several, whose mixed hashes have this sum.
  void add(size_t count, uint64_t mixed_sum) {
    uncounted += static_cast<uint32_t>(count);
    num_blocks += count;
    sum += mixed_sum;
  }
  // Before the step, or a state's number of users, is looked at.
  void settle() {
    if (uncounted == 0) return;
    states.use(step.to, uncounted);
    states.drop(step.from, uncounted);
    counters.residencies += residencies * uncounted;
    uncounted = 0;
  }
};

}  // namespace kvmesh::index
