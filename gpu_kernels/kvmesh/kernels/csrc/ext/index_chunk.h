// A part of a run that a source stores, and what is looked for in the tables for its blocks. What will be read is
// fetched in loops so short that many fetches overlap.
#pragma once

#include "index_core.h"
#include "xxh3.h"

namespace kvmesh::index {

struct Core::Chunk {
  static constexpr size_t kBlocks = 256;  // for which there is room, or none is stored
  static constexpr uint64_t kSeed = 1337;  // of the rolling hash, as everybody's

  const uint64_t* hashes;
  const uint64_t* locals;
  size_t count;
  uint64_t keys[kBlocks];
  uint32_t node_tags[kBlocks], held_tags[kBlocks];

  // The blocks of the run from `begin` on.
  void take(const Held& held, const Run& run, size_t begin) {
    hashes = run.hashes + begin;
    locals = run.locals + begin;
    count = std::min(kBlocks, run.count - begin);
    for (size_t i = 0; i < count; ++i) held.prefetch_slot(held_tags[i] = held.tag(hashes[i]));
  }

  // The rolling hashes, once there is room, and for how many blocks node tags have been made: all where nothing is below
  // the parent, so that they are new, unless keys have been chosen to come again; else that of the first.
  size_t find_keys(const Nodes& nodes, const Held& held, uint32_t tree, uint32_t parent) {
    keys[0] = parent == kNone ? locals[0] : rolled(nodes[parent].key, locals[0]);
    nodes.prefetch_slot_tagged(node_tags[0] = Nodes::tag(tree, keys[0]));
    held.prefetch_end(count);
    const bool are_new = parent != kNone && nodes[parent].first_child == kNone;
    if (are_new) nodes.prefetch_end(count);
    // Each needs the one before it, and takes some time: there is something else to do meanwhile.
    for (size_t i = 1; i < count; ++i) {
      keys[i] = rolled(keys[i - 1], locals[i]);
      held.prefetch_spill(held_tags[i]);
      if (are_new) nodes.prefetch_slot_tagged(node_tags[i] = Nodes::tag(tree, keys[i]));
    }
    return are_new ? count : 1;
  }
  // The slots that new blocks go to, from `begin` on.
  void fetch_slots(const Nodes& nodes, uint32_t tree, size_t begin) {
    for (size_t i = begin; i < count; ++i) nodes.prefetch_slot_tagged(node_tags[i] = Nodes::tag(tree, keys[i]));
    nodes.prefetch_end(count - begin);
  }

 private:
  static uint64_t rolled(uint64_t parent, uint64_t local) { return xxh3_64_of_pair(parent, local, kSeed); }
};

}  // namespace kvmesh::index
