// PrefixCore, the Python object around the prefix index, and what its methods share.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "event_batch.h"
#include "index_core.h"
#include "index_distinct.h"
#include "index_python.h"
#include "index_search.h"
#include "index_snapshot.h"

namespace kvmesh::index {

// A source as Python knows it. Its scope is kept in parts: events may name another adapter or salt.
struct Names {
  Ref instance_id, rank;
  std::string model, tenant, lora, salt;
  bool single_group = false;
  uint64_t life = 0;  // no two sources have the same
};

// The Python classes that the object reads and makes.
struct Types {
  Ref match, stored, removed, cleared;
  Ref identities;  // function: a stored record with extra keys -> uint64 array of its blocks' local hashes
};

struct State {
  State(size_t max_bytes, Types types) : core(max_bytes), search(core), types(std::move(types)) {}

  Core core;
  Search search;
  Types types;
  std::vector<Names> names;                     // by stream
  uint64_t lives = 0;
  std::vector<uint64_t> hashes, locals, keys;   // of the call that is being made
  Distinct distinct;
  std::string scope_key;
  bool replaced = false;  // by what a snapshot holds: whoever still has this core has the wrong one
  uint64_t changes = 0;  // calls that may have changed the index
  std::unique_ptr<SnapshotWriter> writer;
  uint64_t writer_number = 0, writer_changes = 0;
};

struct PrefixCore {
  PyObject_HEAD
  State* state;
};

extern PyTypeObject* core_type;
int add_writer_type(PyObject* module);  // SourceWriter, of index_writer.cpp; 0, or -1 with an exception set

inline State& state_of(PyObject* self) { return *reinterpret_cast<PrefixCore*>(self)->state; }

// Runs `work`, which returns null or -1 with an exception set on failure; C++ exceptions become Python's.
template <typename Work>
auto guarded(const Work& work) -> decltype(work()) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return static_cast<decltype(work())>(0);
}

// The stream of an argument, or kNone with an exception set.
uint32_t read_stream(State& state, PyObject* argument);
bool count_arguments(Py_ssize_t given, Py_ssize_t expected, const char* name);

// apply(stream, records)
PyObject* apply_records(State& state, uint32_t stream, PyObject* records);
// The events of a payload, all of them plain; false with an exception set.
bool apply_events(State& state, uint32_t stream, const WireBatch& batch);
// Groups whose blocks mean that a prefix can be reused; those of windows and recurrent states do not. Windows count of
// a source that tells its widest group alone: then there is none that needs more blocks, and the blocks of a whole
// leading run are a window of each.
bool admitted(const WireText& kind, bool single_group);
// The scope of a stored event that names these (None: the source's), with one use more; kNone with an exception set.
uint32_t use_scope(State& state, uint32_t stream, PyObject* model, PyObject* tenant, PyObject* lora, PyObject* salt);

// Whether the hashes of a run differ, as stored events must; false with an exception set.
bool check_different(State& state, const Run& run);

extern PyMethodDef query_methods[];        // match, match_hashes, predict and the like: index_queries.cpp
extern PyMethodDef persistence_methods[];  // snapshots: index_persistence.cpp

}  // namespace kvmesh::index
