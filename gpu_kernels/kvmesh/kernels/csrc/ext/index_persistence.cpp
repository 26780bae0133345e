// Snapshots of PrefixCore: parts as bytes objects.
#include "index_object.h"

namespace kvmesh::index {
namespace {

bool read_streams(State& state, PyObject* list, std::vector<uint32_t>* streams) {
  if (!PyList_Check(list)) {
    PyErr_SetString(PyExc_TypeError, "streams must be a list");
    return false;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    const uint32_t stream = read_stream(state, PyList_GET_ITEM(list, i));
    if (stream == kNone) return false;
    streams->push_back(stream);
  }
  return true;
}

bool is_scope(const std::string& key) {
  const Ref tuple = scope_tuple(key);
  if (!tuple) PyErr_Clear();
  return static_cast<bool>(tuple);
}

PyObject* core_begin_snapshot(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (!count_arguments(count, 2, "begin_snapshot")) return nullptr;
  return guarded([&]() -> PyObject* {
    State& state = state_of(self);
    std::vector<uint32_t> streams;
    const unsigned long now = PyLong_AsUnsignedLong(arguments[1]);
    if (PyErr_Occurred() || !read_streams(state, arguments[0], &streams)) return nullptr;
    state.writer = std::make_unique<SnapshotWriter>(state.core, std::move(streams), static_cast<uint32_t>(now));
    state.writer_changes = state.changes;
    return PyLong_FromUnsignedLongLong(++state.writer_number);
  });
}

PyObject* core_next_part(PyObject* self, PyObject* argument) {
  return guarded([&]() -> PyObject* {
    State& state = state_of(self);
    const unsigned long long number = PyLong_AsUnsignedLongLong(argument);
    if (PyErr_Occurred()) return nullptr;
    if (state.writer == nullptr || number != state.writer_number || state.writer_changes != state.changes) {
      state.writer.reset();
      PyErr_SetString(PyExc_RuntimeError, "the index was changed while its snapshot was taken");
      return nullptr;
    }
    std::string part;
    if (state.writer->next(&part)) return PyBytes_FromStringAndSize(part.data(), static_cast<Py_ssize_t>(part.size()));
    state.writer.reset();
    Py_RETURN_NONE;
  });
}

PyObject* core_restore(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (!count_arguments(count, 3, "restore")) return nullptr;
  return guarded([&]() -> PyObject* {
    State& state = state_of(self);
    std::vector<uint32_t> streams;
    const unsigned long now = PyLong_AsUnsignedLong(arguments[2]);
    if (PyErr_Occurred() || !read_streams(state, arguments[1], &streams)) return nullptr;
    if (state.core.nodes.count() > 0) {
      PyErr_SetString(PyExc_ValueError, "only an empty index can be filled from a snapshot");
      return nullptr;
    }
    const Ref parts(PyObject_GetIter(arguments[0]));
    if (!parts) return nullptr;
    ++state.changes;
    Restorer restorer(state.core, std::move(streams), static_cast<uint32_t>(now), is_scope);
    try {
      while (const Ref part{PyIter_Next(parts.get())}) {
        char* bytes;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(part.get(), &bytes, &size) != 0) return nullptr;
        restorer.add(std::string(bytes, size));
      }
      if (PyErr_Occurred()) return nullptr;
      return PyLong_FromUnsignedLongLong(restorer.finish());
    } catch (const DamagedError& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
      return nullptr;
    }
  });
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace

PyMethodDef persistence_methods[] = {
    {"begin_snapshot", fast(core_begin_snapshot), METH_FASTCALL,
     "begin_snapshot(streams, tick) -> int\n\nA number for next_part; an earlier one is void then."},
    {"next_part", core_next_part, METH_O,
     "next_part(number) -> bytes | None\n\nNone at the end; RuntimeError when the index has changed since."},
    {"restore", fast(core_restore), METH_FASTCALL,
     "restore(parts, streams, tick) -> int\n\n"
     "Fill an empty index; blocks held. ValueError, with the index of no use any more, when the parts are damaged."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace kvmesh::index
