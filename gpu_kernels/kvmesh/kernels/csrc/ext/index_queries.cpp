// Questions to the index, and predictions of what will be held.
#include "index_object.h"

namespace kvmesh::index {
namespace {

// The scope with this key, or kNone; `failed` when an exception is set.
uint32_t find_scope(State& state, PyObject* model, PyObject* tenant, PyObject* lora, PyObject* salt, bool* failed) {
  state.scope_key.clear();
  *failed = !append_value(model, &state.scope_key) || !append_value(tenant, &state.scope_key) ||
            !append_value(lora, &state.scope_key) || !append_value(salt, &state.scope_key);
  return *failed ? kNone : state.core.nodes.scopes.find(state.scope_key);
}

struct Named {
  Ref instance_id, rank;
  Match match;
};

// One match: (instance_id, dp_rank, device, host, disk tokens).
PyObject* new_match(State& state, const Named& named) {
  const uint64_t* tokens = named.match.tokens;
  const Ref device(PyLong_FromUnsignedLongLong(tokens[kDevice]));
  const Ref host = tokens[kHost] == tokens[kDevice] ? Ref::borrowed(device.get())
                                                    : Ref(PyLong_FromUnsignedLongLong(tokens[kHost]));
  const Ref disk =
      tokens[kDisk] == tokens[kHost] ? Ref::borrowed(host.get()) : Ref(PyLong_FromUnsignedLongLong(tokens[kDisk]));
  if (!device || !host || !disk) return nullptr;
  PyObject* arguments[] = {named.instance_id.get(), named.rank.get(), device.get(), host.get(), disk.get()};
  return PyObject_Vectorcall(state.types.match.get(), arguments, 5, nullptr);
}

PyObject* new_matches(State& state, const std::vector<Match>& found) {
  // Making objects may run other Python code, which may use the index: from here on everything is this call's own.
  std::vector<Named> matches;
  matches.reserve(found.size());
  for (const Match& match : found) {
    const Names& names = state.names[state.core.source_numbered(match.number)->stream];
    matches.push_back({Ref::borrowed(names.instance_id.get()), Ref::borrowed(names.rank.get()), match});
  }
  Ref list(PyList_New(static_cast<Py_ssize_t>(matches.size())));
  for (size_t i = 0; list && i < matches.size(); ++i) {
    PyObject* match = new_match(state, matches[i]);
    if (match == nullptr) return nullptr;
    PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), match);
  }
  return list.release();
}

// Looks in every tree of the prompt's scopes; `keys_for` gives the prompt's prefix hashes for a tree, or null on
// failure.
template <typename KeysFor>
PyObject* match_scopes(State& state, PyObject* const* arguments, const KeysFor& keys_for) {
  PyObject *salts = arguments[4], *block_size = arguments[5];
  uint32_t only = 0;
  if (block_size != Py_None && !read_block_size(block_size, &only)) return nullptr;
  if (!PyTuple_Check(salts)) {
    PyErr_SetString(PyExc_TypeError, "salts must be a tuple");
    return nullptr;
  }
  state.search.begin();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(salts); ++i) {
    bool failed;
    const uint32_t scope =
        find_scope(state, arguments[1], arguments[2], arguments[3], PyTuple_GET_ITEM(salts, i), &failed);
    if (failed) return nullptr;
    if (scope == kNone) continue;
    for (const uint32_t tree : state.core.nodes.scopes.trees(scope)) {
      const Cut cut = state.core.nodes.tree(tree).cut;
      if (only != 0 && only != cut.block_size) continue;
      const std::vector<uint64_t>* keys = keys_for(tree, cut);
      if (keys == nullptr) return nullptr;
      state.search.look(tree, keys->data(), keys->size());
    }
  }
  return new_matches(state, state.search.finish());
}

PyObject* core_match(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (!count_arguments(count, 6, "match")) return nullptr;
  return guarded([&]() -> PyObject* {
    State& state = state_of(self);
    if (num_tokens(arguments[0]) < 0) return nullptr;
    return match_scopes(state, arguments, [&](uint32_t tree, Cut cut) -> const std::vector<uint64_t>* {
      // Most prompts that nobody holds show it with their first block.
      if (!read_locals(arguments[0], cut, 1, &state.keys)) return nullptr;
      if (state.keys.empty() || state.core.nodes.find(tree, state.keys[0]) == kNone) return &state.keys;
      if (!read_locals(arguments[0], cut, SIZE_MAX, &state.keys)) return nullptr;
      roll(&state.keys);
      return &state.keys;
    });
  });
}

PyObject* core_match_hashes(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (!count_arguments(count, 6, "match_hashes")) return nullptr;
  return guarded([&]() -> PyObject* {
    State& state = state_of(self);
    if (!read_hashes(arguments[0], &state.hashes)) return nullptr;
    state.keys.clear();
    return match_scopes(state, arguments,
                        [&](uint32_t, Cut cut) { return cut.lookahead == 0 ? &state.hashes : &state.keys; });
  });
}

PyObject* core_predict(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (!count_arguments(count, 8, "predict")) return nullptr;
  return guarded([&]() -> PyObject* {
    State& state = state_of(self);
    const uint32_t stream = read_stream(state, arguments[0]);
    if (stream == kNone) return nullptr;
    Cut cut;
    if (!read_block_size(arguments[6], &cut.block_size)) return nullptr;
    const unsigned long due = PyLong_AsUnsignedLong(arguments[7]);
    if (PyErr_Occurred()) return nullptr;
    if (!read_locals(arguments[1], cut, SIZE_MAX, &state.keys)) return nullptr;
    roll(&state.keys);
    bool failed;
    find_scope(state, arguments[2], arguments[3], arguments[4], arguments[5], &failed);
    if (failed) return nullptr;
    ++state.changes;
    const uint32_t scope = state.core.nodes.scopes.use(state.scope_key);
    try {
      state.core.predict(stream, scope, cut, state.keys.data(), state.keys.size(), static_cast<uint32_t>(due));
    } catch (const std::bad_alloc&) {
      state.core.clear(stream);
      throw;
    }
    state.core.nodes.scopes.drop(scope);
    Py_RETURN_NONE;
  });
}

PyObject* core_expire(PyObject* self, PyObject* argument) {
  const unsigned long now = PyLong_AsUnsignedLong(argument);
  if (PyErr_Occurred()) return nullptr;
  return guarded([&] {
    State& state = state_of(self);
    const size_t expired = state.core.expire(static_cast<uint32_t>(now));
    if (expired > 0) ++state.changes;
    return PyLong_FromSize_t(expired);
  });
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace

PyMethodDef query_methods[] = {
    {"match", fast(core_match), METH_FASTCALL,
     "match(tokens, model, tenant, lora, salts, block_size) -> list of matches\n\n"
     "Of each source that holds any leading blocks, how many tokens they have. The salts are tried in turn."},
    {"match_hashes", fast(core_match_hashes), METH_FASTCALL,
     "match_hashes(prefix_hashes, model, tenant, lora, salts, block_size) -> list of matches"},
    {"predict", fast(core_predict), METH_FASTCALL,
     "predict(stream, tokens, model, tenant, lora, salt, block_size, due)\n\nBlocks count as held until tick `due`."},
    {"expire", core_expire, METH_O, "expire(tick) -> int\n\nLet go of predicted blocks that are due; how many."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace kvmesh::index
