// One source's blocks in one tier.
#include "index_held.h"

namespace kvmesh::index {
namespace {

size_t more(size_t wanted, size_t now) { return wanted > now ? wanted - now : 0; }

}  // namespace

void Held::oldest(size_t count, std::vector<uint32_t>& positions) {
  while (begin_ < end_ && nodes_[begin_] == kNone) ++begin_;
  positions.clear();
  for (uint32_t at = begin_; at < end_ && positions.size() < count; ++at)
    if (nodes_[at] != kNone) positions.push_back(at);
}

void Held::rename(const std::vector<uint32_t>& moved) {
  for (uint32_t at = 0; at < end_; ++at)
    if (nodes_[at] != kNone) nodes_[at] = moved[nodes_[at]];
}

size_t Held::growth(size_t count) const {
  size_t bytes = 0;
  if (end_ + count > capacity() && !squeezing_will_do(count)) {
    const size_t wanted = grown(end_ + count, end_, sizeof(uint64_t));
    bytes += more(Array<uint64_t>::bytes_for(wanted), hashes_.bytes());
    bytes += more(Array<uint32_t>::bytes_for(wanted), nodes_.bytes());
  }
  if (!table_.has_room(count)) bytes += more(Table::bytes_for(table_.grown_for(table_.count() + count)), table_.bytes());
  return bytes;
}

void Held::reserve(size_t count) {
  if (end_ + count > capacity()) {
    if (squeezing_will_do(count)) {
      squeeze();
    } else {
      const size_t wanted = grown(end_ + count, end_, sizeof(uint64_t));
      if (wanted >= kNone) throw std::bad_alloc();
      hashes_.set_capacity(wanted);
      nodes_.set_capacity(wanted);
    }
  }
  if (!table_.has_room(count)) table_.resize(table_.grown_for(table_.count() + count));
}

void Held::squeeze() {
  uint32_t to = 0;
  for (uint32_t at = 0; at < end_; ++at) {
    if (nodes_[at] == kNone) continue;
    if (at != to) {
      table_.renumber(tag(hashes_[at]), at, to);
      hashes_[to] = hashes_[at];
      nodes_[to] = nodes_[at];
    }
    ++to;
  }
  begin_ = 0;
  end_ = to;
}

void Held::shrink() {
  squeeze();
  const size_t wanted = count() + count() / 8;
  hashes_.set_capacity(wanted);
  nodes_.set_capacity(wanted);
}

void Held::put_back(const std::vector<Entry>& entries) {
  if (end_ + entries.size() > capacity()) squeeze();
  for (const Entry& entry : entries) append(entry.hash, entry.node);
}

void Held::tidy() {
  if (count() < capacity() / 4 && nodes_.bytes() > 1024) {
    shrink();
  } else if (gaps() > 64 && gaps() > count()) {
    squeeze();
  }
  table_.tidy();
}

void Held::trim() {
  if (count() + count() / 4 < capacity()) shrink();
  table_.trim();
}

}  // namespace kvmesh::index
