// Parts of a snapshot, written.
#include "index_snapshot.h"

#include <algorithm>

#include "index_snapshot_format.h"

namespace kvmesh::index {

bool SnapshotWriter::next(std::string* part) {
  part->clear();
  switch (stage_) {
    case kTrees: write_trees(part); break;
    case kNodes: write_nodes(part); break;
    case kSource: write_source(part); break;
    case kHeld: write_held(part); break;
    case kParked: write_parked(part); break;
    case kEnd:
      part->push_back(kEndPart);
      put(part, num_nodes_);
      put(part, num_held_);
      stage_ = kDone;
      break;
    case kDone: return false;
  }
  return true;
}

void SnapshotWriter::write_trees(std::string* part) {
  const Nodes& nodes = core_.nodes;
  if (tree_at_ == 0) {
    node_numbers_.assign(nodes.end(), kNone);
    for (uint32_t node = 0; node < nodes.end(); ++node) {
      if (nodes.is_free(node)) continue;
      const uint32_t tree = nodes[node].tree();
      if (tree >= tree_numbers_.size()) tree_numbers_.resize(tree + 1, kNone);
      if (tree_numbers_[tree] != kNone) continue;
      tree_numbers_[tree] = static_cast<uint32_t>(trees_.size());
      trees_.push_back(tree);
    }
  }
  part->push_back(kTreesPart);
  for (; tree_at_ < trees_.size() && part->size() < kPartBytes; ++tree_at_) {
    const Tree& tree = nodes.tree(trees_[tree_at_]);
    put_text(part, nodes.scopes.key(tree.scope));
    put(part, tree.cut.block_size);
    put(part, tree.cut.lookahead);
  }
  if (tree_at_ == trees_.size()) stage_ = kNodes;
}

// The node after this one in a walk through its tree, parents before children.
uint32_t SnapshotWriter::following(uint32_t node) const {
  const Nodes& nodes = core_.nodes;
  if (nodes[node].first_child != kNone) return nodes[node].first_child;
  while (node != kNone && nodes[node].parent != kNone && nodes[node].next == kNone) node = nodes[node].parent;
  return nodes[node].parent == kNone ? kNone : nodes[node].next;
}

void SnapshotWriter::write_nodes(std::string* part) {
  const Nodes& nodes = core_.nodes;
  part->push_back(kNodesPart);
  while (part->size() < kPartBytes) {
    if (node_ == kNone) {
      while (scanned_ < nodes.end() && (nodes.is_free(scanned_) || nodes[scanned_].parent != kNone)) ++scanned_;
      if (scanned_ == nodes.end()) {
        stage_ = streams_.empty() ? kEnd : kSource;
        return;
      }
      node_ = scanned_++;
    }
    const Node& node = nodes[node_];
    put(part, tree_numbers_[node.tree()]);
    put(part, node.parent == kNone ? kNone : node_numbers_[node.parent]);
    put(part, node.key);
    node_numbers_[node_] = num_nodes_++;
    node_ = following(node_);
  }
}

void SnapshotWriter::write_source(std::string* part) {
  const Source& source = core_.source(streams_[source_]);
  part->push_back(kSourcePart);
  put(part, static_cast<uint32_t>(source_));
  const bool doubts = !source.doubtful.empty();
  part->push_back(static_cast<char>(source.zero_is_root | source.forgot << 1 | doubts << 2 | source.doubts_all << 3));
  put(part, static_cast<uint32_t>(source.ignored_groups.size()));
  for (const int64_t group : source.ignored_groups) put(part, group);
  if (doubts) {
    put(part, static_cast<uint32_t>(source.doubtful.size()));
    for (const uint64_t hash : source.doubtful) put(part, hash);
  }
  table_ = position_ = 0;
  stage_ = kHeld;
}

void SnapshotWriter::write_held(std::string* part) {
  const Source& source = core_.source(streams_[source_]);
  const Held& held = source.tables[table_];
  part->push_back(kHeldPart);
  put(part, static_cast<uint32_t>(source_));
  part->push_back(static_cast<char>(table_));
  for (; position_ < held.end() && part->size() < kPartBytes; ++position_) {
    const uint32_t at = static_cast<uint32_t>(position_);
    if (held.node(at) == kNone) continue;
    uint64_t hash = held.hash(at);
    if (table_ == Source::kPredicted) {
      const uint64_t due = hash >> 32;
      hash = due > now_ ? due - now_ : 0;
    }
    put(part, hash);
    put(part, node_numbers_[held.node(at)]);
    ++num_held_;
  }
  if (position_ < held.end()) return;
  position_ = 0;
  if (++table_ == Source::kTables) stage_ = kParked;
}

void SnapshotWriter::write_parked(std::string* part) {
  part->push_back(kParkedPart);
  put(part, static_cast<uint32_t>(source_));
  core_.source(streams_[source_]).parked.each([&](const ParkedRun& run) {
    put(part, run.parent);
    put_text(part, core_.nodes.scopes.key(run.scope));
    put(part, run.cut.block_size);
    put(part, run.cut.lookahead);
    part->push_back(static_cast<char>(run.tier));
    part->push_back(run.group.has_value());
    put(part, run.group.value_or(0));
    for (const std::vector<uint64_t>* numbers : {&run.hashes, &run.locals, &run.removed}) {
      put(part, static_cast<uint32_t>(numbers->size()));
      for (const uint64_t number : *numbers) put(part, number);
    }
  });
  stage_ = ++source_ == streams_.size() ? kEnd : kSource;
}

}  // namespace kvmesh::index
