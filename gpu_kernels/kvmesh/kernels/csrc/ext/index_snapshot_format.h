// The kinds of parts of a snapshot, and how numbers are written.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

namespace kvmesh::index {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "snapshots are little-endian");

constexpr char kTreesPart = 'T', kNodesPart = 'N', kSourcePart = 'S', kHeldPart = 'H', kParkedPart = 'P', kEndPart = 'E';
constexpr size_t kPartBytes = 256 * 1024;  // a part ends with the item that reaches this

template <typename Number>
void put(std::string* part, Number number) {
  part->append(reinterpret_cast<const char*>(&number), sizeof number);
}

inline void put_text(std::string* part, const std::string& text) {
  put(part, static_cast<uint32_t>(text.size()));
  part->append(text);
}

}  // namespace kvmesh::index
