// KeyIndex: which tree node has a 32-byte key. 32 bytes of key per node and 4 bytes per slot, no objects.
//
// The keys are a column indexed by node; an open-addressing table of node numbers with linear probing finds them. Keys
// are digests, but clients choose what is digested and could search for keys that share a home slot, so the first 8
// bytes are multiplied by a secret. Deletion shifts the entries behind back, so that no tombstones pile up.
// Everything runs under the GIL: a call is shorter than giving it up, but for grow(), which is amortised.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <random>

#include "buffer_view.h"

namespace {

using kvmesh::BufferView;

constexpr Py_ssize_t kKeyBytes = 32;
constexpr int64_t kMaxCapacity = INT32_MAX;
constexpr int32_t kEmpty = -1;
constexpr int kMinSlotBits = 3;

// Keys that walk() looks ahead, so that their slots are in the CPU's cache when their turn comes.
constexpr Py_ssize_t kLookahead = 8;

class Table {
 public:
  Table() {
    std::random_device device;
    multiplier_ = (static_cast<uint64_t>(device()) << 32 | device()) | 1;
  }
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;
  ~Table() {
    PyMem_RawFree(keys_);
    PyMem_RawFree(used_);
    PyMem_RawFree(slots_);
  }

  int64_t capacity() const { return capacity_; }
  int64_t count() const { return count_; }
  size_t bytes() const {
    return capacity_ * kKeyBytes + words(capacity_) * sizeof *used_ + num_slots() * sizeof *slots_;
  }
  const uint8_t* key(int64_t node) const { return keys_ + node * kKeyBytes; }
  bool used(int64_t node) const { return used_[node >> 6] >> (node & 63) & 1; }
  void mark(int64_t node) { used_[node >> 6] |= uint64_t{1} << (node & 63); }
  void unmark(int64_t node) { used_[node >> 6] &= ~(uint64_t{1} << (node & 63)); }

  // False when memory is short; nothing has changed then as far as callers can tell.
  bool grow(int64_t capacity) {
    int bits = kMinSlotBits;
    while ((int64_t{1} << bits) * 7 < capacity * 10) ++bits;
    void* keys = PyMem_RawRealloc(keys_, capacity * kKeyBytes + 1);
    if (keys == nullptr) return false;
    keys_ = static_cast<uint8_t*>(keys);
    void* used = PyMem_RawRealloc(used_, words(capacity) * sizeof *used_ + 1);
    if (used == nullptr) return false;
    used_ = static_cast<uint64_t*>(used);
    if (bits != bits_) {
      auto* slots = static_cast<int32_t*>(PyMem_RawMalloc(sizeof *slots_ << bits));
      if (slots == nullptr) return false;
      PyMem_RawFree(slots_);
      slots_ = slots;
      bits_ = bits;
      std::memset(slots_, 0xFF, sizeof *slots_ << bits);
      for (int64_t node = 0; node < capacity_; ++node)
        if (this->used(node)) place(static_cast<int32_t>(node));
    }
    std::memset(used_ + words(capacity_), 0, (words(capacity) - words(capacity_)) * sizeof *used_);
    capacity_ = capacity;
    return true;
  }

  void prefetch(const uint8_t* key) const { __builtin_prefetch(slots_ + home(key)); }

  // The node with `key`, or kEmpty.
  int32_t find(const uint8_t* key) const {
    for (uint64_t slot = home(key);; slot = next(slot)) {
      const int32_t node = slots_[slot];
      if (node == kEmpty || std::memcmp(this->key(node), key, kKeyBytes) == 0) return node;
    }
  }

  // False when the key is there already. The node must be unused.
  bool insert(const uint8_t* key, int32_t node) {
    uint64_t slot = home(key);
    for (; slots_[slot] != kEmpty; slot = next(slot))
      if (std::memcmp(this->key(slots_[slot]), key, kKeyBytes) == 0) return false;
    slots_[slot] = node;
    std::memcpy(keys_ + node * kKeyBytes, key, kKeyBytes);
    mark(node);
    ++count_;
    return true;
  }

  // The node must have an entry; its mark is left to the caller.
  void erase(int32_t node) {
    uint64_t hole = home(key(node));
    while (slots_[hole] != node) hole = next(hole);
    for (uint64_t slot = next(hole); slots_[slot] != kEmpty; slot = next(slot)) {
      const uint64_t behind_home = (slot - home(key(slots_[slot]))) & mask();
      if (behind_home < ((slot - hole) & mask())) continue;  // the hole lies before its home
      slots_[hole] = slots_[slot];
      hole = slot;
    }
    slots_[hole] = kEmpty;
    --count_;
  }

 private:
  static int64_t words(int64_t capacity) { return (capacity + 63) / 64; }
  uint64_t num_slots() const { return uint64_t{1} << bits_; }
  uint64_t mask() const { return num_slots() - 1; }
  uint64_t next(uint64_t slot) const { return (slot + 1) & mask(); }
  uint64_t home(const uint8_t* key) const {
    uint64_t head;
    std::memcpy(&head, key, sizeof head);
    return (head * multiplier_) >> (64 - bits_);
  }

  void place(int32_t node) {
    uint64_t slot = home(key(node));
    while (slots_[slot] != kEmpty) slot = next(slot);
    slots_[slot] = node;
  }

  uint8_t* keys_ = nullptr;
  uint64_t* used_ = nullptr;  // one bit per node
  int32_t* slots_ = nullptr;
  int bits_ = 0;
  uint64_t multiplier_;
  int64_t capacity_ = 0;
  int64_t count_ = 0;
};

struct KeyIndex {
  PyObject_HEAD
  Table* table;
};

Table& table_of(PyObject* self) { return *reinterpret_cast<KeyIndex*>(self)->table; }

// The bytes of a key, or null with an exception set.
const uint8_t* key_bytes(PyObject* object) {
  if (PyBytes_Check(object) && PyBytes_GET_SIZE(object) == kKeyBytes)
    return reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(object));
  if (!PyBytes_Check(object)) {
    PyErr_Format(PyExc_TypeError, "a key must be bytes, not %.100s", Py_TYPE(object)->tp_name);
  } else {
    PyErr_Format(PyExc_ValueError, "a key must have %zd bytes, not %zd", kKeyBytes, PyBytes_GET_SIZE(object));
  }
  return nullptr;
}

PyObject* new_key(const Table& table, int64_t node) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(table.key(node)), kKeyBytes);
}

bool check_range(const Table& table, int64_t node) {
  if (node >= 0 && node < table.capacity()) return true;
  PyErr_Format(PyExc_IndexError, "node %lld is not in 0..%lld", static_cast<long long>(node),
               static_cast<long long>(table.capacity() - 1));
  return false;
}

bool check_used(const Table& table, int64_t node) {
  if (!check_range(table, node)) return false;
  if (table.used(node)) return true;
  PyErr_Format(PyExc_ValueError, "node %lld has no key", static_cast<long long>(node));
  return false;
}

bool checked_grow(Table& table, Py_ssize_t capacity) {
  if (capacity < table.capacity() || capacity > kMaxCapacity) {
    PyErr_Format(PyExc_ValueError, "the capacity must be in %lld..%lld, not %zd",
                 static_cast<long long>(table.capacity()), static_cast<long long>(kMaxCapacity), capacity);
    return false;
  }
  if (table.grow(capacity)) return true;
  PyErr_NoMemory();
  return false;
}

PyObject* index_new(PyTypeObject* type, PyObject* arguments, PyObject* names) {
  Py_ssize_t capacity;
  static const char* kNames[] = {"capacity", nullptr};
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "n", const_cast<char**>(kNames), &capacity)) return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  try {
    reinterpret_cast<KeyIndex*>(self)->table = new Table;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    Py_DECREF(self);
    return nullptr;
  }
  if (!checked_grow(table_of(self), capacity)) {
    Py_DECREF(self);
    return nullptr;
  }
  return self;
}

void index_free(PyObject* self) {
  delete reinterpret_cast<KeyIndex*>(self)->table;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

Py_ssize_t index_length(PyObject* self) { return static_cast<Py_ssize_t>(table_of(self).count()); }

PyObject* index_grow(PyObject* self, PyObject* argument) {
  const Py_ssize_t capacity = PyLong_AsSsize_t(argument);
  if (capacity == -1 && PyErr_Occurred()) return nullptr;
  if (!checked_grow(table_of(self), capacity)) return nullptr;
  Py_RETURN_NONE;
}

PyObject* index_find(PyObject* self, PyObject* argument) {
  const uint8_t* key = key_bytes(argument);
  return key == nullptr ? nullptr : PyLong_FromLong(table_of(self).find(key));
}

// The items of a list or tuple of keys; `holder` keeps them alive.
bool key_items(PyObject* object, PyObject** holder, PyObject*** items, Py_ssize_t* count) {
  *holder = PySequence_Fast(object, "keys must be a sequence of bytes");
  if (*holder == nullptr) return false;
  *items = PySequence_Fast_ITEMS(*holder);
  *count = PySequence_Fast_GET_SIZE(*holder);
  return true;
}

PyObject* walk_items(const Table& table, PyObject** items, Py_ssize_t count, int32_t* out) {
  Py_ssize_t found = 0;
  for (; found < count; ++found) {
    const Py_ssize_t ahead = found + kLookahead;
    if (ahead < count && PyBytes_Check(items[ahead]) && PyBytes_GET_SIZE(items[ahead]) == kKeyBytes)
      table.prefetch(reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(items[ahead])));
    const uint8_t* key = key_bytes(items[found]);
    if (key == nullptr) return nullptr;
    const int32_t node = table.find(key);
    if (node == kEmpty) break;
    out[found] = node;
  }
  return PyLong_FromSsize_t(found);
}

PyObject* index_walk_into(PyObject* self, PyObject* const* arguments, Py_ssize_t num_arguments) {
  if (num_arguments != 2) {
    PyErr_SetString(PyExc_TypeError, "walk_into(keys, out) takes two arguments");
    return nullptr;
  }
  PyObject* holder;
  PyObject** items;
  Py_ssize_t count;
  BufferView out;
  if (!out.acquire(arguments[1], 4, true, "out")) return nullptr;
  if (!key_items(arguments[0], &holder, &items, &count)) return nullptr;
  PyObject* found = nullptr;
  if (out.size() / 4 < count) {
    PyErr_Format(PyExc_ValueError, "out must have room for %zd nodes", count);
  } else {
    found = walk_items(table_of(self), items, count, out.numbers());
  }
  Py_DECREF(holder);
  return found;
}

bool add_item(Table& table, PyObject* item, int32_t node) {
  const uint8_t* key = key_bytes(item);
  if (key == nullptr || !check_range(table, node)) return false;
  if (table.used(node)) {
    PyErr_Format(PyExc_ValueError, "node %d has a key already", node);
    return false;
  }
  if (table.insert(key, node)) return true;
  PyErr_Format(PyExc_ValueError, "the key for node %d belongs to node %d", node, table.find(key));
  return false;
}

PyObject* index_add(PyObject* self, PyObject* const* arguments, Py_ssize_t num_arguments) {
  if (num_arguments != 2) {
    PyErr_SetString(PyExc_TypeError, "add(keys, nodes) takes two arguments");
    return nullptr;
  }
  Table& table = table_of(self);
  PyObject* holder;
  PyObject** items;
  Py_ssize_t count, added = 0;
  BufferView nodes;
  if (!nodes.acquire(arguments[1], 4, false, "nodes")) return nullptr;
  if (!key_items(arguments[0], &holder, &items, &count)) return nullptr;
  if (nodes.size() / 4 != count) {
    PyErr_Format(PyExc_ValueError, "%zd keys need as many nodes, not %zd", count, nodes.size() / 4);
    Py_DECREF(holder);
    return nullptr;
  }
  while (added < count && add_item(table, items[added], nodes.numbers()[added])) ++added;
  Py_DECREF(holder);
  if (added == count) Py_RETURN_NONE;
  while (added-- > 0) {
    table.erase(nodes.numbers()[added]);
    table.unmark(nodes.numbers()[added]);
  }
  return nullptr;
}

PyObject* list_keys(const Table& table, const BufferView& nodes) {
  const Py_ssize_t count = nodes.size() / 4;
  PyObject* list = PyList_New(count);
  for (Py_ssize_t i = 0; list != nullptr && i < count; ++i) {
    PyObject* key = check_used(table, nodes.numbers()[i]) ? new_key(table, nodes.numbers()[i]) : nullptr;
    if (key == nullptr) {
      Py_CLEAR(list);
    } else {
      PyList_SET_ITEM(list, i, key);
    }
  }
  return list;
}

PyObject* index_remove(PyObject* self, PyObject* argument) {
  Table& table = table_of(self);
  BufferView nodes;
  if (!nodes.acquire(argument, 4, false, "nodes")) return nullptr;
  PyObject* keys = list_keys(table, nodes);
  if (keys == nullptr) return nullptr;
  const int32_t* numbers = nodes.numbers();
  const Py_ssize_t count = nodes.size() / 4;
  // Taking the marks first finds a node that is named twice before anything is removed.
  Py_ssize_t unmarked = 0;
  for (; unmarked < count && table.used(numbers[unmarked]); ++unmarked) table.unmark(numbers[unmarked]);
  if (unmarked < count) {
    PyErr_Format(PyExc_ValueError, "node %d is named twice", numbers[unmarked]);
    while (unmarked-- > 0) table.mark(numbers[unmarked]);
    Py_DECREF(keys);
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < count; ++i) table.erase(numbers[i]);
  return keys;
}

PyObject* index_key(PyObject* self, PyObject* argument) {
  const Py_ssize_t node = PyLong_AsSsize_t(argument);
  if (node == -1 && PyErr_Occurred()) return nullptr;
  return check_used(table_of(self), node) ? new_key(table_of(self), node) : nullptr;
}

PyObject* index_keys(PyObject* self, PyObject* argument) {
  BufferView nodes;
  if (!nodes.acquire(argument, 4, false, "nodes")) return nullptr;
  return list_keys(table_of(self), nodes);
}

PyObject* index_names(PyObject* self, PyObject* argument) {
  const Table& table = table_of(self);
  BufferView nodes;
  if (!nodes.acquire(argument, 4, false, "nodes")) return nullptr;
  const int32_t* numbers = nodes.numbers();
  const Py_ssize_t count = nodes.size() / 4;
  for (Py_ssize_t i = 0; i < count; ++i)
    if (!check_range(table, numbers[i])) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (i + kLookahead < count) table.prefetch(table.key(numbers[i + kLookahead]));
    if (!table.used(numbers[i]) || table.find(table.key(numbers[i])) != numbers[i]) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

PyObject* index_nbytes(PyObject* self, PyObject*) { return PyLong_FromSize_t(table_of(self).bytes()); }

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef index_methods[] = {
    {"grow", index_grow, METH_O, "grow(capacity)\n\nMake room for nodes 0..capacity-1."},
    {"find", index_find, METH_O, "find(key) -> int\n\nThe node with this key, or -1."},
    {"walk_into", fast(index_walk_into), METH_FASTCALL,
     "walk_into(keys, out) -> int\n\nWrite the nodes of the longest leading run of keys that is present; its length."},
    {"add", fast(index_add), METH_FASTCALL, "add(keys, nodes)\n\nAll of them, or none and an error."},
    {"remove", index_remove, METH_O, "remove(nodes) -> list[bytes]\n\nAll of them, or none and an error; their keys."},
    {"key", index_key, METH_O, "key(node) -> bytes"},
    {"keys", index_keys, METH_O, "keys(nodes) -> list[bytes]"},
    {"names", index_names, METH_O, "names(nodes) -> bool\n\nWhether each of them has a key by which it is found."},
    {"nbytes", index_nbytes, METH_NOARGS, "nbytes() -> int"},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot index_slots[] = {
    {Py_tp_doc, const_cast<char*>("KeyIndex(capacity)\n--\n\nWhich node has a 32-byte key.")},
    {Py_tp_new, reinterpret_cast<void*>(index_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(index_free)},
    {Py_tp_methods, index_methods},
    {Py_sq_length, reinterpret_cast<void*>(index_length)},
    {0, nullptr},
};

PyType_Spec index_spec = {
    "kvmesh.kernels._native.KeyIndex", sizeof(KeyIndex), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, index_slots,
};

}  // namespace

// Adds the type to the module. Returns 0, or -1 with an exception set.
extern "C" int kvmesh_key_index_init(PyObject* module) {
  PyObject* type = PyType_FromModuleAndSpec(module, &index_spec, nullptr);
  if (type == nullptr) return -1;
  const int status = PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type));
  Py_DECREF(type);
  return status;
}
