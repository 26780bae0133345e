// Growing and shrinking the table.
#include "index_table.h"

namespace kvmesh::index {

void Table::extend(size_t end) {
  slots_.set_capacity(end);
  for (size_t slot = end_; slot < end; ++slot) slots_[slot] = {0, kNone};
  end_ = end;
}

void Table::resize(size_t count) {
  const size_t homes = homes_for(std::max(count, count_)), before = end_;
  if (homes >= homes_) {
    extend(std::max(end_, slots_for(homes)));
    homes_ = homes;
    spread(before);
    return;
  }
  Table smaller(*this, homes);
  for (size_t slot = 0; slot < end_; ++slot)
    if (slots_[slot].number != kNone) smaller.insert(slots_[slot].tag, slots_[slot].number);
  slots_.swap(smaller.slots_);
  homes_ = homes;
  end_ = smaller.end_;
}

// Moves every entry to where it belongs now, one run of neighbours after the other, the last first. No home is before
// the run that the entry was in, so what has been moved need not move again.
void Table::spread(size_t end) {
  size_t longest = 0, length = 0;
  for (size_t slot = 0; slot < end; ++slot) {
    length = slots_[slot].number == kNone ? 0 : length + 1;
    longest = std::max(longest, length);
  }
  moving_.resize(longest);
  count_ = 0;
  while (end > 0) {
    if (slots_[end - 1].number == kNone) {
      --end;
      continue;
    }
    size_t moving = 0;
    while (end > 0 && slots_[end - 1].number != kNone) {
      --end;
      moving_[moving++] = slots_[end];
      slots_[end].number = kNone;
    }
    while (moving > 0) {
      --moving;
      insert(moving_[moving].tag, moving_[moving].number);
    }
  }
  moving_ = {};
}

}  // namespace kvmesh::index
