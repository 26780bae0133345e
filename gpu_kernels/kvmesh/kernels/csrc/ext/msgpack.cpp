// Token ids as a msgpack array, without a Python object for each.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstring>

#include "buffer_view.h"

namespace {

using kvmesh::BufferView;

constexpr uint8_t kArray32 = 0xDD, kUint16 = 0xCD, kInt32 = 0xD2;
constexpr Py_ssize_t kHeaderBytes = 5;

uint8_t* put_big_endian(uint8_t* at, uint32_t value) {
  value = __builtin_bswap32(value);
  std::memcpy(at, &value, sizeof value);
  return at + sizeof value;
}

PyObject* pack_token_ids(PyObject*, PyObject* argument) {
  BufferView view;
  if (!view.acquire(argument, 4, false, "token ids")) return nullptr;
  const int32_t* tokens = view.numbers();
  const Py_ssize_t count = view.size() / 4;
  if (count > UINT32_MAX) {
    PyErr_SetString(PyExc_ValueError, "too many token ids for one array");
    return nullptr;
  }
  uint32_t all = 0;
  for (Py_ssize_t i = 0; i < count; ++i) all |= static_cast<uint32_t>(tokens[i]);
  const bool wide = all > UINT16_MAX;
  PyObject* bytes = PyBytes_FromStringAndSize(nullptr, kHeaderBytes + count * (wide ? 5 : 3));
  if (bytes == nullptr) return nullptr;
  auto* at = reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(bytes));
  *at++ = kArray32;
  at = put_big_endian(at, static_cast<uint32_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    const auto value = static_cast<uint32_t>(tokens[i]);
    *at++ = wide ? kInt32 : kUint16;
    if (wide) {
      at = put_big_endian(at, value);
    } else {
      *at++ = static_cast<uint8_t>(value >> 8);
      *at++ = static_cast<uint8_t>(value);
    }
  }
  return bytes;
}

}  // namespace

extern "C" PyMethodDef kvmesh_msgpack_methods[];
PyMethodDef kvmesh_msgpack_methods[] = {
    {"pack_token_ids", pack_token_ids, METH_O,
     "pack_token_ids(tokens) -> bytes\n\n"
     "A msgpack array32 of int32 ids: as uint16 where all of them fit, else as int32."},
    {nullptr, nullptr, 0, nullptr},
};
