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
    // All that may fail comes before anything changes. With as many homes or more, no more lines are needed behind them.
    const size_t longest = longest_run();
    std::vector<Line> moving(longest);
    std::vector<uint8_t> used(2 * longest);
    extend(std::max({end_, lines_for(homes), homes + (end_ - homes_) + 1}));
    homes_ = homes;
    spread(before, doubled, moving, used);
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

void Table::shrink(size_t count) {
  if (homes_for(std::max(count, count_)) >= homes_) return;
  try {
    resize(count);
  } catch (const std::bad_alloc&) {
    // It is as well without.
  }
}

// Of a line and the full ones before it.
size_t Table::longest_run() const {
  size_t longest = 1, length = 1;
  for (size_t at = 0; at < end_; ++at) {
    length = lines_[at].full() ? length + 1 : 1;
    longest = std::max(longest, length);
  }
  return longest;
}

// Moves every entry to where it belongs now: the last line first, and with each line the full ones before it, whose
// entries may have gone on into it. Their homes are not before these lines: what has been moved need not move again.
void Table::spread(size_t end, bool doubled, std::vector<Line>& moving_lines, std::vector<uint8_t>& used_slots) {
  count_ = 0;
  while (end > 0) {
    size_t moving = 0;
    do {
      --end;
      moving_lines[moving++] = lines_[end];
      std::memset(static_cast<void*>(lines_.data() + end), 0xFF, sizeof(Line));
    } while (end > 0 && lines_[end - 1].full());
    // Where there are twice as many homes, those of line i are 2i and 2i + 1, and empty: counting what they get is
    // quicker than looking at lines that have just been written.
    const size_t first = 2 * end, known = doubled ? 2 * moving : 0;
    std::fill_n(used_slots.begin(), known, 0);
    while (moving > 0) {
      const Line& line = moving_lines[--moving];
      for (uint32_t slot = 0; slot < kWidth && line.numbers[slot] != kNone; ++slot) {
        const uint32_t tag = line.tags[slot];
        size_t at = home(tag) - first;
        while (at < known && used_slots[at] == kWidth) ++at;
        if (at < known) {
          insert_at({first + at, used_slots[at]++}, tag, line.numbers[slot]);
        } else {
          insert(tag, line.numbers[slot]);
        }
      }
    }
  }
}

}  // namespace kvmesh::index
