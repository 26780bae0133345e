// One level's table of kernels. Compiled once per level.
#include "kernels.h"
#include "attention.h"

#define KVM_TEXT2(x) #x
#define KVM_TEXT(x) KVM_TEXT2(x)

KVM_BEGIN

const LevelTable& table() {
  static constexpr LevelTable entries = {
      KVM_TEXT(KVM_LEVEL), rms_norm,           silu_and_mul,            gelu_tanh_and_mul, rope,
      store_kv,            kAttentionTileRows, attention_scratch_bytes, partial_floats,    attention_decode,
      attention_prefill,   attention_merge,    prepare_linear,          linear_q4_1,       linear_q8_0,
      stream_copy,      checksum,           copy_checksum,
  };
  return entries;
}

KVM_END
