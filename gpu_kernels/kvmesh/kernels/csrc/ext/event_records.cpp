// From a payload of KV events to records of kvmesh.events, as a function of the extension module.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "buffer_view.h"
#include "event_records.h"
#include "index_states.h"

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
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
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

// A payload that was read, and what makes records of it.
struct Events {
  Events(PyObject* types, const Kit& kit) : types(Py_NewRef(types)), kit(kit) {}

  Ref types;  // keeps the kit alive
  Kit kit;
  kvmesh::BufferView payload;  // the batch's texts lie there
  WireBatch batch;
  Ref tokens;  // of all events, once they have been asked for
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

bool is_text(const WireText& text) {
  if (std::all_of(text.data, text.data + text.size, [](char c) { return static_cast<signed char>(c) >= 0; })) return true;
  const Ref decoded(text_or_none(text));
  if (!decoded) PyErr_Clear();
  return static_cast<bool>(decoded);
}

// Finds the events' tiers. Those of an unknown medium, or with texts that are none, are for the dialects.
void settle_media(const Kit& kit, WireBatch* batch) {
  const WireText* last = nullptr;
  int tier = 0;
  for (WireEvent& event : batch->events) {
    if (!event.plain) continue;
    const WireText& medium = event.medium;
    if (last == nullptr || medium.size != last->size || (medium.data == nullptr) != (last->data == nullptr) ||
        !std::equal(medium.data, medium.data + medium.size, last->data)) {
      PyObject* found = is_text(medium) ? tier_of(kit, medium) : nullptr;
      const long number = found == nullptr ? -1 : PyLong_AsLong(found);
      PyErr_Clear();
      tier = number < kvmesh::index::kTiers ? static_cast<int>(number) : -1;
      last = &medium;
    }
    event.tier = tier;
    event.plain = tier >= 0 && is_text(event.lora_name) && is_text(event.salt) && is_text(event.kind);
  }
}

PyObject* tokens_of(Events& events) {
  if (!events.tokens) {
    const std::vector<int32_t>& tokens = events.batch.tokens;
    const auto bytes = static_cast<Py_ssize_t>(tokens.size() * sizeof(int32_t));
    Ref packed(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(tokens.data()), bytes));
    if (packed) events.tokens = Ref(PyObject_CallOneArg(events.kit.as_array, packed.get()));
  }
  return events.tokens.get();
}

// The record, or the event's bytes where the dialects have to read it.
PyObject* make_item(Events& events, size_t number) {
  const WireEvent& event = events.batch.events[number];
  if (!event.plain)
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(event.begin), event.end - event.begin);
  PyObject* tier = tier_of(events.kit, event.medium);
  if (tier == nullptr) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_KeyError, "the medium's tier is not there any more");
    return nullptr;
  }
  if (!event.stored) return make_removed(events.kit, events.batch, event, tier);
  PyObject* tokens = tokens_of(events);
  if (tokens == nullptr) return nullptr;
  const auto begin = static_cast<Py_ssize_t>(event.first_token);
  const auto end = static_cast<Py_ssize_t>(event.first_token + event.num_tokens);
  const bool whole = event.num_tokens == events.batch.tokens.size();
  Ref mine(whole ? Py_NewRef(tokens) : PySequence_GetSlice(tokens, begin, end));
  return mine ? make_stored(events.kit, events.batch, event, tier, mine.get()) : nullptr;
}

struct EventRecords {
  PyObject_HEAD
  Events* events;
};

PyTypeObject* records_type = nullptr;

Events& events_in(PyObject* self) { return *reinterpret_cast<EventRecords*>(self)->events; }

void records_free(PyObject* self) {
  delete reinterpret_cast<EventRecords*>(self)->events;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

Py_ssize_t records_length(PyObject* self) { return static_cast<Py_ssize_t>(events_in(self).batch.events.size()); }

PyObject* records_item(PyObject* self, Py_ssize_t number) {
  if (number >= 0 && number < records_length(self)) return make_item(events_in(self), static_cast<size_t>(number));
  PyErr_SetString(PyExc_IndexError, "there are not so many records");
  return nullptr;
}

// As a list of them would be compared.
PyObject* records_compare(PyObject* self, PyObject* other, int how) {
  if (!PyList_Check(other) && !Py_IS_TYPE(other, records_type)) Py_RETURN_NOTIMPLEMENTED;
  const Ref mine(PySequence_List(self)), others(PySequence_List(other));
  return mine && others ? PyObject_RichCompare(mine.get(), others.get(), how) : nullptr;
}

// All of them as an object of their own if all are plain, else a list of records and bytes.
PyObject* make_items(std::unique_ptr<Events> events) {
  const std::vector<WireEvent>& all = events->batch.events;
  if (std::all_of(all.begin(), all.end(), [](const WireEvent& event) { return event.plain; })) {
    PyObject* records = records_type->tp_alloc(records_type, 0);
    if (records != nullptr) reinterpret_cast<EventRecords*>(records)->events = events.release();
    return records;
  }
  Ref items(PyList_New(static_cast<Py_ssize_t>(all.size())));
  for (size_t i = 0; items && i < all.size(); ++i) {
    PyObject* item = make_item(*events, i);
    if (item == nullptr) return nullptr;
    PyList_SET_ITEM(items.get(), static_cast<Py_ssize_t>(i), item);
  }
  return items.release();
}

PyObject* read_events(PyObject*, PyObject* args) {
  PyObject *payload, *types;
  Kit kit;
  if (!PyArg_ParseTuple(args, "OO!", &payload, &PyTuple_Type, &types) ||
      !PyArg_ParseTuple(types, "OOO!O", &kit.stored, &kit.removed, &PyDict_Type, &kit.tiers, &kit.as_array)) {
    return nullptr;
  }
  try {
    auto events = std::make_unique<Events>(types, kit);
    const kvmesh::BufferView& view = events->payload;
    if (PyBytes_CheckExact(payload)) {
      if (!events->payload.acquire(payload, 1, false, "payload")) return nullptr;
    } else {  // it may change while the records are there
      kvmesh::BufferView lent;
      if (!lent.acquire(payload, 1, false, "payload")) return nullptr;
      const Ref copy(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(lent.data()), lent.size()));
      if (!copy || !events->payload.acquire(copy.get(), 1, false, "payload")) return nullptr;
    }
    WireBatch& batch = events->batch;
    if (!kvmesh::read_event_batch(view.data(), view.data() + view.size(), &batch)) Py_RETURN_NONE;
    settle_media(kit, &batch);
    Py_ssize_t maps = 0, arrays = 0;
    for (const WireEvent& event : batch.events)
      if (event.plain) ++(event.map ? maps : arrays);
    const double ts = batch.ts;
    Ref rank(number_or_none(batch.rank));
    Ref items(rank ? make_items(std::move(events)) : nullptr);
    return items ? Py_BuildValue("dOOnn", ts, rank.get(), items.get(), maps, arrays) : nullptr;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

}  // namespace

namespace kvmesh {

const WireBatch* events_of(PyObject* object) {
  return Py_IS_TYPE(object, records_type) ? &events_in(object).batch : nullptr;
}

}  // namespace kvmesh

// Adds the type to the module. Returns 0, or -1 with an exception set.
extern "C" int kvmesh_event_records_init(PyObject* module) {
  PyType_Slot slots[] = {
      {Py_tp_doc, const_cast<char*>("The records of a payload, made when they are asked for.")},
      {Py_tp_dealloc, reinterpret_cast<void*>(records_free)},
      {Py_sq_length, reinterpret_cast<void*>(records_length)},
      {Py_sq_item, reinterpret_cast<void*>(records_item)},
      {Py_tp_richcompare, reinterpret_cast<void*>(records_compare)},
      {0, nullptr},
  };
  PyType_Spec spec = {"kvmesh.kernels._native.EventRecords", sizeof(EventRecords), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  PyObject* type = PyType_FromModuleAndSpec(module, &spec, nullptr);
  if (type == nullptr) return -1;
  Py_XSETREF(records_type, reinterpret_cast<PyTypeObject*>(type));
  return PyModule_AddType(module, records_type);
}

extern "C" PyMethodDef kvmesh_event_methods[];
PyMethodDef kvmesh_event_methods[] = {
    {"read_events", read_events, METH_VARARGS,
     "read_events(payload, (Stored, Removed, {medium: tier}, as_array)) -> (ts, rank, items, maps, arrays) | None\n\n"
     "A batch [ts, events] or [ts, events, rank]; None for any other. The items are EventRecords, or a list with the\n"
     "bytes of events that are not plain. maps and arrays count the records by how they were written."},
    {nullptr, nullptr, 0, nullptr},
};
