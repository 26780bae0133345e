// Words of memory that processes share, changed in one step: what lay before one of them is seen by who sees it.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "buffer_view.h"

namespace {

using kvmesh::BufferView;

// The word of a buffer that a call is about; null with an exception where there is none.
uint64_t* word_of(BufferView& view, PyObject* buffer, PyObject* number) {
  if (!view.acquire(buffer, 8, true, "words")) return nullptr;
  const Py_ssize_t index = PyNumber_AsSsize_t(number, PyExc_IndexError);
  if (index == -1 && PyErr_Occurred()) return nullptr;
  if (index >= 0 && index < view.size() / 8) return view.words() + index;
  PyErr_Format(PyExc_IndexError, "word %zd is not in 0..%zd", index, view.size() / 8 - 1);
  return nullptr;
}

bool take_word(PyObject* number, uint64_t& word) {
  word = PyLong_AsUnsignedLongLong(number);
  return word != static_cast<uint64_t>(-1) || !PyErr_Occurred();
}

bool check_count(Py_ssize_t count, Py_ssize_t expected, const char* name) {
  if (count == expected) return true;
  PyErr_Format(PyExc_TypeError, "%s takes %zd arguments", name, expected);
  return false;
}

PyObject* exchange_word(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!check_count(count, 3, "exchange_word")) return nullptr;
  BufferView view;
  uint64_t desired;
  uint64_t* word = word_of(view, arguments[0], arguments[1]);
  if (word == nullptr || !take_word(arguments[2], desired)) return nullptr;
  return PyLong_FromUnsignedLongLong(__atomic_exchange_n(word, desired, __ATOMIC_SEQ_CST));
}

PyObject* compare_exchange_word(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!check_count(count, 4, "compare_exchange_word")) return nullptr;
  BufferView view;
  uint64_t expected, desired;
  uint64_t* word = word_of(view, arguments[0], arguments[1]);
  if (word == nullptr || !take_word(arguments[2], expected) || !take_word(arguments[3], desired)) return nullptr;
  return PyBool_FromLong(
      __atomic_compare_exchange_n(word, &expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
}

}  // namespace

PyMethodDef kvmesh_shared_word_methods[] = {
    {"exchange_word", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(exchange_word)), METH_FASTCALL,
     "exchange_word(words, index, desired) -> what the word was."},
    {"compare_exchange_word", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(compare_exchange_word)),
     METH_FASTCALL, "compare_exchange_word(words, index, expected, desired) -> whether the word was expected."},
    {nullptr, nullptr, 0, nullptr},
};
