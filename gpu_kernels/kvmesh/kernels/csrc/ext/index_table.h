// The open-addressing table that finds nodes by prefix hash and blocks by the engine's hash.
//
// An entry is a number and 32 bits of its key's hash, its tag. Eight of them make a line, of the size of a cache line,
// whose tags are compared all at once: most look-ups read one line here and the key itself once. A number's home is the
// line that its tag names, scaled to the number of homes, so these need not be powers of two, and homes keep their order
// when the table grows: it doubles in its place, from the end on. An entry that finds its home full goes into the first
// line behind it that is not, without wrapping around, in some lines more than homes. Each line counts the entries that
// have passed it so; a look-up goes on where there are any. So deletion moves nothing and leaves no tombstones.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "index_line.h"
#include "index_memory.h"

namespace kvmesh::index {

// Prompts are chosen by clients, and XXH3 has no key: without a secret they could choose prefixes that share a home.
inline const uint64_t kSecretMultiplier = [] {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32 | device()) | 1;
}();
inline uint64_t secret_multiplier() { return kSecretMultiplier; }

inline uint32_t tag_of(uint64_t key, uint64_t secret) {
  return static_cast<uint32_t>((key ^ key >> 32) * secret >> 32);
}
inline uint32_t tag_of(uint64_t key) { return tag_of(key, secret_multiplier()); }

class Table {
  using Line = TableLine;
  static constexpr uint32_t kWidth = Line::kWidth;
  static constexpr size_t kSpill = 8;
  static constexpr uint8_t kManyPassed = 128;

 public:
  explicit Table(size_t* account) : lines_(account), passed_(account) {}

  size_t count() const { return count_; }
  size_t bytes() const { return lines_.bytes() + passed_.bytes(); }
  bool has_room(size_t more) const { return count_ + more <= limit(homes_); }
  static size_t bytes_for(size_t count) {
    const size_t lines = lines_for(homes_for(count));
    return Array<Line>::bytes_for(lines) + Array<uint8_t>::bytes_for(lines);
  }

  // How many entries to make room for when `needed` do not fit.
  size_t grown_for(size_t needed) const {
    size_t homes = homes_ == 0 ? homes_for(needed) : homes_;
    while (limit(homes) < needed) homes *= 2;
    return limit(homes);
  }

  void prefetch(uint32_t tag) const { fetch(lines_.data() + home(tag)); }

  // Once the home is there: the line behind it, where the home is full, so that entries may go on, or have gone on.
  void prefetch_spill(uint32_t tag) const {
    const Line* line = lines_.data() + home(tag);
    fetch(line + line->full());  // without a branch: it would often be guessed wrongly
  }

  // A number in its home with this tag, whose key may be another; kNone where there is none.
  uint32_t peek(uint32_t tag) const {
    if (homes_ == 0) return kNone;
    const Line& line = lines_[home(tag)];
    const uint32_t same = line.same(tag);
    return same == 0 ? kNone : line.numbers[__builtin_ctz(same)];
  }

  // Where an entry is, or may be inserted, and how many lines before it its home is.
  struct Place {
    size_t line;
    uint32_t slot;
    uint32_t passes;
  };

  // The number with this tag for which `equal` holds, or kNone.
  template <typename Equal>
  uint32_t find(uint32_t tag, const Equal& equal) const {
    return homes_ == 0 ? kNone : search(tag, equal);
  }
  // The same where there is room for more; `free` is where the entry can be inserted if it is not there.
  template <typename Equal>
  uint32_t find(uint32_t tag, const Equal& equal, Place* free) const {
    const uint32_t number = search(tag, equal);
    if (number == kNone) *free = place_for(tag);
    return number;
  }
  // Where an entry whose key is not there can be inserted.
  Place place_for(uint32_t tag) const {
    const size_t first = home(tag);
    size_t at = first;
    while (lines_[at].full()) ++at;
    return {at, lines_[at].used(), static_cast<uint32_t>(at - first)};
  }

  // There must be room. Throws bad_alloc only where entries crowd at the very end; then nothing has changed.
  void insert(uint32_t tag, uint32_t number) { insert_at(place_for(tag), tag, number); }
  void insert_at(Place free, uint32_t tag, uint32_t number) {
    if (__builtin_expect(free.passes > 0, false)) pass(free);
    lines_[free.line].put(free.slot, tag, number);
    ++count_;
  }

  // Inserts entries one after the other, for which there must be room, while it is plain that they are not there. It
  // keeps what it changes to itself, so that the compiler need not fear others; until it is gone, the table is its own.
  class Filling {
   public:
    explicit Filling(Table& table)
        : table_(table), lines_(table.lines_.data()), passed_(table.passed_.data()), homes_(table.homes_) {}
    Filling(const Filling&) = delete;
    Filling& operator=(const Filling&) = delete;
    ~Filling() { table_.count_ += count_; }

    // As Table::prefetch_spill.
    void prefetch_spill(uint32_t tag) const {
      const Line* line = lines_ + (static_cast<uint64_t>(tag) * homes_ >> 32);
      fetch(line + line->full());
    }
    // Finds the place of the next entry: in its home or, where that is full, in the next line. False where it is not
    // plain that it is not there and can go there. There is no branch on the way: it would often be guessed wrongly.
    bool find(uint32_t tag) {
      const size_t home = static_cast<uint64_t>(tag) * homes_ >> 32;
      const Line* const first = lines_ + home;
      passes_ = first->full();
      passed_home_ = passed_ + home;
      line_ = lines_ + home + passes_;
      slot_ = line_->used();
      return (Line::have(*first, *line_, tag) | passed_home_[passes_] | (slot_ & kWidth) |
              (*passed_home_ & kManyPassed)) == 0;
    }
    // Inserts it there.
    void put(uint32_t tag, uint32_t number) {
      line_->put(slot_, tag, number);
      *passed_home_ = static_cast<uint8_t>(*passed_home_ + passes_);
      ++count_;
    }

   private:
    Table& table_;
    Line* lines_;
    uint8_t* passed_;
    uint64_t homes_;
    size_t count_ = 0;
    Line* line_ = nullptr;
    uint8_t* passed_home_ = nullptr;
    size_t slot_ = 0, passes_ = 0;
  };

  // The entry must be there.
  void renumber(uint32_t tag, uint32_t number, uint32_t now) {
    const Place place = place_of(tag, number);
    lines_[place.line].numbers[place.slot] = now;
  }

  // The entry must be there.
  void erase(uint32_t tag, uint32_t number) {
    const Place place = place_of(tag, number);
    for (size_t at = place.line - place.passes; at < place.line; ++at) passed_[at] -= passed_[at] != kManyPassed;
    lines_[place.line].remove(place.slot);
    --count_;
  }

  // Erases entries, which must be there, one after the other; as Filling.
  class Emptying {
   public:
    explicit Emptying(Table& table) : table_(table), lines_(table.lines_.data()), homes_(table.homes_) {}
    Emptying(const Emptying&) = delete;
    Emptying& operator=(const Emptying&) = delete;
    ~Emptying() { table_.count_ -= count_; }

    void erase(uint32_t tag, uint32_t number) {
      Line& line = lines_[static_cast<uint64_t>(tag) * homes_ >> 32];
      const uint32_t slot = line.find(tag, number);
      if (__builtin_expect(slot < kWidth, true)) {
        line.remove(slot);
        ++count_;
      } else {
        table_.erase(tag, number);
      }
    }

   private:
    Table& table_;
    Line* lines_;
    uint64_t homes_;
    size_t count_ = 0;
  };

  // Gives every number another one.
  template <typename Rename>
  void rename(const Rename& renamed) {
    for (size_t at = 0; at < end_; ++at)
      for (uint32_t& number : lines_[at].numbers)
        if (number != kNone) number = renamed(number);
  }

  // Makes room for `count` entries and no more; not fewer than there are. On bad_alloc nothing has changed.
  void resize(size_t count);
  // As resize, where that makes it smaller and there is memory for both.
  void shrink(size_t count);
  // Gives memory back where most of it is not in use.
  void tidy() {
    if (count_ < limit(homes_) / 4 && bytes() > kPageBytes) shrink(count_ + count_ / 8);
  }
  // Gives back all but an eighth of what is not in use, where little is: a table that has just doubled stays as it is.
  void trim() {
    if (count_ < limit(homes_) / 8 * 3) shrink(count_ + count_ / 8);
  }

 private:
  static constexpr Line kEmpty = {{kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone},
                                  {kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone}};

  // Three quarters of the homes' slots are used at most.
  static constexpr size_t kUsed = kWidth * 3 / 4;
  static size_t homes_for(size_t count) { return (count + kUsed - 1) / kUsed; }
  static size_t limit(size_t homes) { return homes * kUsed; }
  static size_t lines_for(size_t homes) { return homes == 0 ? 0 : homes + std::min(homes, kSpill) + 1; }
  size_t home(uint32_t tag) const { return static_cast<uint64_t>(tag) * homes_ >> 32; }
  template <typename Equal>
  uint32_t search(uint32_t tag, const Equal& equal) const {
    for (size_t at = home(tag);; ++at) {
      const Line& line = lines_[at];
      for (uint32_t same = line.same(tag); same != 0; same &= same - 1) {
        const uint32_t number = line.numbers[__builtin_ctz(same)];
        if (number != kNone && equal(number)) return number;
      }
      if (__builtin_expect(passed_[at] == 0, true)) return kNone;
    }
  }
  Place place_of(uint32_t tag, uint32_t number) const {
    const size_t first = home(tag);
    for (size_t at = first;; ++at) {
      for (uint32_t same = lines_[at].same(tag); same != 0; same &= same - 1) {
        const auto slot = static_cast<uint32_t>(__builtin_ctz(same));
        if (lines_[at].numbers[slot] == number) return {at, slot, static_cast<uint32_t>(at - first)};
      }
      if (passed_[at] == 0) missing();
    }
  }
  [[noreturn]] static void missing();
  void pass(Place free);
  void extend(size_t end);
  void replace(size_t homes);
  void double_homes();
  void halve(size_t at);
  void spread(size_t begin, size_t end, std::vector<Line>& moving, std::vector<uint8_t>& used);
  size_t longest_run() const;

  Array<Line> lines_;
  // Of each line, how many entries lie behind it whose homes do not; kManyPassed stays until the table has another size.
  // They are apart from the lines, so that the processor's nearer caches have them all.
  Array<uint8_t> passed_;
  size_t homes_ = 0;
  size_t end_ = 0;  // lines in use, of which the last is not full
  size_t count_ = 0;
};

}  // namespace kvmesh::index
