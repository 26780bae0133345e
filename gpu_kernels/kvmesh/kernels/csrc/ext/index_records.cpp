// Records of Python (kvmesh.events.records) into the index.
#include "event_records.h"
#include "index_object.h"

#include <structmember.h>

namespace kvmesh::index {
namespace {

// An attribute of records. Records are structs whose attributes lie at fixed places: where, is asked once, since asking
// for each attribute of each record by its name would cost more than reading a block of tokens.
class Field {
 public:
  explicit Field(const char* name) : name_(PyUnicode_InternFromString(name)) {}

  bool named() const { return name_ != nullptr; }

  Ref of(PyObject* record) {
    if (Py_TYPE(record) != type_) look_at(Py_TYPE(record));
    if (offset_ > 0) {
      PyObject* value = *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(record) + offset_);
      if (value != nullptr) return Ref::borrowed(value);
    }
    return Ref(PyObject_GetAttr(record, name_));
  }

 private:
  void look_at(PyTypeObject* type) {
    Py_XSETREF(type_, reinterpret_cast<PyTypeObject*>(Py_NewRef(reinterpret_cast<PyObject*>(type))));
    offset_ = 0;
    const Ref descriptor(PyObject_GetAttr(reinterpret_cast<PyObject*>(type), name_));
    if (!descriptor) {
      PyErr_Clear();
    } else if (Py_IS_TYPE(descriptor.get(), &PyMemberDescr_Type)) {
      const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(descriptor.get())->d_member;
      if (member->type == T_OBJECT_EX) offset_ = member->offset;
    }
  }

  PyObject* name_;
  PyTypeObject* type_ = nullptr;
  Py_ssize_t offset_ = 0;
};

struct Fields {
  Field hashes{"hashes"}, parent{"parent"}, token_ids{"token_ids"}, block_size{"block_size"};
  Field tier{"tier"}, lora{"lora"}, salt{"salt"}, extra_keys{"extra_keys"}, group{"group"};
  Field kind{"kind"}, model{"model"}, tenant{"tenant"}, lookahead{"lookahead"};

  bool named() const {
    for (const Field* field : {&hashes, &parent, &token_ids, &block_size, &tier, &lora, &salt, &extra_keys, &group, &kind,
                               &model, &tenant, &lookahead})
      if (!field->named()) return false;
    return true;
  }
};

// Of the two types of records, so that none is looked at anew each time.
Fields& stored_fields() {
  static Fields fields;
  return fields;
}
Fields& removed_fields() {
  static Fields fields;
  return fields;
}

// As of a kind's text; false for what is none.
bool admitted(PyObject* kind, bool single_group) {
  WireText text;
  if (kind != Py_None) {
    Py_ssize_t size;
    text.data = PyUnicode_Check(kind) ? PyUnicode_AsUTF8AndSize(kind, &size) : nullptr;
    if (text.data == nullptr) {
      PyErr_Clear();
      return false;
    }
    text.size = static_cast<uint32_t>(size);
  }
  return kvmesh::index::admitted(text, single_group);
}

// The hash of each block, with its extra keys mixed in: such blocks are equal only with equal keys.
bool read_identities(State& state, PyObject* record, PyObject* extra_keys, PyObject* tokens, Cut cut) {
  if (extra_keys == Py_None) return read_locals(tokens, cut, SIZE_MAX, &state.locals);
  const Ref mixed(PyObject_CallOneArg(state.types.identities.get(), record));
  return mixed && read_hashes(mixed.get(), &state.locals);
}

bool apply_stored(State& state, uint32_t stream, PyObject* record) {
  Fields& fields = stored_fields();
  const Ref hashes(fields.hashes.of(record)), parent(fields.parent.of(record));
  const Ref tokens(fields.token_ids.of(record)), size(fields.block_size.of(record));
  const Ref tier(fields.tier.of(record)), lora(fields.lora.of(record));
  const Ref salt(fields.salt.of(record)), extra(fields.extra_keys.of(record));
  const Ref group(fields.group.of(record)), kind(fields.kind.of(record));
  const Ref model(fields.model.of(record)), tenant(fields.tenant.of(record));
  const Ref lookahead(fields.lookahead.of(record));
  if (!hashes || !parent || !tokens || !size || !tier || !lora || !salt || !extra || !group || !kind || !model ||
      !tenant || !lookahead)
    return false;
  Run run{};
  if (!read_group(group.get(), &run.group) || !read_tier(tier.get(), &run.tier)) return false;
  if (!admitted(kind.get(), state.names[stream].single_group)) {
    const Py_ssize_t count = PyObject_Size(hashes.get());
    if (count < 0) return false;
    if (state.core.known(stream)) state.core.ignore(stream, run.group, static_cast<size_t>(count));
    return true;
  }
  const Py_ssize_t count = num_tokens(tokens.get());
  if (count < 0) return false;
  if (count > 0) {
    if (!read_block_size(size.get(), &run.cut.block_size) || !read_lookahead(lookahead.get(), &run.cut.lookahead))
      return false;
    if (!read_identities(state, record, extra.get(), tokens.get(), run.cut)) return false;
  }
  // Last, since the calls above may run Python code.
  if (!read_optional(parent.get(), &run.parent) || !read_hashes(hashes.get(), &state.hashes)) return false;
  if (!state.core.known(stream)) return true;
  if (count == 0) {
    state.core.move(stream, run.tier, state.hashes.data(), state.hashes.size());
    return true;
  }
  if (state.locals.size() != state.hashes.size()) {
    PyErr_Format(PyExc_ValueError, "%zu blocks of %u tokens need as many hashes, not %zu", state.locals.size(),
                 run.cut.block_size, state.hashes.size());
    return false;
  }
  run.hashes = state.hashes.data();
  run.locals = state.locals.data();
  run.count = state.hashes.size();
  if (!check_different(state, run)) return false;
  run.scope = use_scope(state, stream, model.get(), tenant.get(), lora.get(), salt.get());
  if (run.scope == kNone) return false;
  state.core.store(stream, run);
  state.core.nodes.scopes.drop(run.scope);
  return true;
}

bool apply_removed(State& state, uint32_t stream, PyObject* record) {
  Fields& fields = removed_fields();
  const Ref hashes(fields.hashes.of(record)), tier(fields.tier.of(record));
  const Ref group(fields.group.of(record));
  int of = 0;
  std::optional<int64_t> number;
  if (!hashes || !tier || !group || !read_tier(tier.get(), &of) || !read_group(group.get(), &number)) return false;
  if (!read_hashes(hashes.get(), &state.hashes)) return false;
  if (!state.core.known(stream)) return true;  // the calls above may run Python code
  if (number && state.core.ignores(stream, *number)) return true;
  state.core.remove(stream, of, state.hashes.data(), state.hashes.size());
  return true;
}

bool apply_record(State& state, uint32_t stream, PyObject* record) {
  const PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(record));
  if (type == state.types.stored.get()) return apply_stored(state, stream, record);
  if (type == state.types.removed.get()) return apply_removed(state, stream, record);
  if (type == state.types.cleared.get()) {
    state.core.clear(stream);
    return true;
  }
  PyErr_Format(PyExc_TypeError, "not a record: %.100s", Py_TYPE(record)->tp_name);
  return false;
}

PyObject* apply_all(State& state, uint32_t stream, PyObject* records) {
  if (!stored_fields().named() || !removed_fields().named()) return PyErr_NoMemory();
  if (const WireBatch* batch = events_of(records)) {
    const Ref alive = Ref::borrowed(records);
    return apply_events(state, stream, *batch) ? Py_NewRef(Py_None) : nullptr;
  }
  const Ref items(PySequence_Fast(records, "records must be iterable"));
  if (!items) return nullptr;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.get()) && state.core.known(stream); ++i) {
    const Ref record = Ref::borrowed(PySequence_Fast_GET_ITEM(items.get(), i));
    if (!apply_record(state, stream, record.get())) return nullptr;
  }
  Py_RETURN_NONE;
}

}  // namespace

uint32_t use_scope(State& state, uint32_t stream, PyObject* model, PyObject* tenant, PyObject* lora, PyObject* salt) {
  Scopes& scopes = state.core.nodes.scopes;
  if (model == Py_None && tenant == Py_None && lora == Py_None && salt == Py_None) {
    const uint32_t scope = state.core.source(stream).scope;
    scopes.use(scope);
    return scope;
  }
  const Names& names = state.names[stream];
  state.scope_key.clear();
  const std::pair<PyObject*, const std::string*> parts[] = {
      {model, &names.model}, {tenant, &names.tenant}, {lora, &names.lora}, {salt, &names.salt}};
  for (const auto& [told, base] : parts) {
    if (told == Py_None) {
      state.scope_key += *base;
    } else if (!append_value(told, &state.scope_key)) {
      return kNone;
    }
  }
  return scopes.use(state.scope_key);
}

bool check_different(State& state, const Run& run) {
  if (run.count == 0 || state.distinct(run.parent, run.hashes, run.count)) return true;
  PyErr_SetString(PyExc_ValueError, "the hashes of blocks must differ from each other and from their parent's");
  return false;
}

PyObject* apply_records(State& state, uint32_t stream, PyObject* records) {
  try {
    return apply_all(state, stream, records);
  } catch (const std::bad_alloc&) {
    // Half of a record may be in: nothing of this source can be relied on.
    if (state.core.known(stream)) state.core.clear(stream);
    throw;
  }
}

}  // namespace kvmesh::index
