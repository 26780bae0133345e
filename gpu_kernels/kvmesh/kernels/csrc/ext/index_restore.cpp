// Parts of a snapshot, read. Whatever the bytes say, the index stays sound; what contradicts itself is refused.
#include <algorithm>
#include <climits>

#include "index_snapshot.h"
#include "index_snapshot_format.h"

namespace kvmesh::index {

class Restorer::Reader {
 public:
  explicit Reader(const std::string& part) : at_(part.data()), end_(part.data() + part.size()) {}

  bool at_end() const { return at_ == end_; }
  template <typename Number>
  Number take() {
    Number number;
    std::memcpy(&number, bytes(sizeof number), sizeof number);
    return number;
  }
  std::string text() {
    const uint32_t size = take<uint32_t>();
    const char* begin = bytes(size);
    return std::string(begin, size);
  }
  std::vector<uint64_t> numbers() {
    const uint32_t count = take<uint32_t>();
    const char* begin = bytes(count * sizeof(uint64_t));
    std::vector<uint64_t> numbers(count);
    if (count > 0) std::memcpy(numbers.data(), begin, count * sizeof(uint64_t));
    return numbers;
  }
  // A number below `end`.
  uint32_t below(size_t end) {
    const uint32_t number = take<uint32_t>();
    if (number >= end) throw DamagedError();
    return number;
  }
  Cut cut() {
    const Cut cut{take<uint32_t>(), take<uint32_t>()};
    if (cut.block_size < 1 || cut.block_size > INT32_MAX || cut.lookahead > INT32_MAX) throw DamagedError();
    return cut;
  }

 private:
  const char* bytes(size_t size) {
    if (static_cast<size_t>(end_ - at_) < size) throw DamagedError();
    const char* begin = at_;
    at_ += size;
    return begin;
  }

  const char* at_;
  const char* end_;
};

Restorer::Restorer(Core& core, std::vector<uint32_t> streams, uint32_t now,
                   std::function<bool(const std::string&)> valid_scope)
    : core_(core), streams_(std::move(streams)), now_(now), valid_scope_(std::move(valid_scope)) {}

void Restorer::add(const std::string& part) {
  Reader reader(part);
  if (ended_ || reader.at_end()) throw DamagedError();
  switch (reader.take<char>()) {
    case kTreesPart: return read_trees(reader);
    case kNodesPart: return read_nodes(reader);
    case kSourcePart: return read_source(reader);
    case kHeldPart: return read_held(reader);
    case kParkedPart: return read_parked(reader);
    case kEndPart:
      if (reader.take<uint32_t>() != nodes_.size() || reader.take<uint64_t>() != num_held_ || !reader.at_end())
        throw DamagedError();
      ended_ = true;
      return;
    default: throw DamagedError();
  }
}

uint64_t Restorer::finish() {
  if (!ended_) throw DamagedError();
  // Nodes whose holders are not in the snapshot, because they were departing or there was no room.
  for (const uint32_t node : nodes_)
    if (node != kNone && !core_.nodes.is_free(node)) core_.nodes.prune(node);
  for (const uint32_t tree : trees_) core_.nodes.drop_tree(tree);
  trees_.clear();
  core_.enforce();
  return core_.counters.residencies;
}

// Whether there is memory for one node more; nothing is given up for it. Something is left for those that hold them.
bool Restorer::room_for_node() {
  if (core_.bytes_ + core_.nodes.growth(1) > core_.max_bytes_ / 8 * 5) return false;
  core_.nodes.reserve(1);
  return true;
}

bool Restorer::room_for_entry(Held& held) {
  if (core_.bytes_ + held.growth(1) > core_.max_bytes_) return false;
  held.reserve(1);
  return true;
}

uint32_t Restorer::use_scope(Reader& reader) {
  const std::string key = reader.text();
  if (!valid_scope_(key)) throw DamagedError();
  return core_.nodes.scopes.use(key);
}

void Restorer::read_trees(Reader& reader) {
  while (!reader.at_end()) {
    const uint32_t scope = use_scope(reader);
    const Cut cut = reader.cut();
    const uint32_t tree = core_.nodes.use_tree(scope, cut);
    core_.nodes.scopes.drop(scope);
    if (std::find(trees_.begin(), trees_.end(), tree) != trees_.end()) throw DamagedError();
    trees_.push_back(tree);
  }
}

void Restorer::read_nodes(Reader& reader) {
  while (!reader.at_end()) {
    const uint32_t tree = trees_[reader.below(trees_.size())], number = reader.take<uint32_t>();
    const uint64_t key = reader.take<uint64_t>();
    if (number != kNone && number >= nodes_.size()) throw DamagedError();
    const uint32_t parent = number == kNone ? kNone : nodes_[number];
    if (parent != kNone && core_.nodes[parent].tree() != tree) throw DamagedError();
    if (core_.nodes.find(tree, key) != kNone) throw DamagedError();
    const bool placed = (number == kNone || parent != kNone) && room_for_node();
    nodes_.push_back(placed ? core_.nodes.find_or_add(tree, key, parent) : kNone);
  }
}

void Restorer::read_source(Reader& reader) {
  Source& source = core_.source(streams_[reader.below(streams_.size())]);
  const uint8_t flags = reader.take<uint8_t>();
  source.zero_is_root = (flags & 1) != 0;
  source.forgot = (flags & 2) != 0;
  source.doubts_all = (flags & 8) != 0;
  for (const uint64_t group : reader.numbers()) source.ignored_groups.push_back(static_cast<int64_t>(group));
  if ((flags & 4) != 0)
    for (const uint64_t hash : reader.numbers()) source.doubt(hash);
  if (!reader.at_end()) throw DamagedError();
}

void Restorer::read_held(Reader& reader) {
  Source& source = core_.source(streams_[reader.below(streams_.size())]);
  const int table = reader.take<uint8_t>();
  if (table >= Source::kTables) throw DamagedError();
  const bool predicted = table == Source::kPredicted;
  if (!predicted && table != kDevice) Core::set_bit(core_.cold_, source.number, true);
  Held& held = source.tables[table];
  while (!reader.at_end()) {
    const uint64_t hash = reader.take<uint64_t>();
    const uint32_t node = nodes_[reader.below(nodes_.size())];
    ++num_held_;
    if (node == kNone || !room_for_entry(held)) {
      ++core_.counters.forgotten;
      source.forgot = true;
      continue;
    }
    const Status above = core_.status_above(node, source);
    if (!predicted) {
      if (held.find(hash) != kNone) throw DamagedError();
      Core::Step step;
      core_.hold(source, table, hash, node, above, &step);
      continue;
    }
    if ((core_.status(node, source) & held_in(kDevice)) != 0 || hash > UINT32_MAX - now_) throw DamagedError();
    core_.hold_predicted(source, node, now_ + static_cast<uint32_t>(hash));
  }
}

void Restorer::read_parked(Reader& reader) {
  Source& source = core_.source(streams_[reader.below(streams_.size())]);
  while (!reader.at_end()) {
    ParkedRun run{};
    run.parent = reader.take<uint64_t>();
    run.scope = use_scope(reader);
    run.cut = reader.cut();
    run.tier = reader.take<uint8_t>();
    const bool has_group = reader.take<uint8_t>() != 0;
    const int64_t group = reader.take<int64_t>();
    if (has_group) run.group = group;
    run.hashes = reader.numbers();
    run.locals = reader.numbers();
    run.removed = reader.numbers();
    if (run.tier >= kTiers || run.hashes.size() != run.locals.size() || source.parked.full()) throw DamagedError();
    core_.keep_parked(source, std::move(run));
  }
}

}  // namespace kvmesh::index
