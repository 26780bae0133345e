// SourceWriter: blocks of one source by hashes alone, arrays straight into the index.
#include "buffer_view.h"
#include "index_object.h"

namespace kvmesh::index {
namespace {

constexpr Py_ssize_t kWordBytes = sizeof(uint64_t);

struct SourceWriter {
  PyObject_HEAD
  PyObject* core;
  uint32_t stream;
  uint64_t life;  // of the source: another one may have its stream later

  // The index, or null where the source is gone.
  State* state() const {
    State& state = state_of(core);
    return state.core.known(stream) && state.names[stream].life == life ? &state : nullptr;
  }
};

// Runs `work` on the index, unless the source is gone.
template <typename Work>
PyObject* written(SourceWriter* writer, const Work& work) {
  return guarded([&]() -> PyObject* {
    State* state = writer->state();
    if (state == nullptr) Py_RETURN_NONE;
    ++state->changes;
    try {
      work(*state);
    } catch (const std::bad_alloc&) {
      state->core.clear(writer->stream);  // half of the blocks may be in
      throw;
    }
    Py_RETURN_NONE;
  });
}

bool count_between(Py_ssize_t given, Py_ssize_t least, Py_ssize_t most, const char* name) {
  if (given >= least && given <= most) return true;
  PyErr_Format(PyExc_TypeError, "%s takes %zd or %zd arguments, not %zd", name, least, most, given);
  return false;
}

PyObject* writer_store(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (!count_between(count, 4, 5, "store")) return nullptr;
  auto* writer = reinterpret_cast<SourceWriter*>(self);
  BufferView hashes, locals;
  Run run{};
  if (!hashes.acquire(arguments[0], kWordBytes, false, "hashes") ||
      !locals.acquire(arguments[1], kWordBytes, false, "local hashes") || !read_optional(arguments[2], &run.parent) ||
      !read_block_size(arguments[3], &run.cut.block_size) || (count > 4 && !read_tier(arguments[4], &run.tier)))
    return nullptr;
  if (hashes.size() != locals.size()) {
    PyErr_Format(PyExc_ValueError, "%zd blocks need as many hashes, not %zd", locals.size() / kWordBytes,
                 hashes.size() / kWordBytes);
    return nullptr;
  }
  run.hashes = hashes.words();
  run.locals = locals.words();
  run.count = static_cast<size_t>(hashes.size() / kWordBytes);
  return written(writer, [&](State& state) {
    run.scope = state.core.source(writer->stream).scope;
    state.core.store(writer->stream, run);
  });
}

PyObject* writer_discard(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (!count_between(count, 1, 2, "discard")) return nullptr;
  auto* writer = reinterpret_cast<SourceWriter*>(self);
  BufferView hashes;
  int tier = 0;
  if (!hashes.acquire(arguments[0], kWordBytes, false, "hashes") || (count > 1 && !read_tier(arguments[1], &tier)))
    return nullptr;
  return written(writer, [&](State& state) {
    state.core.remove(writer->stream, tier, hashes.words(), static_cast<size_t>(hashes.size() / kWordBytes));
  });
}

PyObject* writer_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *core, *number;
  if (!PyArg_ParseTuple(arguments, "O!O", core_type, &core, &number)) return nullptr;
  const uint32_t stream = read_stream(state_of(core), number);
  if (stream == kNone) return nullptr;
  auto* writer = reinterpret_cast<SourceWriter*>(type->tp_alloc(type, 0));
  if (writer == nullptr) return nullptr;
  writer->core = Py_NewRef(core);
  writer->stream = stream;
  writer->life = state_of(core).names[stream].life;
  return reinterpret_cast<PyObject*>(writer);
}

void writer_free(PyObject* self) {
  Py_DECREF(reinterpret_cast<SourceWriter*>(self)->core);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef writer_methods[] = {
    {"store", fast(writer_store), METH_FASTCALL,
     "store(hashes, local_hashes, parent, block_size, tier=0)\n\nConsecutive blocks whose tokens have been hashed."},
    {"discard", fast(writer_discard), METH_FASTCALL, "discard(hashes, tier=0)\n\nBlocks that left a tier."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int add_writer_type(PyObject* module) {
  PyType_Slot slots[] = {
      {Py_tp_doc, const_cast<char*>("SourceWriter(core, stream)\n--\n\nBlocks of one source, by hashes.")},
      {Py_tp_new, reinterpret_cast<void*>(writer_new)},
      {Py_tp_dealloc, reinterpret_cast<void*>(writer_free)},
      {Py_tp_methods, writer_methods},
      {0, nullptr},
  };
  PyType_Spec spec = {"kvmesh.kernels._native.SourceWriter", sizeof(SourceWriter), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, slots};
  PyObject* type = PyType_FromModuleAndSpec(module, &spec, nullptr);
  if (type == nullptr) return -1;
  const int status = PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type));
  Py_DECREF(type);
  return status;
}

}  // namespace kvmesh::index
