// Growing and shrinking the table.
#include "index_table.h"

namespace kvmesh::index {

void Table::extend(size_t end) {
  lines_.set_capacity(end);
  if (end > end_)
    std::memset(static_cast<void*>(lines_.data() + end_), 0xFF, (end - end_) * sizeof(Line));  // numbers kNone
  end_ = end;
}

void Table::resize(size_t count) {
  const size_t homes = homes_for(std::max(count, count_)), before = end_;
  if (homes >= homes_) {
    const bool doubled = homes == 2 * homes_;
    extend(std::max(end_, lines_for(homes)));
    homes_ = homes;
    spread(before, doubled);
    return;
  }
  Table smaller(*this, homes);
  for (size_t at = 0; at < end_; ++at)
    for (uint32_t slot = 0, used = lines_[at].used(); slot < used; ++slot)
      smaller.insert(lines_[at].tags[slot], lines_[at].numbers[slot]);
  lines_.swap(smaller.lines_);
  homes_ = homes;
  end_ = smaller.end_;
}

// Moves every entry to where it belongs now: the last line first, and with each line the full ones before it, whose
// entries may have gone on into it. Their homes are not before these lines: what has been moved need not move again.
void Table::spread(size_t end, bool doubled) {
  size_t longest = 1, length = 1;
  for (size_t at = 0; at < end; ++at) {
    length = lines_[at].full() ? length + 1 : 1;
    longest = std::max(longest, length);
  }
  moving_.resize(longest);
  used_.resize(2 * longest);
  count_ = 0;
  while (end > 0) {
    size_t moving = 0;
    do {
      --end;
      moving_[moving++] = lines_[end];
      std::memset(static_cast<void*>(lines_.data() + end), 0xFF, sizeof(Line));
    } while (end > 0 && lines_[end - 1].full());
    // Where there are twice as many homes, those of line i are 2i and 2i + 1, and empty: counting what they get is
    // quicker than looking at lines that have just been written.
    const size_t first = 2 * end, known = doubled ? 2 * moving : 0;
    std::fill_n(used_.begin(), known, 0);
    while (moving > 0) {
      const Line& line = moving_[--moving];
      for (uint32_t slot = 0; slot < kWidth && line.numbers[slot] != kNone; ++slot) {
        const uint32_t tag = line.tags[slot];
        size_t at = home(tag) - first;
        while (at < known && used_[at] == kWidth) ++at;
        if (at < known) {
          insert_at({first + at, used_[at]++}, tag, line.numbers[slot]);
        } else {
          insert(tag, line.numbers[slot]);
        }
      }
    }
  }
  moving_ = {};
  used_ = {};
}

}  // namespace kvmesh::index
