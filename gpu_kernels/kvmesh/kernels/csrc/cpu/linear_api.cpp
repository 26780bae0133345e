// The exported quantised linear algebra: packing, products, dequantised rows.
#include "../core/quant_panels.h"
#include "exports.h"
#include "level.h"
#include "thread_pool.h"

namespace kvmesh {
namespace {

// Weight bytes of one task: about two microseconds of streaming, far above the price of claiming it.
constexpr int64_t kTaskBytes = 24 << 10;
// Weight bytes x tokens below which one thread is faster than two.
constexpr int64_t kParallelBytes = 64 << 10;

bool valid(int32_t kind, int64_t rows, int64_t columns) {
  return (kind == kQ4_1 || kind == kQ8_0) && rows > 0 && columns > 0 && columns % kBlockColumns == 0;
}

void dequantize_row(float* out, const uint8_t* panels, int32_t kind, int64_t row, int64_t columns) {
  int64_t blocks = columns / kBlockColumns;
  const uint8_t* panel = panels + row / kPanelRows * blocks * panel_bytes(kind);
  for (int64_t b = 0; b < blocks; ++b, panel += panel_bytes(kind))
    for (int c = 0; c < kBlockColumns; ++c)
      out[b * kBlockColumns + c] = panel_weight(kind, panel, int(row % kPanelRows), c);
}

}  // namespace
}  // namespace kvmesh

using namespace kvmesh;

int64_t kvmesh_cpu_packed_bytes(int32_t kind, int64_t rows, int64_t columns) {
  if (!valid(kind, rows, columns)) return KVMESH_BAD_SHAPE;
  return (rows + kPanelRows - 1) / kPanelRows * (columns / kBlockColumns) * panel_bytes(kind);
}

int kvmesh_cpu_pack_weight(uint8_t* panels, const uint8_t* blocks, int32_t kind, int64_t rows,
                                      int64_t columns) {
  if (!valid(kind, rows, columns)) return KVMESH_BAD_SHAPE;
  int64_t per_row = columns / kBlockColumns, block_bytes = panel_bytes(kind) / kPanelRows;
  auto pack = [=](int64_t panel) {
    uint8_t* to = panels + panel * per_row * panel_bytes(kind);
    memset(to, 0, size_t(per_row * panel_bytes(kind)));
    for (int64_t row = panel * kPanelRows; row < rows && row < (panel + 1) * kPanelRows; ++row)
      for (int64_t b = 0; b < per_row; ++b)
        pack_block(kind, to + b * panel_bytes(kind), int(row % kPanelRows), blocks + (row * per_row + b) * block_bytes);
  };
  parallel_for((rows + kPanelRows - 1) / kPanelRows, pack);
  return KVMESH_OK;
}

int kvmesh_cpu_quantized_linear(float* out, int64_t out_stride, const float* x, int64_t x_stride,
                                           const uint8_t* panels, int32_t kind, int64_t tokens, int64_t rows,
                                           int64_t columns) {
  if (!valid(kind, rows, columns) || tokens < 0) return KVMESH_BAD_SHAPE;
  const LevelTable& kernels = level();
  int64_t blocks = columns / kBlockColumns;
  float* packed_x = static_cast<float*>(thread_scratch(kCallScratch, size_t(tokens * (columns + blocks)) * sizeof(float)));
  if (packed_x == nullptr && tokens > 0) return KVMESH_NO_MEMORY;
  float* block_sums = packed_x + tokens * columns;
  LinearArgs args{out, x, packed_x, block_sums, panels, out_stride, x_stride, tokens, rows, columns};
  kernels.prepare_linear(args, kind, packed_x, block_sums);
  auto multiply = kind == kQ4_1 ? kernels.linear_q4_1 : kernels.linear_q8_0;
  int64_t count = (rows + kPanelRows - 1) / kPanelRows, bytes = columns / kBlockColumns * panel_bytes(kind);
  if (count * bytes * tokens < kParallelBytes) {
    multiply(args, 0, count);
    return KVMESH_OK;
  }
  int64_t chunk = kTaskBytes / bytes < 1 ? 1 : kTaskBytes / bytes;
  auto task = [&](int64_t i) { multiply(args, i * chunk, (i + 1) * chunk < count ? (i + 1) * chunk : count); };
  parallel_for((count + chunk - 1) / chunk, task);
  return KVMESH_OK;
}

int kvmesh_cpu_dequantize_rows(float* out, int64_t out_stride, const uint8_t* panels, int32_t kind,
                                          const int64_t* row_ids, int64_t count, int64_t rows, int64_t columns) {
  if (!valid(kind, rows, columns)) return KVMESH_BAD_SHAPE;
  for (int64_t i = 0; i < count; ++i)
    if (row_ids != nullptr && (row_ids[i] < 0 || row_ids[i] >= rows)) return KVMESH_BAD_SHAPE;
  auto task = [=](int64_t i) {
    dequantize_row(out + i * out_stride, panels, kind, row_ids != nullptr ? row_ids[i] : i, columns);
  };
  parallel_for(count, task);
  return KVMESH_OK;
}
