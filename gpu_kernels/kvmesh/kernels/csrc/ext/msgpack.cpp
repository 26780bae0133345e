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

// Reads one msgpack value after another; `failed` once it meets something that is no integer of 32 bits, or the end.
class IntegerReader {
 public:
  IntegerReader(const uint8_t* at, const uint8_t* end) : at_(at), end_(end) {}

  // Length of the array that begins here.
  uint32_t array_header() {
    const uint8_t first = take();
    if ((first & 0xF0) == 0x90) return first & 0x0F;
    if (first == 0xDC) return static_cast<uint32_t>(big_endian(2));
    if (first == 0xDD) return static_cast<uint32_t>(big_endian(4));
    failed_ = true;
    return 0;
  }

  int32_t integer() {
    const uint8_t first = take();
    if (first <= 0x7F) return first;
    if (first >= 0xE0) return static_cast<int8_t>(first);
    switch (first) {
      case 0xCC: return static_cast<int32_t>(big_endian(1));
      case 0xCD: return static_cast<int32_t>(big_endian(2));
      case 0xCE: return within(static_cast<int64_t>(big_endian(4)));
      case 0xCF: {
        const uint64_t value = big_endian(8);
        return within(value > INT32_MAX ? INT64_MAX : static_cast<int64_t>(value));
      }
      case 0xD0: return static_cast<int8_t>(big_endian(1));
      case 0xD1: return static_cast<int16_t>(big_endian(2));
      case 0xD2: return static_cast<int32_t>(big_endian(4));
      case 0xD3: return within(static_cast<int64_t>(big_endian(8)));
      default: failed_ = true; return 0;
    }
  }

  Py_ssize_t left() const { return end_ - at_; }
  bool failed() const { return failed_; }

 private:
  uint8_t take() {
    if (at_ == end_) {
      failed_ = true;
      return 0;
    }
    return *at_++;
  }

  uint64_t big_endian(int bytes) {
    if (left() < bytes) {
      failed_ = true;
      return 0;
    }
    uint64_t value = 0;
    for (int i = 0; i < bytes; ++i) value = value << 8 | *at_++;
    return value;
  }

  int32_t within(int64_t value) {
    if (value < INT32_MIN || value > INT32_MAX) failed_ = true;
    return static_cast<int32_t>(value);
  }

  const uint8_t* at_;
  const uint8_t* end_;
  bool failed_ = false;
};

PyObject* unpack_token_ids(PyObject*, PyObject* argument) {
  BufferView view;
  if (!view.acquire(argument, 1, false, "packed token ids")) return nullptr;
  IntegerReader reader(view.data(), view.data() + view.size());
  const uint32_t count = reader.array_header();
  // Every integer takes at least a byte: a header that promises more allocates nothing.
  if (reader.failed() || count > reader.left()) Py_RETURN_NONE;
  PyObject* bytes = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count) * 4);
  if (bytes == nullptr) return nullptr;
  auto* tokens = reinterpret_cast<int32_t*>(PyBytes_AS_STRING(bytes));
  for (uint32_t i = 0; i < count && !reader.failed(); ++i) tokens[i] = reader.integer();
  if (!reader.failed() && reader.left() == 0) return bytes;
  Py_DECREF(bytes);
  Py_RETURN_NONE;
}

}  // namespace

extern "C" PyMethodDef kvmesh_msgpack_methods[];
PyMethodDef kvmesh_msgpack_methods[] = {
    {"pack_token_ids", pack_token_ids, METH_O,
     "pack_token_ids(tokens) -> bytes\n\n"
     "A msgpack array32 of int32 ids: as uint16 where all of them fit, else as int32."},
    {"unpack_token_ids", unpack_token_ids, METH_O,
     "unpack_token_ids(packed) -> bytes | None\n\n"
     "The int32 ids (in the machine's byte order) of a msgpack array; None if it is anything but an array of integers\n"
     "that fit 32 bits."},
    {nullptr, nullptr, 0, nullptr},
};
