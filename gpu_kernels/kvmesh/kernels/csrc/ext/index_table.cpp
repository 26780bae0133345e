// Growing and shrinking the table.
#include "index_table.h"

#include <stdexcept>

namespace kvmesh::index {

void Table::missing() { throw std::logic_error("the index has lost an entry of a table"); }

// For an entry that goes in behind its home.
void Table::pass(Place free) {
  if (free.line + 1 == end_ && free.slot + 1 == kWidth) extend(end_ + kSpill);  // the last line is never full
  for (size_t at = free.line - free.passes; at < free.line; ++at) passed_[at] += passed_[at] != kManyPassed;
}

void Table::extend(size_t end) {
  passed_.set_capacity(end);
  lines_.set_capacity(end);
  if (end > end_) {
    std::memset(static_cast<void*>(lines_.data() + end_), 0xFF, (end - end_) * sizeof(Line));  // numbers kNone
    std::memset(passed_.data() + end_, 0, end - end_);
  }
  end_ = end;
}

void Table::resize(size_t count) {
  const size_t homes = homes_for(std::max(count, count_));
  // Where lines behind the homes are as many as homes, these are few.
  const auto doubles = [&] { return homes_ * 2 <= homes && homes % homes_ == 0 && end_ < homes_ * 2; };
  while (homes_ > 0 && doubles()) double_homes();
  if (homes != homes_) replace(homes);
}

void Table::replace(size_t homes) {
  Table other(lines_.account());
  other.extend(lines_for(homes));
  other.homes_ = homes;
  for (size_t at = 0; at < end_; ++at)
    for (uint32_t slot = 0, used = lines_[at].used(); slot < used; ++slot)
      other.insert(lines_[at].tags[slot], lines_[at].numbers[slot]);
  lines_.swap(other.lines_);
  passed_.swap(other.passed_);
  homes_ = homes;
  end_ = other.end_;
}

void Table::shrink(size_t count) {
  const size_t homes = homes_for(std::max(count, count_));
  if (homes >= homes_) return;
  try {
    replace(homes);
  } catch (const std::bad_alloc&) {
    // It is as well without.
  }
}

// Of lines that entries have passed, and the one where they end.
size_t Table::longest_run() const {
  size_t longest = 1, length = 1;
  for (size_t at = 0; at < end_; ++at) {
    length = passed_[at] != 0 ? length + 1 : 1;
    longest = std::max(longest, length);
  }
  return longest;
}

// The homes of line i are 2i and 2i + 1 then. The last lines go first, into lines that have been read.
void Table::double_homes() {
  // All that may fail comes before anything changes. With more homes, no more lines are needed behind them.
  const size_t longest = longest_run();
  std::vector<Line> moving(longest);
  std::vector<uint8_t> used(2 * longest);
  const size_t before = end_, homes = homes_ * 2, end = std::max(lines_for(homes), homes + (end_ - homes_) + 1);
  passed_.set_capacity(end);
  lines_.set_capacity(end);
  std::memset(passed_.data() + before, 0, end - before);
  std::memset(static_cast<void*>(lines_.data() + homes), 0xFF, (end - homes) * sizeof(Line));
  homes_ = homes;
  end_ = end;
  for (size_t behind = before, at; behind > 0; behind = at) {
    at = behind - 1;
    while (at > 0 && passed_[at - 1] != 0) --at;
    if (at + 1 < behind) {
      spread(at, behind, moving, used);
    } else if (2 * at < homes) {
      halve(at);
    }
  }
}

// A line that nothing has passed from or to: it has the entries of its home and no others.
void Table::halve(size_t at) {
  const Line line = lines_[at];
  Line &first = lines_[2 * at], &second = lines_[2 * at + 1];
  first = second = kEmpty;
  // Which half an entry goes to could not be guessed: it is written to both, and over by the next one in the wrong one.
  uint32_t seconds = 0;
  for (uint32_t slot = 0; slot < kWidth; ++slot) {
    const uint32_t tag = line.tags[slot], number = line.numbers[slot];
    first.put(slot - seconds, tag, number);
    second.put(seconds, tag, number);
    seconds += home(tag) & 1;
  }
  if (seconds > 0) first.numbers[kWidth - seconds] = kNone;
  if (seconds < kWidth) second.numbers[seconds] = kNone;
  passed_[2 * at] = passed_[2 * at + 1] = 0;
}

// Lines of which entries have passed all but the last.
void Table::spread(size_t begin, size_t end, std::vector<Line>& moving, std::vector<uint8_t>& used) {
  std::copy(lines_.data() + begin, lines_.data() + end, moving.begin());
  const size_t first = 2 * begin, cleared = std::min(2 * end, homes_) - first;
  std::memset(static_cast<void*>(lines_.data() + first), 0xFF, cleared * sizeof(Line));
  std::memset(passed_.data() + first, 0, cleared);
  std::fill_n(used.begin(), cleared, 0);
  for (size_t i = 0; i < end - begin; ++i) {
    const Line& line = moving[i];
    for (uint32_t slot = 0, count = line.used(); slot < count; ++slot) {
      const uint32_t tag = line.tags[slot], number = line.numbers[slot];
      const size_t wanted = home(tag) - first;
      // Counting what they get is quicker than looking at lines that have just been written.
      if (used[wanted] < kWidth) {
        lines_[first + wanted].put(used[wanted]++, tag, number);
        continue;
      }
      size_t at = wanted;
      while (at < cleared && used[at] == kWidth) ++at;
      --count_;
      if (at < cleared) {
        insert_at({first + at, used[at]++, static_cast<uint32_t>(at - wanted)}, tag, number);
      } else {
        insert(tag, number);
      }
    }
  }
}

}  // namespace kvmesh::index
