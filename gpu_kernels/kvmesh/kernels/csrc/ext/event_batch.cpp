// What is read here must come out as the dialects of kvmesh.events read it; whatever could come out differently is left
// to them (`plain` is false): unknown keys with content, digests for tokens, images, other places, numbers that do not
// fit, events that are to be refused.
#include "event_batch.h"

#include <algorithm>
#include <cstring>

#include "index_distinct.h"

namespace kvmesh {
namespace {

constexpr int kMaxDepth = 32;
constexpr uint8_t kNil = 0xC0;

class Reader {
 public:
  Reader(const uint8_t* at, const uint8_t* end) : at_(at), end_(end) {}

  const uint8_t* at() const { return at_; }
  size_t left() const { return static_cast<size_t>(end_ - at_); }
  void rewind(const uint8_t* at) { at_ = at; }

  bool nil() {
    if (at_ == end_ || *at_ != kNil) return false;
    ++at_;
    return true;
  }

  bool array(uint32_t* count) { return header(0x90, 0xDC, count); }
  bool map(uint32_t* count) { return header(0x80, 0xDE, count); }

  // An integer that fits 64 bits with a sign.
  bool integer(int64_t* value) {
    uint64_t bits;
    bool negative;
    if (!number(&bits, &negative)) return false;
    *value = static_cast<int64_t>(bits);
    return negative || *value >= 0;
  }

  // A 64-bit number in two's complement, or the last 8 bytes of a digest.
  bool hash(uint64_t* value) {
    if (at_ == end_) return false;
    if (*at_ != 0xC4) {
      bool negative;
      return number(value, &negative);
    }
    if (left() < 2 || at_[1] < 8 || left() - 2 < at_[1]) return false;
    at_ += 2 + at_[1];
    *value = word(at_ - 8, 8);
    return true;
  }

  bool text(WireText* text) {
    if (at_ == end_) return false;
    size_t header = 1, size;
    if ((*at_ & 0xE0) == 0xA0) {
      size = *at_ & 0x1F;
    } else if (*at_ == 0xD9 && left() >= 2) {
      size = at_[1];
      header = 2;
    } else {
      return false;
    }
    if (left() - header < size) return false;
    *text = {reinterpret_cast<const char*>(at_ + header), static_cast<uint32_t>(size)};
    at_ += header + size;
    return true;
  }

  bool real(double* value) {
    int64_t whole;
    if (integer(&whole)) {
      *value = static_cast<double>(whole);
      return true;
    }
    if (left() < 9 || *at_ != 0xCB) return false;
    const uint64_t bits = word(at_ + 1, 8);
    std::memcpy(value, &bits, sizeof bits);
    at_ += 9;
    return true;
  }

  // Past one value of any kind.
  bool skip(int depth = 0) {
    if (at_ == end_ || depth > kMaxDepth) return false;
    const uint8_t first = *at_;
    uint32_t count;
    if ((first & 0xF0) == 0x90 || first == 0xDC || first == 0xDD) return array(&count) && skip_many(count, depth);
    if ((first & 0xF0) == 0x80 || first == 0xDE || first == 0xDF) return map(&count) && skip_many(2ull * count, depth);
    if (first <= 0x7F || first >= 0xE0 || first == kNil || first == 0xC2 || first == 0xC3) return advance(1);
    if ((first & 0xF0) == 0xA0 || (first & 0xF0) == 0xB0) return advance(1 + (first & 0x1F));
    switch (first) {
      case 0xC4: case 0xD9: return sized(1);
      case 0xC5: case 0xDA: return sized(2);
      case 0xC6: case 0xDB: return sized(4);
      case 0xCC: case 0xD0: return advance(2);
      case 0xCD: case 0xD1: return advance(3);
      case 0xCA: case 0xCE: case 0xD2: return advance(5);
      case 0xCB: case 0xCF: case 0xD3: return advance(9);
      default: return false;
    }
  }

  // The tokens of an array, appended; false if one is no integer of 32 bits.
  bool tokens(std::vector<int32_t>* out) {
    uint32_t count;
    if (!array(&count) || count > left()) return false;
    const size_t before = out->size();
    out->resize(before + count);
    int32_t* to = out->data() + before;
    for (uint32_t i = 0; i < count; ++i) {
      // The widths that token ids mostly have, without a branch between them: each wrong guess costs more than a token.
      const uint8_t first = left() >= 5 ? *at_ : 0;
      if (first == 0xCD || first == 0xCE || first == 0xD2) {
        const bool narrow = first == 0xCD;
        const uint32_t value = static_cast<uint32_t>(word(at_ + 1, 4)) >> (narrow ? 16 : 0);
        if (value > INT32_MAX && first == 0xCE) return false;
        *to++ = static_cast<int32_t>(value);
        at_ += narrow ? 3 : 5;
      } else {
        int64_t value;
        if (!integer(&value) || value != static_cast<int32_t>(value)) return false;
        *to++ = static_cast<int32_t>(value);
      }
    }
    return true;
  }

 private:
  static uint64_t word(const uint8_t* from, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; ++i) value = value << 8 | from[i];
    return value;
  }

  bool header(uint8_t fixed, uint8_t wide, uint32_t* count) {
    if (at_ == end_) return false;
    if ((*at_ & 0xF0) == fixed) {
      *count = *at_++ & 0x0F;
      return true;
    }
    const int bytes = *at_ == wide ? 2 : *at_ == wide + 1 ? 4 : 0;
    if (bytes == 0 || left() < 1u + bytes) return false;
    *count = static_cast<uint32_t>(word(at_ + 1, bytes));
    at_ += 1 + bytes;
    return true;
  }

  bool number(uint64_t* bits, bool* negative) {
    if (at_ == end_) return false;
    const uint8_t first = *at_;
    *negative = false;
    if (first <= 0x7F) {
      *bits = first;
      ++at_;
      return true;
    }
    if (first >= 0xE0) {
      *bits = static_cast<uint64_t>(static_cast<int64_t>(static_cast<int8_t>(first)));
      *negative = true;
      ++at_;
      return true;
    }
    if (first < 0xCC || first > 0xD3) return false;
    const int bytes = 1 << (first & 3);
    if (left() < 1u + bytes) return false;
    *bits = word(at_ + 1, bytes);
    if (first >= 0xD0) {
      const int unused = 64 - 8 * bytes;
      *bits = static_cast<uint64_t>(static_cast<int64_t>(*bits << unused) >> unused);
      *negative = static_cast<int64_t>(*bits) < 0;
    }
    at_ += 1 + bytes;
    return true;
  }

  bool advance(size_t bytes) {
    if (left() < bytes) return false;
    at_ += bytes;
    return true;
  }

  bool sized(int bytes) {
    if (left() < 1u + bytes) return false;
    const uint64_t size = word(at_ + 1, bytes);
    return advance(1 + bytes) && size <= left() && advance(size);
  }

  bool skip_many(uint64_t count, int depth) {
    for (uint64_t i = 0; i < count; ++i)
      if (!skip(depth + 1)) return false;
    return true;
  }

  const uint8_t* at_;
  const uint8_t* end_;
};

template <size_t N>
bool is(const WireText& text, const char (&word)[N]) {
  return text.size == N - 1 && std::memcmp(text.data, word, N - 1) == 0;
}

// Texts that no record holds are checked here: elsewhere they are decoded, and must be UTF-8.
bool is_ascii(const WireText& text) {
  return std::all_of(text.data, text.data + text.size, [](char c) { return static_cast<signed char>(c) >= 0; });
}

bool is_locality(const WireText& text) { return text.data != nullptr && (is(text, "LOCAL") || is(text, "REMOTE")); }

// What fields are read into, one after another.
class EventReader {
 public:
  EventReader(Reader* reader, WireBatch* batch, WireEvent* event, index::Distinct* distinct)
      : in_(*reader), batch_(*batch), event_(*event), distinct_(*distinct) {}

  bool read() {
    uint32_t count;
    if (in_.map(&count)) return read_map(count) && usable();
    return in_.array(&count) && read_array(count) && usable();
  }

 private:
  enum Field : uint32_t {
    kType = 1 << 0, kHashes = 1 << 1, kParent = 1 << 2, kTokens = 1 << 3, kBlockSize = 1 << 4, kLoraId = 1 << 5,
    kLoraName = 1 << 6, kMedium = 1 << 7, kExtraKeys = 1 << 8, kSalt = 1 << 9, kGroup = 1 << 10, kKind = 1 << 11,
    kLocality = 1 << 12, kNothing = 1 << 13, kUnknown = 0,
  };
  static constexpr uint32_t kNeeded = kType | kHashes | kTokens | kBlockSize;
  static constexpr uint32_t kOfRemoved = kType | kHashes | kMedium | kGroup | kLocality;

  static Field field_of(const WireText& key) {
    switch (key.size) {
      case 4: return is(key, "type") ? kType : kUnknown;
      case 6: return is(key, "medium") ? kMedium : kUnknown;
      case 7: return is(key, "lora_id") ? kLoraId : is(key, "mm_keys") ? kNothing : kUnknown;
      case 8: return is(key, "locality") ? kLocality : kUnknown;
      case 9: return is(key, "token_ids") ? kTokens : is(key, "lora_name") ? kLoraName
                   : is(key, "group_idx") ? kGroup : kUnknown;
      case 10: return is(key, "block_size") ? kBlockSize : is(key, "extra_keys") ? kExtraKeys
                    : is(key, "cache_salt") ? kSalt : kUnknown;
      case 12: return is(key, "block_hashes") ? kHashes : kUnknown;
      case 14: return is(key, "block_mm_infos") ? kNothing : kUnknown;
      case 17: return is(key, "parent_block_hash") ? kParent : kUnknown;
      case 18: return is(key, "kv_cache_spec_kind") ? kKind : kUnknown;
      case 19: return is(key, "lookahead_token_ids") ? kNothing : kUnknown;
      default: return kUnknown;
    }
  }

  bool read_map(uint32_t count) {
    event_.map = true;
    uint32_t seen = 0;
    for (uint32_t i = 0; i < count; ++i) {
      WireText key;
      if (!in_.text(&key)) return false;
      const Field field = field_of(key);
      if (field == kUnknown) {
        int64_t ignored;
        if (!is_ascii(key) || (!in_.nil() && !in_.integer(&ignored))) return false;
        continue;
      }
      if ((seen & field) != 0 && field != kNothing) return false;
      seen |= field;
      if (!read_field(field)) return false;
    }
    if ((seen & kType) == 0 || (seen & kHashes) == 0) return false;
    return event_.stored ? (seen & kNeeded) == kNeeded : (seen & ~kOfRemoved) == 0;
  }

  bool read_field(Field field) {
    switch (field) {
      case kType: return type();
      case kHashes: return hashes();
      case kParent: return parent();
      case kTokens: return tokens();
      case kBlockSize: return in_.integer(&event_.block_size);
      case kLoraId: return number(&event_.lora_id);
      case kLoraName: return text(&event_.lora_name);
      case kMedium: return text(&event_.medium);
      case kExtraKeys: return extra_keys();
      case kSalt: return text(&event_.salt);
      case kGroup: return number(&event_.group);
      case kKind: return text(&event_.kind);
      case kLocality: return locality();
      case kNothing: return in_.nil();
      case kUnknown: break;
    }
    return false;
  }

  // Trailing fields may be left out.
  bool read_array(uint32_t count) {
    if (count < 2 || !type() || !hashes()) return false;
    uint32_t read = 2;
    auto more = [&] { return read < count && ++read; };
    if (!event_.stored) return (!more() || text(&event_.medium)) && tail(count - read);
    if (count < 5 || !parent() || !tokens() || !in_.integer(&event_.block_size)) return false;
    read = 5;
    return (!more() || number(&event_.lora_id)) && (!more() || text(&event_.medium)) &&
           (!more() || text(&event_.lora_name)) && (!more() || extra_keys()) && tail(count - read);
  }

  // Group, kind and window, or these and the locality and the source's kind; or nothing but nil.
  bool tail(uint32_t count) {
    WireNumber window;
    WireText source_kind;
    if (count == 0) return true;
    if (count != 3 && count != 5) {
      for (uint32_t i = 0; i < count; ++i)
        if (!in_.nil()) return false;
      return count < 6;
    }
    if (!number(&event_.group) || !text(&event_.kind) || !is_ascii(event_.kind) || !number(&window)) return false;
    // A short tail goes by what is in it: without a group the window would be taken for one.
    if (is_locality(event_.kind) || (count == 3 && window.present && !event_.group.present)) return false;
    return count == 3 || (locality() && text(&source_kind) && is_ascii(source_kind));
  }

  bool type() {
    WireText name;
    if (!in_.text(&name)) return false;
    event_.stored = is(name, "BlockStored");
    return event_.stored || is(name, "BlockRemoved");
  }

  bool hashes() {
    uint32_t count;
    if (!in_.array(&count) || count > in_.left()) return false;
    event_.first_hash = batch_.hashes.size();
    event_.num_hashes = count;
    batch_.hashes.resize(event_.first_hash + count);
    for (uint32_t i = 0; i < count; ++i)
      if (!in_.hash(&batch_.hashes[event_.first_hash + i])) return false;
    return true;
  }

  bool parent() {
    event_.has_parent = !in_.nil();
    return !event_.has_parent || in_.hash(&event_.parent);
  }

  bool tokens() {
    event_.first_token = batch_.tokens.size();
    if (!in_.tokens(&batch_.tokens)) return false;
    event_.num_tokens = batch_.tokens.size() - event_.first_token;
    return true;
  }

  // Nothing for any block: lists of nil are as long as there are blocks, which is seen in the end.
  bool extra_keys() {
    if (in_.nil()) return true;
    if (!in_.array(&num_keys_)) return false;
    for (uint32_t i = 0; i < num_keys_; ++i)
      if (!in_.nil()) return false;
    return true;
  }

  bool locality() {
    WireText place;
    return text(&place) && (place.data == nullptr || is(place, "LOCAL"));
  }

  bool number(WireNumber* number) {
    number->present = !in_.nil();
    return !number->present || in_.integer(&number->value);
  }

  bool text(WireText* text) { return in_.nil() || in_.text(text); }

  bool usable() {
    if (!event_.stored) return true;
    const size_t blocks = event_.num_hashes;
    if (blocks == 0 || event_.block_size < 1 || (num_keys_ != 0 && num_keys_ != blocks)) return false;
    const size_t tokens = event_.num_tokens;
    if (tokens != 0 && (tokens % blocks != 0 || tokens / blocks != static_cast<size_t>(event_.block_size))) return false;
    const auto first = batch_.hashes.begin() + static_cast<std::ptrdiff_t>(event_.first_hash);
    const auto parent = event_.has_parent ? std::optional(event_.parent) : std::nullopt;
    return distinct_(parent, &*first, blocks);
  }

  Reader& in_;
  WireBatch& batch_;
  WireEvent& event_;
  index::Distinct& distinct_;
  uint32_t num_keys_ = 0;
};

}  // namespace

bool read_event_batch(const uint8_t* begin, const uint8_t* end, WireBatch* batch) {
  Reader in(begin, end);
  uint32_t fields, count;
  if (!in.array(&fields) || fields < 2 || fields > 3) return false;
  if (!in.real(&batch->ts) || !in.array(&count) || count > in.left()) return false;
  batch->events.reserve(count);
  index::Distinct distinct;
  for (uint32_t i = 0; i < count; ++i) {
    WireEvent event;
    event.begin = in.at();
    const size_t hashes = batch->hashes.size(), tokens = batch->tokens.size();
    event.plain = EventReader(&in, batch, &event, &distinct).read();
    if (!event.plain) {
      batch->hashes.resize(hashes);
      batch->tokens.resize(tokens);
      in.rewind(event.begin);
      if (!in.skip()) return false;
    }
    event.end = in.at();
    batch->events.push_back(event);
  }
  if (fields == 3) {
    batch->rank.present = !in.nil();
    if (batch->rank.present && (!in.integer(&batch->rank.value) || batch->rank.value < 0)) return false;
  }
  return in.left() == 0;
}

}  // namespace kvmesh
