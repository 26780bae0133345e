// What calls need to know of an array of page ids: where it lies, and its extremes.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstring>

#include "buffer_view.h"

namespace {

// A contiguous one-dimensional array of the native type int, or an exception.
bool acquire_ids(PyObject* object, Py_buffer& view) {
  if (PyObject_GetBuffer(object, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) return false;
  if (view.ndim == 1 && view.itemsize == 4 && view.format != nullptr && strcmp(view.format, "i") == 0) return true;
  PyErr_SetString(PyExc_TypeError, "page ids must be a one-dimensional array of int32");
  PyBuffer_Release(&view);
  return false;
}

PyObject* page_ids_address(PyObject*, PyObject* object) {
  Py_buffer view;
  if (!acquire_ids(object, view)) return nullptr;
  PyObject* address = PyLong_FromVoidPtr(view.buf);
  PyBuffer_Release(&view);
  return address;
}

PyObject* page_ids_bounds(PyObject*, PyObject* object) {
  Py_buffer view;
  if (!acquire_ids(object, view)) return nullptr;
  const int32_t* ids = static_cast<const int32_t*>(view.buf);
  Py_ssize_t count = view.len / 4;
  int32_t lowest = count > 0 ? ids[0] : 0, highest = count > 0 ? ids[0] : -1;
  for (Py_ssize_t i = 1; i < count; ++i) {
    lowest = ids[i] < lowest ? ids[i] : lowest;
    highest = ids[i] > highest ? ids[i] : highest;
  }
  PyBuffer_Release(&view);
  return Py_BuildValue("ii", lowest, highest);
}

}  // namespace

PyMethodDef kvmesh_page_ids_methods[] = {
    {"page_ids_address", page_ids_address, METH_O,
     "page_ids_address(ids) -> address of a contiguous int32 array, valid while it lives."},
    {"page_ids_bounds", page_ids_bounds, METH_O,
     "page_ids_bounds(ids) -> (lowest, highest) of a contiguous int32 array; (0, -1) of an empty one."},
    {nullptr, nullptr, 0, nullptr},
};
