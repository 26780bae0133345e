// A contiguous buffer that a caller lends, for as long as a call lasts.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace kvmesh {

// Released when it goes out of scope.
class BufferView {
 public:
  BufferView() = default;
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;
  ~BufferView() {
    if (held_) PyBuffer_Release(&view_);
  }

  // item_bytes 1 accepts any contiguous buffer. On failure an exception is set.
  bool acquire(PyObject* object, Py_ssize_t item_bytes, bool writable, const char* what) {
    const int flags = PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, &view_, flags) != 0) return false;
    held_ = true;
    if (item_bytes != 1 && view_.itemsize != item_bytes) {
      PyErr_Format(PyExc_TypeError, "%s must be a buffer of %zd-byte integers", what, item_bytes);
      return false;
    }
    return true;
  }

  const uint8_t* data() const { return static_cast<const uint8_t*>(view_.buf); }
  uint8_t* bytes() const { return static_cast<uint8_t*>(view_.buf); }
  int32_t* numbers() const { return static_cast<int32_t*>(view_.buf); }
  uint64_t* words() const { return static_cast<uint64_t*>(view_.buf); }
  Py_ssize_t size() const { return view_.len; }

 private:
  Py_buffer view_{};
  bool held_ = false;
};

// A one-dimensional array of int32 for reading, which may be a reversed or otherwise strided view.
class Int32View {
 public:
  Int32View() = default;
  Int32View(const Int32View&) = delete;
  Int32View& operator=(const Int32View&) = delete;
  ~Int32View() {
    if (held_) PyBuffer_Release(&view_);
  }

  // On failure an exception is set.
  bool acquire(PyObject* object, const char* what) {
    if (PyObject_GetBuffer(object, &view_, PyBUF_STRIDES) != 0) return false;
    held_ = true;
    if (view_.itemsize == 4 && view_.ndim == 1) return true;
    PyErr_Format(PyExc_TypeError, "%s must be a one-dimensional array of 4-byte integers", what);
    return false;
  }

  Py_ssize_t size() const { return view_.shape[0]; }
  int32_t operator[](Py_ssize_t i) const {
    return *reinterpret_cast<const int32_t*>(static_cast<const char*>(view_.buf) + i * view_.strides[0]);
  }

 private:
  Py_buffer view_{};
  bool held_ = false;
};

}  // namespace kvmesh
