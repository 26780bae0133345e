// PrefixCore: sources, records, sizes and dumps of the prefix index.
//
// Every method runs under the GIL, from beginning to end: the index has no lock of its own, and a call takes microseconds,
// or a bounded part of longer work. What takes longer in the end is growing a table of many millions, once in a while.
#include "index_object.h"

#include <algorithm>

namespace kvmesh::index {

uint32_t read_stream(State& state, PyObject* argument) {
  const unsigned long stream = PyLong_AsUnsignedLong(argument);
  if (PyErr_Occurred()) return kNone;
  if (stream < kNone && state.core.known(static_cast<uint32_t>(stream))) return static_cast<uint32_t>(stream);
  PyErr_Format(PyExc_KeyError, "no source has the number %lu", stream);
  return kNone;
}

bool count_arguments(Py_ssize_t given, Py_ssize_t expected, const char* name) {
  if (given == expected) return true;
  PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, expected, given);
  return false;
}

namespace {

PyObject* core_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  Py_ssize_t max_bytes;
  PyObject *match, *stored, *removed, *cleared, *identities;
  if (!PyArg_ParseTuple(arguments, "nOOOOO", &max_bytes, &match, &stored, &removed, &cleared, &identities))
    return nullptr;
  if (max_bytes < 1) {
    PyErr_SetString(PyExc_ValueError, "the memory bound must be positive");
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  PyObject* made = guarded([&]() -> PyObject* {
    Types types{Ref::borrowed(match), Ref::borrowed(stored), Ref::borrowed(removed), Ref::borrowed(cleared),
                Ref::borrowed(identities)};
    reinterpret_cast<PrefixCore*>(self)->state = new State(static_cast<size_t>(max_bytes), std::move(types));
    return self;
  });
  if (made == nullptr) Py_DECREF(self);
  return made;
}

void core_free(PyObject* self) {
  delete reinterpret_cast<PrefixCore*>(self)->state;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* core_admit(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (!count_arguments(count, 7, "admit")) return nullptr;
  return guarded([&]() -> PyObject* {
    State& state = state_of(self);
    Names names;
    names.instance_id = Ref::borrowed(arguments[0]);
    names.rank = Ref::borrowed(arguments[1]);
    if (!append_value(arguments[2], &names.model) || !append_value(arguments[3], &names.tenant) ||
        !append_value(arguments[4], &names.lora) || !append_value(arguments[5], &names.salt))
      return nullptr;
    const int single_group = PyObject_IsTrue(arguments[6]);
    if (single_group < 0) return nullptr;
    names.single_group = single_group != 0;
    names.life = ++state.lives;
    ++state.changes;
    state.names.reserve(state.core.num_streams() + 1);
    const uint32_t scope = state.core.nodes.scopes.use(names.model + names.tenant + names.lora + names.salt);
    const uint32_t stream = state.core.admit(scope);
    state.core.nodes.scopes.drop(scope);
    if (stream >= state.names.size()) state.names.resize(stream + 1);
    state.names[stream] = std::move(names);
    return PyLong_FromUnsignedLong(stream);
  });
}

PyObject* core_remove(PyObject* self, PyObject* argument) {
  return guarded([&]() -> PyObject* {
    State& state = state_of(self);
    const uint32_t stream = read_stream(state, argument);
    if (stream == kNone) return nullptr;
    ++state.changes;
    state.core.remove(stream);
    state.names[stream] = Names{};
    Py_RETURN_NONE;
  });
}

PyObject* core_clear(PyObject* self, PyObject* argument) {
  return guarded([&]() -> PyObject* {
    State& state = state_of(self);
    const uint32_t stream = read_stream(state, argument);
    if (stream == kNone) return nullptr;
    ++state.changes;
    state.core.clear(stream);
    Py_RETURN_NONE;
  });
}

PyObject* core_set_hidden(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (!count_arguments(count, 2, "set_hidden")) return nullptr;
  return guarded([&]() -> PyObject* {
    State& state = state_of(self);
    const uint32_t stream = read_stream(state, arguments[0]);
    const int hidden = stream == kNone ? -1 : PyObject_IsTrue(arguments[1]);
    if (hidden < 0) return nullptr;
    state.core.set_hidden(stream, hidden != 0);
    Py_RETURN_NONE;
  });
}

PyObject* core_apply(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (!count_arguments(count, 2, "apply")) return nullptr;
  return guarded([&]() -> PyObject* {
    State& state = state_of(self);
    const uint32_t stream = read_stream(state, arguments[0]);
    ++state.changes;
    return stream == kNone ? nullptr : apply_records(state, stream, arguments[1]);
  });
}

PyObject* core_replace(PyObject* self, PyObject*) {
  state_of(self).replaced = true;
  Py_RETURN_NONE;
}

PyObject* core_reclaim(PyObject* self, PyObject* argument) {
  const size_t limit = PyLong_AsSize_t(argument);
  if (PyErr_Occurred()) return nullptr;
  return guarded([&] {
    State& state = state_of(self);
    ++state.changes;
    return PyBool_FromLong(state.core.reclaim(limit));
  });
}

PyObject* core_reclaimable(PyObject* self, PyObject*) { return PyBool_FromLong(state_of(self).core.reclaimable()); }

PyObject* core_num_held(PyObject* self, PyObject* argument) {
  State& state = state_of(self);
  const uint32_t stream = read_stream(state, argument);
  return stream == kNone ? nullptr : PyLong_FromSize_t(state.core.source(stream).num_held());
}

PyObject* core_memory_bytes(PyObject* self, PyObject*) {
  return PyLong_FromSize_t(state_of(self).core.memory_bytes());
}

PyObject* core_statistics(PyObject* self, PyObject*) {
  State& state = state_of(self);
  const Counters& c = state.core.counters;
  const std::pair<const char*, uint64_t> values[] = {
      {"scopes", state.core.nodes.scopes.num_with_trees()},
      {"blocks", state.core.nodes.count()},
      {"residencies", c.residencies},
      {"predicted_blocks", c.predicted},
      {"parked_runs", state.core.num_parked()},
      {"stored_blocks_total", c.stored},
      {"removed_blocks_total", c.removed},
      {"duplicate_blocks_total", c.duplicates},
      {"unknown_removals_total", c.unknown_removals},
      {"unknown_moves_total", c.unknown_moves},
      {"orphan_blocks_total", c.orphans},
      {"dropped_orphan_blocks_total", c.dropped_orphans},
      {"block_size_changes_total", c.block_size_changes},
      {"scope_changes_total", c.scope_changes},
      {"ignored_group_blocks_total", c.ignored_group_blocks},
      {"forgotten_blocks_total", c.forgotten},
      {"expired_blocks_total", c.expired},
      {"matches_total", c.matches},
      {"matched_tokens_total", c.matched_tokens},
  };
  Ref dict(PyDict_New());
  for (const auto& [name, value] : values) {
    const Ref number(PyLong_FromUnsignedLongLong(value));
    if (!dict || !number || PyDict_SetItemString(dict.get(), name, number.get()) != 0) return nullptr;
  }
  return dict.release();
}

// (position to go on at, [(scope, block_size, prefix_hash, parent_hash | None)]); the end is reached when it is empty.
PyObject* core_dump(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (!count_arguments(count, 4, "dump")) return nullptr;
  return guarded([&]() -> PyObject* {
    State& state = state_of(self);
    const uint32_t stream = read_stream(state, arguments[0]);
    if (stream == kNone) return nullptr;
    const size_t table = PyLong_AsSize_t(arguments[1]);
    size_t at = PyErr_Occurred() ? 0 : PyLong_AsSize_t(arguments[2]);
    const size_t limit = PyErr_Occurred() ? 0 : PyLong_AsSize_t(arguments[3]);
    if (PyErr_Occurred()) return nullptr;
    if (table >= Source::kTables) {
      PyErr_Format(PyExc_ValueError, "there is no table %zu", table);
      return nullptr;
    }
    struct Row {
      std::string scope;
      uint32_t block_size;
      uint64_t key, parent;
      bool has_parent;
    };
    std::vector<Row> rows;
    const Held& held = state.core.source(stream).tables[table];
    const Nodes& nodes = state.core.nodes;
    for (; at < held.end() && rows.size() < limit; ++at) {
      if (held.node(static_cast<uint32_t>(at)) == kNone) continue;
      const Node& node = nodes[held.node(static_cast<uint32_t>(at))];
      const Tree& tree = nodes.tree(node.tree());
      const bool has_parent = node.parent != kNone;
      rows.push_back({nodes.scopes.key(tree.scope), tree.cut.block_size, node.key,
                      has_parent ? nodes[node.parent].key : 0, has_parent});
    }
    Ref list(PyList_New(0));
    for (const Row& row : rows) {
      Ref scope = scope_tuple(row.scope);
      Ref parent = row.has_parent ? Ref(PyLong_FromUnsignedLongLong(row.parent)) : Ref::borrowed(Py_None);
      if (!list || !scope || !parent) return nullptr;
      const Ref item(Py_BuildValue("(OIKO)", scope.get(), row.block_size,
                                   static_cast<unsigned long long>(row.key), parent.get()));
      if (!item || PyList_Append(list.get(), item.get()) != 0) return nullptr;
    }
    return list ? Py_BuildValue("(nO)", static_cast<Py_ssize_t>(at), list.get()) : nullptr;
  });
}

// [(tier, scope, num_blocks, sum)], or None where the source has told something that is not here.
PyObject* core_digests(PyObject* self, PyObject* argument) {
  return guarded([&]() -> PyObject* {
    State& state = state_of(self);
    const uint32_t stream = read_stream(state, argument);
    if (stream == kNone) return nullptr;
    const Source& source = state.core.source(stream);
    if (source.forgot) Py_RETURN_NONE;
    Source::Map<Digest> digests = source.digests;
    // A parked block may be held under another parent, or be parked twice; it was told once.
    using Hashes = std::unordered_set<uint64_t, SecretHash>;
    Hashes counted[kTiers];
    source.parked.each([&](const ParkedRun& run) {
      const Hashes removed(run.removed.begin(), run.removed.end());
      for (const uint64_t hash : run.hashes) {
        if (!removed.empty() && removed.count(hash) > 0) continue;
        if (source.tables[run.tier].find(hash) != kNone) continue;
        if (!counted[run.tier].insert(hash).second) continue;
        Digest& digest = digests[Source::digest_key(run.tier, run.scope)];
        ++digest.num_blocks;
        digest.sum += mixed(hash);
      }
    });
    std::vector<std::pair<std::string, std::pair<int, Digest>>> rows;
    for (const auto& [key, digest] : digests)
      rows.push_back({state.core.nodes.scopes.key(static_cast<uint32_t>(key >> 2)), {static_cast<int>(key & 3), digest}});
    Ref list(PyList_New(0));
    for (const auto& [scope_key, row] : rows) {
      const Ref scope = scope_tuple(scope_key);
      if (!list || !scope) return nullptr;
      const Ref item(Py_BuildValue("(iOKK)", row.first, scope.get(),
                                   static_cast<unsigned long long>(row.second.num_blocks),
                                   static_cast<unsigned long long>(row.second.sum)));
      if (!item || PyList_Append(list.get(), item.get()) != 0) return nullptr;
    }
    return list.release();
  });
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef core_methods[] = {
    {"admit", fast(core_admit), METH_FASTCALL,
     "admit(instance_id, dp_rank, model, tenant, lora, salt, single_group) -> int\n\nA source's stream number."},
    {"remove", core_remove, METH_O, "remove(stream)"},
    {"clear", core_clear, METH_O, "clear(stream)"},
    {"set_hidden", fast(core_set_hidden), METH_FASTCALL, "set_hidden(stream, hidden)"},
    {"apply", fast(core_apply), METH_FASTCALL, "apply(stream, records)"},
    {"replace", core_replace, METH_NOARGS, "replace()\n\nThere is another core in its place: its writers raise RuntimeError."},
    {"reclaim", core_reclaim, METH_O, "reclaim(limit) -> bool\n\nWhether there is more to take out."},
    {"reclaimable", core_reclaimable, METH_NOARGS, "reclaimable() -> bool"},
    {"num_held", core_num_held, METH_O, "num_held(stream) -> int"},
    {"memory_bytes", core_memory_bytes, METH_NOARGS, "memory_bytes() -> int"},
    {"statistics", core_statistics, METH_NOARGS, "statistics() -> dict[str, int]"},
    {"dump", fast(core_dump), METH_FASTCALL,
     "dump(stream, table, position, limit) -> (position, [(scope, block_size, prefix_hash, parent_hash)])\n\n"
     "Tables 0 to 2 are the tiers, 3 is what is predicted."},
    {"digests", core_digests, METH_O,
     "digests(stream) -> [(tier, scope, num_blocks, sum)] or None\n\nOf what the source has told and not taken back."},
    {nullptr, nullptr, 0, nullptr},
};

std::vector<PyMethodDef> all_methods() {
  std::vector<PyMethodDef> methods;
  for (const PyMethodDef* table : {core_methods, query_methods, persistence_methods})
    for (; table->ml_name != nullptr; ++table) methods.push_back(*table);
  methods.push_back({nullptr, nullptr, 0, nullptr});
  return methods;
}

}  // namespace

PyTypeObject* core_type = nullptr;

}  // namespace kvmesh::index

// Adds the types to the module. Returns 0, or -1 with an exception set.
extern "C" int kvmesh_prefix_index_init(PyObject* module) {
  using namespace kvmesh::index;
  static std::vector<PyMethodDef> methods = all_methods();
  PyType_Slot slots[] = {
      {Py_tp_doc, const_cast<char*>("PrefixCore(max_memory_bytes, match, stored, removed, cleared, identities)\n--\n\n"
                                    "Who holds which prefix: kvmesh.events.index without its names.")},
      {Py_tp_new, reinterpret_cast<void*>(core_new)},
      {Py_tp_dealloc, reinterpret_cast<void*>(core_free)},
      {Py_tp_methods, methods.data()},
      {0, nullptr},
  };
  PyType_Spec spec = {"kvmesh.kernels._native.PrefixCore", sizeof(PrefixCore), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, slots};
  PyObject* type = PyType_FromModuleAndSpec(module, &spec, nullptr);
  if (type == nullptr) return -1;
  Py_XSETREF(core_type, reinterpret_cast<PyTypeObject*>(type));
  return PyModule_AddType(module, core_type) != 0 ? -1 : add_writer_type(module);
}
