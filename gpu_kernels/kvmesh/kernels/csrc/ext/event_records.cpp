// From a payload of KV events to records of kvmesh.events, as a function of the extension module.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstring>
#include <new>

#include "buffer_view.h"
#include "event_batch.h"

namespace {

using kvmesh::WireBatch;
using kvmesh::WireEvent;
using kvmesh::WireNumber;
using kvmesh::WireText;

// Owns one reference.
class Ref {
 public:
  explicit Ref(PyObject* object = nullptr) : object_(object) {}
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() {
    PyObject* object = object_;
    object_ = nullptr;
    return object;
  }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

// Keywords of the records' constructors.
PyObject* keywords(std::initializer_list<const char*> names) {
  Ref tuple(PyTuple_New(static_cast<Py_ssize_t>(names.size())));
  if (!tuple) return nullptr;
  Py_ssize_t i = 0;
  for (const char* name : names) {
    PyObject* text = PyUnicode_InternFromString(name);
    if (text == nullptr) return nullptr;
    PyTuple_SET_ITEM(tuple.get(), i++, text);
  }
  return tuple.release();
}

// The types of the records, which the caller hands in.
struct Kit {
  PyObject* stored;
  PyObject* removed;
  PyObject* tiers;     // medium -> tier; None, too
  PyObject* as_array;  // bytes -> int32 array
};

PyObject* text_or_none(const WireText& text) {
  if (text.data == nullptr) Py_RETURN_NONE;
  return PyUnicode_DecodeUTF8(text.data, text.size, nullptr);
}

PyObject* number_or_none(const WireNumber& number) {
  if (!number.present) Py_RETURN_NONE;
  return PyLong_FromLongLong(number.value);
}

PyObject* hash_list(const WireBatch& batch, const WireEvent& event) {
  Ref list(PyList_New(static_cast<Py_ssize_t>(event.num_hashes)));
  if (!list) return nullptr;
  for (size_t i = 0; i < event.num_hashes; ++i) {
    PyObject* hash = PyLong_FromUnsignedLongLong(batch.hashes[event.first_hash + i]);
    if (hash == nullptr) return nullptr;
    PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), hash);
  }
  return list.release();
}

// A borrowed reference; null without an exception for a medium that is not known.
PyObject* tier_of(const Kit& kit, const WireText& medium) {
  Ref key(text_or_none(medium));
  return key ? PyDict_GetItemWithError(kit.tiers, key.get()) : nullptr;
}

PyObject* make_removed(const Kit& kit, const WireBatch& batch, const WireEvent& event, PyObject* tier) {
  static PyObject* const names = keywords({"hashes", "tier", "group"});
  Ref hashes(hash_list(batch, event)), group(number_or_none(event.group));
  if (names == nullptr || !hashes || !group) return nullptr;
  PyObject* arguments[] = {hashes.get(), tier, group.get()};
  return PyObject_Vectorcall(kit.removed, arguments, 0, names);
}

PyObject* make_stored(const Kit& kit, const WireBatch& batch, const WireEvent& event, PyObject* tier, PyObject* tokens) {
  static PyObject* const names = keywords(
      {"hashes", "parent", "token_ids", "block_size", "tier", "lora", "salt", "group", "kind"});
  static PyObject* const few = keywords({"hashes", "parent", "token_ids", "block_size", "tier"});
  Ref hashes(hash_list(batch, event));
  Ref parent(event.has_parent ? PyLong_FromUnsignedLongLong(event.parent) : Py_NewRef(Py_None));
  Ref block_size(PyLong_FromLongLong(event.block_size));
  if (names == nullptr || few == nullptr || !hashes || !parent || !block_size) return nullptr;
  if (event.lora_name.data == nullptr && !event.lora_id.present && event.salt.data == nullptr && !event.group.present &&
      event.kind.data == nullptr) {
    PyObject* arguments[] = {hashes.get(), parent.get(), tokens, block_size.get(), tier};
    return PyObject_Vectorcall(kit.stored, arguments, 0, few);
  }
  Ref lora(event.lora_name.data != nullptr ? text_or_none(event.lora_name) : number_or_none(event.lora_id));
  Ref salt(text_or_none(event.salt)), group(number_or_none(event.group)), kind(text_or_none(event.kind));
  if (!lora || !salt || !group || !kind) return nullptr;
  PyObject* arguments[] = {hashes.get(), parent.get(), tokens,      block_size.get(), tier,
                           lora.get(),   salt.get(),   group.get(), kind.get()};
  return PyObject_Vectorcall(kit.stored, arguments, 0, names);
}

// The record, or the event's bytes where the dialects have to read it.
PyObject* make_item(const Kit& kit, const WireBatch& batch, const WireEvent& event, PyObject* tokens, bool* plain) {
  *plain = event.plain;
  PyObject* tier = event.plain ? tier_of(kit, event.medium) : nullptr;
  if (tier != nullptr) {
    if (!event.stored) return make_removed(kit, batch, event, tier);
    const auto begin = static_cast<Py_ssize_t>(event.first_token);
    const auto end = static_cast<Py_ssize_t>(event.first_token + event.num_tokens);
    const bool whole = event.num_tokens == batch.tokens.size();
    Ref mine(whole ? Py_NewRef(tokens) : PySequence_GetSlice(tokens, begin, end));
    PyObject* record = mine ? make_stored(kit, batch, event, tier, mine.get()) : nullptr;
    if (record != nullptr || !PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) return record;
  }
  if (PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) return nullptr;
    PyErr_Clear();
  }
  *plain = false;
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(event.begin), event.end - event.begin);
}

PyObject* make_items(const Kit& kit, const WireBatch& batch, Py_ssize_t* maps, Py_ssize_t* arrays) {
  const auto bytes = static_cast<Py_ssize_t>(batch.tokens.size() * sizeof(int32_t));
  Ref packed(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(batch.tokens.data()), bytes));
  Ref tokens(packed ? PyObject_CallOneArg(kit.as_array, packed.get()) : nullptr);
  Ref items(tokens ? PyList_New(static_cast<Py_ssize_t>(batch.events.size())) : nullptr);
  if (!items) return nullptr;
  for (size_t i = 0; i < batch.events.size(); ++i) {
    const WireEvent& event = batch.events[i];
    bool plain;
    PyObject* item = make_item(kit, batch, event, tokens.get(), &plain);
    if (item == nullptr) return nullptr;
    PyList_SET_ITEM(items.get(), static_cast<Py_ssize_t>(i), item);
    if (plain) ++*(event.map ? maps : arrays);
  }
  return items.release();
}

PyObject* read_events(PyObject*, PyObject* args) {
  PyObject* payload;
  Kit kit;
  if (!PyArg_ParseTuple(args, "O(OOO!O)", &payload, &kit.stored, &kit.removed, &PyDict_Type, &kit.tiers,
                        &kit.as_array)) {
    return nullptr;
  }
  kvmesh::BufferView view;
  if (!view.acquire(payload, 1, false, "payload")) return nullptr;
  WireBatch batch;
  try {
    if (!kvmesh::read_event_batch(view.data(), view.data() + view.size(), &batch)) Py_RETURN_NONE;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  Py_ssize_t maps = 0, arrays = 0;
  Ref rank(number_or_none(batch.rank));
  Ref items(rank ? make_items(kit, batch, &maps, &arrays) : nullptr);
  if (!items) return nullptr;
  return Py_BuildValue("dOOnn", batch.ts, rank.get(), items.get(), maps, arrays);
}

}  // namespace

extern "C" PyMethodDef kvmesh_event_methods[];
PyMethodDef kvmesh_event_methods[] = {
    {"read_events", read_events, METH_VARARGS,
     "read_events(payload, (Stored, Removed, {medium: tier}, as_array)) -> (ts, rank, items, maps, arrays) | None\n\n"
     "A batch [ts, events] or [ts, events, rank]; None for any other. Each item is a record, or the bytes of an event\n"
     "that is not plain. maps and arrays count the records by how they were written."},
    {nullptr, nullptr, 0, nullptr},
};
