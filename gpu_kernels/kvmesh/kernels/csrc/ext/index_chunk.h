// A part of a run that a source stores, and what is looked for in the tables for its blocks. What will be read is
// fetched in loops so short that many fetches overlap.
#pragma once

#include "index_core.h"
#include "xxh3.h"

namespace kvmesh::index {

struct Core::Chunk {
  static constexpr size_t kBlocks = 256;  // for which there is room, or none is stored
  static constexpr uint64_t kSeed = 1337;  // of the rolling hash, as everybody's

  static constexpr size_t kAhead = 8;  // blocks from one whose slot has been fetched to one whose slot is needed

  const uint64_t* hashes;
  size_t count;
  uint32_t node_tags[kBlocks], held_tags[kBlocks];

  // The blocks of the run from `begin` on.
  void take(const Held& held, const Run& run, size_t begin) {
    hashes = run.hashes + begin;
    locals_ = run.locals + begin;
    count = std::min(kBlocks, run.count - begin);
    for (size_t i = 0; i < count; ++i) held.prefetch_slot(held_tags[i] = held.tag(hashes[i]));
  }

  // To be called once there is room.
  void begin(const Nodes& nodes, const Held& held, uint32_t tree, uint32_t parent) {
    keys_[0] = parent == kNone ? locals_[0] : rolled(nodes[parent].key, locals_[0]);
    num_keys_ = 1;
    num_tagged_ = 0;
    tag_up_to(nodes, tree, 0);
    held.prefetch_end(count);
    for (size_t i = 0; i < std::min(kAhead, count); ++i) held.prefetch_spill(held_tags[i]);
    // Nothing is below the parent, so they are new, unless keys have been chosen to come again.
    if (parent != kNone && nodes[parent].first_child == kNone) expect_new(nodes, tree, 0);
  }
  // The rolling hash. Each needs the one before it, which takes some time: they are made one by one while there is
  // something else to do.
  uint64_t key(size_t i) {
    for (; num_keys_ <= i; ++num_keys_) keys_[num_keys_] = rolled(keys_[num_keys_ - 1], locals_[num_keys_]);
    return keys_[i];
  }
  // Makes the tag of a block's node, and of those before it from the last one on that has one, and fetches their slots.
  void tag_up_to(const Nodes& nodes, uint32_t tree, size_t i) {
    for (const size_t end = std::min(i + 1, count); num_tagged_ < end; ++num_tagged_)
      nodes.prefetch_slot_tagged(node_tags[num_tagged_] = Nodes::tag(tree, key(num_tagged_)));
  }
  // Of one block.
  void tag(const Nodes& nodes, uint32_t tree, size_t i) {
    num_tagged_ = std::max(num_tagged_, i);
    tag_up_to(nodes, tree, i);
  }
  // Fetches what new blocks from `i` on will be written to first.
  void expect_new(const Nodes& nodes, uint32_t tree, size_t i) {
    tag_up_to(nodes, tree, i + 2 * kAhead);
    nodes.prefetch_end(count - i);
  }

 private:
  static uint64_t rolled(uint64_t parent, uint64_t local) { return xxh3_64_of_pair(parent, local, kSeed); }

  const uint64_t* locals_;
  size_t num_keys_, num_tagged_;
  uint64_t keys_[kBlocks];
};

}  // namespace kvmesh::index
