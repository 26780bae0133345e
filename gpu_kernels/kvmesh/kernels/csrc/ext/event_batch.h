// A batch of KV events as most engines write it, read from msgpack without a Python object in between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvmesh {

// A text of the payload; data is null for nil.
struct WireText {
  const char* data = nullptr;
  uint32_t size = 0;
};

// A number that may be nil.
struct WireNumber {
  bool present = false;
  int64_t value = 0;
};

// One event. `plain` is false for one that this reader does not know to the last byte: nothing but its extent counts.
struct WireEvent {
  const uint8_t* begin = nullptr;
  const uint8_t* end = nullptr;
  bool plain = false;
  bool map = false;
  bool stored = false;
  int tier = 0;  // for the reader's caller, who knows what media are called
  bool has_parent = false;
  uint64_t parent = 0;
  size_t first_hash = 0, num_hashes = 0;    // in WireBatch::hashes
  size_t first_token = 0, num_tokens = 0;   // in WireBatch::tokens
  int64_t block_size = 0;
  WireNumber lora_id, group;
  WireText lora_name, medium, salt, kind;
};

// One payload.
struct WireBatch {
  double ts = 0;
  WireNumber rank;
  std::vector<WireEvent> events;
  std::vector<uint64_t> hashes;
  std::vector<int32_t> tokens;
};

// False for a payload that is not an array of a time stamp, events and perhaps a rank.
bool read_event_batch(const uint8_t* begin, const uint8_t* end, WireBatch* batch);

}  // namespace kvmesh
