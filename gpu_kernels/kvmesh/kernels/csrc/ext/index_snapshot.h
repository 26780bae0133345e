// The index as bytes, a part at a time, and back.
//
// A part is one byte that names its kind and then items, little-endian. Trees and nodes are numbered in the order in
// which they are written, parents before children; sources by the caller.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "index_core.h"

namespace kvmesh::index {

class SnapshotWriter {
 public:
  // `streams` are written in this order; `now` is the tick from which the ends of predicted blocks are counted.
  SnapshotWriter(Core& core, std::vector<uint32_t> streams, uint32_t now)
      : core_(core), streams_(std::move(streams)), now_(now) {}

  // False after the last part. The index must not change in between.
  bool next(std::string* part);

 private:
  void write_trees(std::string* part);
  void write_nodes(std::string* part);
  void write_source(std::string* part);
  void write_held(std::string* part);
  void write_parked(std::string* part);
  uint32_t following(uint32_t node) const;

  Core& core_;
  std::vector<uint32_t> streams_;
  uint32_t now_;
  enum { kTrees, kNodes, kSource, kHeld, kParked, kEnd, kDone } stage_ = kTrees;
  std::vector<uint32_t> tree_numbers_, node_numbers_, trees_;
  uint32_t num_nodes_ = 0, scanned_ = 0, node_ = kNone;  // of the walk through the nodes
  size_t tree_at_ = 0, source_ = 0, table_ = 0, position_ = 0;
  uint64_t num_held_ = 0;
};

class DamagedError : public std::runtime_error {
 public:
  DamagedError() : std::runtime_error("the snapshot contradicts itself") {}
};

// Fills an empty index whose sources have been admitted.
class Restorer {
 public:
  // `streams`: of the sources, in the order in which they were written. `valid_scope`: whether a scope's key is one.
  Restorer(Core& core, std::vector<uint32_t> streams, uint32_t now, std::function<bool(const std::string&)> valid_scope);

  // Throws DamagedError.
  void add(const std::string& part);
  // Blocks held, over all sources and tiers. Throws DamagedError where the last part is missing.
  uint64_t finish();

 private:
  class Reader;
  void read_trees(Reader& reader);
  void read_nodes(Reader& reader);
  void read_source(Reader& reader);
  void read_held(Reader& reader);
  void read_parked(Reader& reader);
  uint32_t use_scope(Reader& reader);
  bool room_for_node();
  bool room_for_entry(Held& held);

  Core& core_;
  std::vector<uint32_t> streams_;
  uint32_t now_;
  std::function<bool(const std::string&)> valid_scope_;
  std::vector<uint32_t> trees_, nodes_;  // by number in the snapshot; kNone: there was no room for it
  uint64_t num_held_ = 0;
  bool ended_ = false;
};

}  // namespace kvmesh::index
