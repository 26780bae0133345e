// SourceWriter: blocks of one source by hashes alone, arrays straight into the index.
#include "index_object.h"

namespace kvmesh::index {
namespace {

constexpr Py_ssize_t kWordBytes = sizeof(uint64_t);
constexpr size_t kFetchedBytes = 1024;  // of an array, before it is read

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

// A lent array of numbers below 2**64, one after the other as this processor keeps them.
class Hashes {
 public:
  Hashes() = default;
  Hashes(const Hashes&) = delete;
  Hashes& operator=(const Hashes&) = delete;
  ~Hashes() {
    if (held_) PyBuffer_Release(&view_);
  }

  // On failure an exception is set.
  bool acquire(PyObject* object, const char* what) {
    if (PyObject_GetBuffer(object, &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) return false;
    held_ = true;
    if (view_.itemsize != kWordBytes || !native_unsigned(view_.format)) {
      PyErr_Format(PyExc_TypeError, "%s must be 8-byte unsigned integers in native byte order", what);
      return false;
    }
    if (view_.ndim != 1 || reinterpret_cast<uintptr_t>(view_.buf) % kWordBytes != 0) {
      PyErr_Format(PyExc_ValueError, "%s must be an aligned array of one dimension", what);
      return false;
    }
    // They have not been looked at, and will be, one array after the other: the next one is fetched meanwhile.
    const char* bytes = static_cast<const char*>(view_.buf);
    const size_t fetched = std::min(static_cast<size_t>(view_.len), kFetchedBytes);
    for (size_t at = 0; at < fetched; at += kLineBytes) fetch(bytes + at);
    return true;
  }
  const uint64_t* data() const { return static_cast<const uint64_t*>(view_.buf); }
  size_t count() const { return static_cast<size_t>(view_.len / kWordBytes); }

 private:
  // As of the struct module; 8-byte items only.
  static bool native_unsigned(const char* format) {
    constexpr char kOrder = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? '<' : '>';
    if (format == nullptr) return false;  // bytes
    if (*format == '@' || *format == '=' || *format == kOrder) ++format;
    return (*format == 'Q' || *format == 'L') && format[1] == 0;
  }

  Py_buffer view_{};
  bool held_ = false;
};

// Runs `work`, which returns false with an exception set, on the index, unless the source is gone.
template <typename Work>
PyObject* written(SourceWriter* writer, const Work& work) {
  return guarded([&]() -> PyObject* {
    if (state_of(writer->core).replaced) {
      PyErr_SetString(PyExc_RuntimeError, "the index has been restored from a snapshot since: ask it for another writer");
      return nullptr;
    }
    State* state = writer->state();
    if (state == nullptr) Py_RETURN_NONE;
    ++state->changes;
    try {
      if (!work(*state)) return nullptr;
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
  Hashes hashes, locals;
  Run run{};
  if (!hashes.acquire(arguments[0], "hashes") || !locals.acquire(arguments[1], "local hashes") ||
      !read_optional(arguments[2], &run.parent) ||
      !read_block_size(arguments[3], &run.cut.block_size) || (count > 4 && !read_tier(arguments[4], &run.tier)))
    return nullptr;
  if (hashes.count() != locals.count()) {
    PyErr_Format(PyExc_ValueError, "%zu blocks need as many hashes, not %zu", locals.count(), hashes.count());
    return nullptr;
  }
  run.hashes = hashes.data();
  run.locals = locals.data();
  run.count = hashes.count();
  return written(writer, [&](State& state) {
    if (!check_different(state, run)) return false;
    run.scope = state.core.source(writer->stream).scope;
    state.core.store(writer->stream, run);
    return true;
  });
}

PyObject* writer_discard(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (!count_between(count, 1, 2, "discard")) return nullptr;
  auto* writer = reinterpret_cast<SourceWriter*>(self);
  Hashes hashes;
  int tier = 0;
  if (!hashes.acquire(arguments[0], "hashes") || (count > 1 && !read_tier(arguments[1], &tier)))
    return nullptr;
  return written(writer, [&](State& state) {
    state.core.remove(writer->stream, tier, hashes.data(), hashes.count());
    return true;
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
