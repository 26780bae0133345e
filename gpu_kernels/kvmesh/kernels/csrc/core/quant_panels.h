// How quantised weights are laid out for the kernels: GGUF blocks regrouped into panels of 16 rows.
//
// A GGUF block holds 32 weights of one row. A panel block holds the same 32 columns of 16 consecutive rows, so that
// vector lanes are rows and no product needs a horizontal sum. Size and values are those of GGUF, bit for bit.
//   Q4_1: weight = scale * q + minimum.  [4][16 rows][4 bytes]: byte b, nibble n of group g is column 8 g + 2 b + n;
//         then 16 scales and 16 minima in fp16.  320 bytes.
//   Q8_0: weight = scale * q.  [32 columns][16 rows] int8; then 16 scales in fp16.  544 bytes.
// Missing rows of the last panel are zero.
#pragma once

#include "float_formats.h"

KVM_BEGIN

enum QuantKind : int32_t { kQ4_1 = 0, kQ8_0 = 1 };

constexpr int kBlockColumns = 32, kPanelRows = 16;
constexpr int kQ4BlockBytes = 20, kQ8BlockBytes = 34;  // GGUF: fp16 d, fp16 m, 16 bytes; fp16 d, 32 bytes
constexpr int kQ4PanelBytes = kPanelRows * kQ4BlockBytes, kQ8PanelBytes = kPanelRows * kQ8BlockBytes;
constexpr int kQ4Scales = 256, kQ4Minima = 288, kQ8Scales = 512;

KVM_HD int64_t panel_bytes(int32_t kind) { return kind == kQ4_1 ? kQ4PanelBytes : kQ8PanelBytes; }

KVM_HD uint16_t read_u16(const uint8_t* p) { return uint16_t(p[0] | p[1] << 8); }

// Puts one GGUF block into row `row` of a panel block.
KVM_HD void pack_block(int32_t kind, uint8_t* panel, int row, const uint8_t* block) {
  if (kind == kQ4_1) {
    memcpy(panel + kQ4Scales + 2 * row, block, 2);
    memcpy(panel + kQ4Minima + 2 * row, block + 2, 2);
    const uint8_t* q = block + 4;  // column c < 16: low nibble of q[c]; column 16 + c: its high nibble
    for (int c = 0; c < kBlockColumns; c += 2) {
      uint8_t even = c < 16 ? q[c] & 15 : q[c - 16] >> 4;
      uint8_t odd = c < 16 ? q[c + 1] & 15 : q[c - 15] >> 4;
      panel[c / 8 * 64 + row * 4 + c % 8 / 2] = uint8_t(even | odd << 4);
    }
  } else {
    memcpy(panel + kQ8Scales + 2 * row, block, 2);
    for (int c = 0; c < kBlockColumns; ++c) panel[c * kPanelRows + row] = block[2 + c];
  }
}

// The float32 weight at (row, column) of a panel block.
KVM_HD float panel_weight(int32_t kind, const uint8_t* panel, int row, int column) {
  if (kind == kQ4_1) {
    uint8_t byte = panel[column / 8 * 64 + row * 4 + column % 8 / 2];
    float q = float(column % 2 ? byte >> 4 : byte & 15);
    return fp16_to_float(read_u16(panel + kQ4Scales + 2 * row)) * q +
           fp16_to_float(read_u16(panel + kQ4Minima + 2 * row));
  }
  return fp16_to_float(read_u16(panel + kQ8Scales + 2 * row)) * float(int8_t(panel[column * kPanelRows + row]));
}

KVM_END
