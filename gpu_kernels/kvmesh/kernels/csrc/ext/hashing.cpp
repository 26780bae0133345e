// Block keys over int32 token buffers, as methods of the extension module: SHA-256 chains, XXH3 hashes, V1 keys.
//
// Every hash takes its tokens through the buffer protocol (one contiguous int32 buffer, never a list) and leaves the GIL
// while it works on a long one; fill_int32 makes such a buffer of a list.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "buffer_view.h"
#include "sha256.h"
#include "xxh3.h"

namespace {

using kvmesh::kSha256Bytes;
using View = kvmesh::BufferView;

// Below this many bytes the work is shorter than giving up the GIL is worth.
constexpr Py_ssize_t kReleaseGilBytes = 64 * 1024;

constexpr Py_ssize_t kTokenBytes = 4;

// Runs `work` without the GIL when it is long enough.
template <typename Work>
void run_detached(Py_ssize_t bytes, Work work) {
  if (bytes < kReleaseGilBytes) {
    work();
    return;
  }
  Py_BEGIN_ALLOW_THREADS;
  work();
  Py_END_ALLOW_THREADS;
}

// Tokens cut into blocks; the last one may be partial.
struct Blocks {
  const uint8_t* data;
  Py_ssize_t tokens;
  Py_ssize_t per_block;
  Py_ssize_t count;

  Py_ssize_t length(Py_ssize_t i) const {
    const Py_ssize_t left = tokens - i * per_block;
    return left < per_block ? left : per_block;
  }
  const uint8_t* at(Py_ssize_t i) const { return data + i * per_block * kTokenBytes; }
};

bool make_blocks(const View& tokens, Py_ssize_t per_block, int partial, Blocks* blocks) {
  if (per_block < 1) {
    PyErr_SetString(PyExc_ValueError, "tokens_per_block must be positive");
    return false;
  }
  const Py_ssize_t n = tokens.size() / kTokenBytes;
  *blocks = {tokens.data(), n, per_block, n / per_block + (partial && n % per_block != 0)};
  return true;
}

bool check_words(const View& out, Py_ssize_t count) {
  if (out.size() / 8 == count) return true;
  PyErr_Format(PyExc_ValueError, "the output must hold exactly %zd 64-bit words", count);
  return false;
}

// None gives present=false. On failure an exception is set.
bool optional_u64(PyObject* object, uint64_t* value, bool* present) {
  *present = object != Py_None;
  if (!*present) return true;
  *value = PyLong_AsUnsignedLongLong(object);
  return !PyErr_Occurred();
}

// The value of an int of one digit, which token ids are; false for any other object.
inline bool one_digit(PyObject* object, int32_t* value) {
  if (!PyLong_CheckExact(object)) return false;
  auto* number = reinterpret_cast<PyLongObject*>(object);
#if PY_VERSION_HEX >= 0x030C0000
  if (!PyUnstable_Long_IsCompact(number)) return false;
  *value = static_cast<int32_t>(PyUnstable_Long_CompactValue(number));
#else
  const Py_ssize_t size = Py_SIZE(number);
  if (size < -1 || size > 1) return false;
  // The digit of zero is not always set.
  *value = size == 0 ? 0 : static_cast<int32_t>(size) * static_cast<int32_t>(number->ob_digit[0]);
#endif
  return true;
}

PyObject* fill_int32(PyObject*, PyObject* args) {
  PyObject *list, *out_object;
  if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &list, &out_object)) return nullptr;
  View out;
  if (!out.acquire(out_object, kTokenBytes, true, "out")) return nullptr;
  const Py_ssize_t count = PyList_GET_SIZE(list);
  if (out.size() / kTokenBytes != count) {
    PyErr_Format(PyExc_ValueError, "the output must hold exactly %zd numbers", count);
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PyList_GET_ITEM(list, i);
    if (one_digit(item, out.numbers() + i)) continue;
    int overflow = 0;
    Py_INCREF(item);
    const long value = PyLong_AsLongAndOverflow(item, &overflow);
    Py_DECREF(item);
    if (value == -1 && PyErr_Occurred()) return nullptr;
    if (PyList_GET_SIZE(list) != count) {  // by the object's __index__
      PyErr_SetString(PyExc_RuntimeError, "the list changed while it was read");
      return nullptr;
    }
    if (overflow != 0 || value != static_cast<int32_t>(value)) {
      PyErr_SetString(PyExc_OverflowError, "a number does not fit 32 bits");
      return nullptr;
    }
    out.numbers()[i] = static_cast<int32_t>(value);
  }
  Py_RETURN_NONE;
}

PyObject* sha256_chain(PyObject*, PyObject* args) {
  PyObject* tokens_object;
  const char* parent;
  Py_ssize_t per_block, parent_size;
  int partial;
  if (!PyArg_ParseTuple(args, "Ony#p", &tokens_object, &per_block, &parent, &parent_size, &partial)) return nullptr;
  if (parent_size != static_cast<Py_ssize_t>(kSha256Bytes)) {
    PyErr_SetString(PyExc_ValueError, "the parent key must have 32 bytes");
    return nullptr;
  }
  View tokens;
  Blocks blocks;
  if (!tokens.acquire(tokens_object, kTokenBytes, false, "tokens")) return nullptr;
  if (!make_blocks(tokens, per_block, partial, &blocks)) return nullptr;
  std::unique_ptr<uint8_t[]> keys(new (std::nothrow) uint8_t[(blocks.count + 1) * kSha256Bytes]);
  if (!keys) return PyErr_NoMemory();
  std::memcpy(keys.get(), parent, kSha256Bytes);
  run_detached(tokens.size(), [&] {
    for (Py_ssize_t i = 0; i < blocks.count; ++i) {
      uint8_t* key = keys.get() + i * kSha256Bytes;
      kvmesh::sha256_prefixed(key, blocks.at(i), blocks.length(i) * kTokenBytes, key + kSha256Bytes);
    }
  });
  PyObject* list = PyList_New(blocks.count);
  if (!list) return nullptr;
  for (Py_ssize_t i = 0; i < blocks.count; ++i) {
    const char* key = reinterpret_cast<const char*>(keys.get()) + (i + 1) * kSha256Bytes;
    PyObject* bytes = PyBytes_FromStringAndSize(key, kSha256Bytes);
    if (!bytes) {
      Py_DECREF(list);
      return nullptr;
    }
    PyList_SET_ITEM(list, i, bytes);
  }
  return list;
}

PyObject* xxh3_64(PyObject*, PyObject* args) {
  PyObject* object;
  unsigned long long seed;
  if (!PyArg_ParseTuple(args, "OK", &object, &seed)) return nullptr;
  View data;
  if (!data.acquire(object, 1, false, "data")) return nullptr;
  uint64_t hash = 0;
  run_detached(data.size(), [&] { hash = kvmesh::xxh3_64(data.data(), data.size(), seed); });
  return PyLong_FromUnsignedLongLong(hash);
}

PyObject* xxh3_blocks(PyObject*, PyObject* args) {
  PyObject *tokens_object, *out_object;
  Py_ssize_t per_block;
  unsigned long long seed;
  if (!PyArg_ParseTuple(args, "OnKO", &tokens_object, &per_block, &seed, &out_object)) return nullptr;
  View tokens, out;
  Blocks blocks;
  if (!tokens.acquire(tokens_object, kTokenBytes, false, "tokens")) return nullptr;
  if (!out.acquire(out_object, 8, true, "out")) return nullptr;
  if (!make_blocks(tokens, per_block, 0, &blocks) || !check_words(out, blocks.count)) return nullptr;
  run_detached(tokens.size(), [&] {
    for (Py_ssize_t i = 0; i < blocks.count; ++i) {
      out.words()[i] = kvmesh::xxh3_64(blocks.at(i), per_block * kTokenBytes, seed);
    }
  });
  Py_RETURN_NONE;
}

PyObject* xxh3_rolling(PyObject*, PyObject* args) {
  PyObject *local_object, *parent_object, *out_object;
  unsigned long long seed;
  if (!PyArg_ParseTuple(args, "OOKO", &local_object, &parent_object, &seed, &out_object)) return nullptr;
  View local, out;
  uint64_t parent = 0;
  bool has_parent;
  if (!optional_u64(parent_object, &parent, &has_parent)) return nullptr;
  if (!local.acquire(local_object, 8, false, "local hashes") || !out.acquire(out_object, 8, true, "out")) return nullptr;
  const Py_ssize_t count = local.size() / 8;
  if (!check_words(out, count)) return nullptr;
  run_detached(local.size(), [&] {
    for (Py_ssize_t i = 0; i < count; ++i) {
      const uint64_t own = local.words()[i];
      parent = i > 0 || has_parent ? kvmesh::xxh3_64_of_pair(parent, own, seed) : own;
      out.words()[i] = parent;
    }
  });
  Py_RETURN_NONE;
}

constexpr uint64_t kGolden = 0x9E3779B9;

inline uint64_t v1_mix32(uint64_t seed, uint32_t v) {
  v = ((v >> 16) ^ v) * 0x45D9F3B;
  v = ((v >> 16) ^ v) * 0x45D9F3B;
  v = (v >> 16) ^ v;
  v += static_cast<uint32_t>(kGolden);
  return seed ^ (v + (seed << 6) + (seed >> 2));
}

inline uint64_t v1_mix64(uint64_t seed, uint64_t v) {
  v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9;
  v = (v ^ (v >> 27)) * 0x94D049BB133111EB;
  v ^= v >> 31;
  return seed ^ (v + kGolden + (seed << 6) + (seed >> 2));
}

PyObject* v1_block_keys(PyObject*, PyObject* args) {
  PyObject *tokens_object, *lora_object, *salt_object, *out_object;
  Py_ssize_t per_block;
  unsigned long long first_parent;
  int partial;
  if (!PyArg_ParseTuple(args, "OnKOOpO", &tokens_object, &per_block, &first_parent, &lora_object, &salt_object, &partial,
                        &out_object)) {
    return nullptr;
  }
  uint64_t lora = 0, salt = 0;
  bool has_lora, has_salt;
  if (!optional_u64(lora_object, &lora, &has_lora) || !optional_u64(salt_object, &salt, &has_salt)) return nullptr;
  View tokens, out;
  Blocks blocks;
  if (!tokens.acquire(tokens_object, kTokenBytes, false, "tokens")) return nullptr;
  if (!out.acquire(out_object, 8, true, "out")) return nullptr;
  if (!make_blocks(tokens, per_block, partial, &blocks) || !check_words(out, blocks.count)) return nullptr;
  run_detached(tokens.size(), [&] {
    uint64_t parent = first_parent;
    for (Py_ssize_t i = 0; i < blocks.count; ++i) {
      const Py_ssize_t length = blocks.length(i);
      uint64_t seed = static_cast<uint64_t>(length) ^ (parent * 0xBF58476D1CE4E5B9);
      if (parent == 0 && has_salt) seed = v1_mix64(seed, salt);
      for (Py_ssize_t t = 0; t < length; ++t) {
        uint32_t token;
        std::memcpy(&token, blocks.at(i) + t * kTokenBytes, kTokenBytes);
        seed = v1_mix32(seed, token);
      }
      if (has_lora) seed = v1_mix64(seed, lora);
      out.words()[i] = parent = seed;
    }
  });
  Py_RETURN_NONE;
}

PyObject* sha256_implementation(PyObject*, PyObject*) { return PyUnicode_FromString(kvmesh::sha256_implementation()); }

PyObject* sha256_force_portable(PyObject*, PyObject* portable) {
  const int truth = PyObject_IsTrue(portable);
  if (truth < 0) return nullptr;
  kvmesh::sha256_force_portable(truth != 0);
  Py_RETURN_NONE;
}

}  // namespace

extern "C" PyMethodDef kvmesh_hashing_methods[];
PyMethodDef kvmesh_hashing_methods[] = {
    {"sha256_chain", sha256_chain, METH_VARARGS,
     "sha256_chain(tokens, tokens_per_block, parent, include_partial) -> list[bytes]\n\n"
     "key[i] = SHA-256(key[i-1] || tokens of block i), key[-1] = parent."},
    {"fill_int32", fill_int32, METH_VARARGS,
     "fill_int32(numbers, out)\n\nThe ints of a list as int32. OverflowError for one that does not fit."},
    {"xxh3_64", xxh3_64, METH_VARARGS, "xxh3_64(data, seed) -> int"},
    {"xxh3_blocks", xxh3_blocks, METH_VARARGS,
     "xxh3_blocks(tokens, tokens_per_block, seed, out)\n\nout[i] = XXH3-64 of full block i."},
    {"xxh3_rolling", xxh3_rolling, METH_VARARGS,
     "xxh3_rolling(local, parent, seed, out)\n\n"
     "out[i] = XXH3-64(out[i-1] || local[i]); out[0] = local[0] when parent is None."},
    {"v1_block_keys", v1_block_keys, METH_VARARGS,
     "v1_block_keys(tokens, tokens_per_block, parent, lora_id, salt, include_partial, out)"},
    {"sha256_implementation", sha256_implementation, METH_NOARGS, "Name of the SHA-256 code path: sha-ni or portable."},
    {"sha256_force_portable", sha256_force_portable, METH_O, "Use the portable SHA-256 path (for tests)."},
    {nullptr, nullptr, 0, nullptr},
};
