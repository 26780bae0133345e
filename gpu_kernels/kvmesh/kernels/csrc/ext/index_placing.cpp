// What sources store finds its place: in the trees, or parked until its parent comes.
#include <algorithm>

#include "index_chunk.h"
#include "index_core.h"

namespace kvmesh::index {
namespace {

constexpr uint64_t kRootZero = 0;  // some engines write 0 where others write nil: no parent

}  // namespace

void Core::store(uint32_t stream, const Run& run) {
  if (run.count == 0) return;
  Source& source = this->source(stream);
  if (run.tier != kDevice) set_bit(cold_, source.number, true);
  if (!place(source, run)) {
    enforce();  // it may be parked, which takes memory, too
    return;
  }
  if (source.parked.empty()) return;
  std::vector<Work> waiting;
  adopted(source, run.hashes, run.count, waiting);
  while (!waiting.empty()) {
    Work work = std::move(waiting.back());
    waiting.pop_back();
    ParkedRun& parked = work.run;
    if (work.removal) {
      if (!parked.group || !source.ignores(*parked.group))
        remove(stream, parked.tier, parked.removed.data(), parked.removed.size());
      continue;
    }
    const bool placed = place(source, {parked.parent, parked.scope, parked.cut, parked.tier, parked.group,
                                       parked.hashes.data(), parked.locals.data(), parked.hashes.size()});
    nodes.scopes.drop(parked.scope);
    if (!parked.removed.empty()) {
      ParkedRun removal = parked;
      waiting.push_back({std::move(removal), true});
    }
    if (placed) adopted(source, parked.hashes.data(), parked.hashes.size(), waiting);
  }
}

// Appends the runs that waited for these blocks, last first: to be popped in order.
void Core::adopted(Source& source, const uint64_t* hashes, size_t count, std::vector<Work>& waiting) {
  const size_t begin = waiting.size();
  for (size_t i = 0; i < count && !source.parked.empty(); ++i) {
    if (source.find(hashes[i]) == kNone) continue;
    for (ParkedRun& run : source.parked.adopt(hashes[i])) {
      parked_bytes_ -= run.bytes();
      bytes_ -= run.bytes();
      waiting.push_back({std::move(run), false});
    }
  }
  std::reverse(waiting.begin() + begin, waiting.end());
}

// Whether the blocks have found their place.
bool Core::place(Source& source, const Run& run) {
  Chunk chunk;
  chunk.take(source.tables[run.tier], run, 0);  // first: finding the parent is to wait for memory, too
  uint32_t parent = kNone;
  if (run.parent) {
    parent = source.find(*run.parent);
    if (parent == kNone && !starts_a_sequence(source, *run.parent)) {
      park(source, run);
      return false;
    }
  }
  if (parent == kNone) {
    const uint32_t tree = nodes.use_tree(run.scope, run.cut);
    hold_run(source, tree, parent, run, chunk);
    nodes.drop_tree(tree);
    return true;
  }
  const uint32_t tree = nodes[parent].tree();
  if (!(nodes.tree(tree).cut == run.cut)) {
    ++counters.block_size_changes;
    return false;
  }
  // To take its word for its parent's would promise one adapter's or salt's blocks to requests of another.
  if (!nodes.scopes.continues(run.scope, nodes.tree(tree).scope, source.scope)) {
    ++counters.scope_changes;
    return false;
  }
  nodes.use_tree(tree);
  hold_run(source, tree, parent, run, chunk);
  nodes.drop_tree(tree);
  return true;
}

// Whether an unknown parent stands for none: 0 does for some engines, which show it with their first block.
bool Core::starts_a_sequence(Source& source, uint64_t parent) {
  if (parent == kRootZero && source.num_held() == source.tables[Source::kPredicted].count()) source.zero_is_root = true;
  return parent == kRootZero && source.zero_is_root;
}

void Core::park(Source& source, const Run& run) {
  counters.orphans += run.count;
  if (source.parked.full()) drop_parked(source);
  ParkedRun parked{*run.parent, run.scope, run.cut, run.tier, run.group,
                   {run.hashes, run.hashes + run.count}, {run.locals, run.locals + run.count}, {}};
  nodes.scopes.use(run.scope);
  keep_parked(source, std::move(parked));
}

void Core::keep_parked(Source& source, ParkedRun&& run) {
  const size_t bytes = run.bytes();
  source.parked.park(std::move(run));
  parked_bytes_ += bytes;
  bytes_ += bytes;
}

void Core::drop_parked(Source& source) {
  for (const ParkedRun& run : source.parked.oldest()) {
    if (!source.retired) counters.dropped_orphans += run.hashes.size();
    source.forgot = true;
    parked_bytes_ -= run.bytes();
    bytes_ -= run.bytes();
    nodes.scopes.drop(run.scope);
  }
}

}  // namespace kvmesh::index
