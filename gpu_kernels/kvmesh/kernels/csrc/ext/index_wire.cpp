// Events as they were read from a payload into the index, without records in between.
#include <cstring>

#include "index_object.h"

namespace kvmesh::index {
namespace {

template <size_t N>
bool is(const WireText& text, const char (&word)[N]) {
  return text.size == N - 1 && std::memcmp(text.data, word, N - 1) == 0;
}

std::optional<int64_t> value_of(const WireNumber& number) {
  if (!number.present) return std::nullopt;
  return number.value;
}

// The scope of an event that names what it does (of an adapter the name, where it has one), with one use more.
uint32_t use_scope(State& state, uint32_t stream, const WireEvent& event) {
  Scopes& scopes = state.core.nodes.scopes;
  const bool has_lora = event.lora_name.data != nullptr || event.lora_id.present;
  if (!has_lora && event.salt.data == nullptr) {
    const uint32_t scope = state.core.source(stream).scope;
    scopes.use(scope);
    return scope;
  }
  const Names& names = state.names[stream];
  state.scope_key = names.model + names.tenant;
  if (event.lora_name.data != nullptr) {
    append_text(event.lora_name.data, event.lora_name.size, &state.scope_key);
  } else if (event.lora_id.present) {
    append_number(event.lora_id.value, &state.scope_key);
  } else {
    state.scope_key += names.lora;
  }
  if (event.salt.data != nullptr) {
    append_text(event.salt.data, event.salt.size, &state.scope_key);
  } else {
    state.scope_key += names.salt;
  }
  return scopes.use(state.scope_key);
}

bool apply_stored(State& state, uint32_t stream, const WireBatch& batch, const WireEvent& event) {
  Core& core = state.core;
  const uint64_t* hashes = batch.hashes.data() + event.first_hash;
  if (!admitted({event.kind.data, event.kind.size}, state.names[stream].single_group)) {
    core.ignore(stream, value_of(event.group), event.num_hashes);
    return true;
  }
  if (event.num_tokens == 0) {
    core.move(stream, event.tier, hashes, event.num_hashes);
    return true;
  }
  if (event.block_size > INT32_MAX) {
    PyErr_Format(PyExc_ValueError, "a block has 1 to %d tokens", INT32_MAX);
    return false;
  }
  Run run{};
  if (event.has_parent) run.parent = event.parent;
  run.cut.block_size = static_cast<uint32_t>(event.block_size);
  run.tier = event.tier;
  run.group = value_of(event.group);
  run.hashes = hashes;
  run.count = event.num_hashes;
  hash_blocks(batch.tokens.data() + event.first_token, run.cut, run.count, &state.locals);
  run.locals = state.locals.data();
  run.scope = use_scope(state, stream, event);
  core.store(stream, run);
  core.nodes.scopes.drop(run.scope);
  return true;
}

void apply_removed(State& state, uint32_t stream, const WireBatch& batch, const WireEvent& event) {
  const std::optional<int64_t> group = value_of(event.group);
  if (group && state.core.ignores(stream, *group)) return;
  state.core.remove(stream, event.tier, batch.hashes.data() + event.first_hash, event.num_hashes);
}

}  // namespace

bool admitted(const WireText& kind, bool single_group) {
  if (kind.data == nullptr) return true;
  if (is(kind, "full_attention") || is(kind, "mla_attention") || is(kind, "sink_full_attention")) return true;
  return single_group && (is(kind, "sliding_window") || is(kind, "sliding_window_mla"));
}

bool apply_events(State& state, uint32_t stream, const WireBatch& batch) {
  for (const WireEvent& event : batch.events) {
    if (!event.stored) {
      apply_removed(state, stream, batch, event);
    } else if (!apply_stored(state, stream, batch, event)) {
      return false;
    }
  }
  return true;
}

}  // namespace kvmesh::index
