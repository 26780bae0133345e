// PageStates: who uses each page of a pool, and the queues of the pages that may leave a level.
//
// A queue is a doubly linked list through the pages, one for each level and priority, so that a page is taken out of
// the middle in constant time. The users of a page are counted in one number (see kvmesh.cache.page_states), so that a
// change of state is one addition and a comparison. The arrays of numbers belong to the caller and are borrowed.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include "buffer_view.h"

namespace {

using kvmesh::BufferView;
using kvmesh::Int32View;

constexpr int64_t kHold = 1;
constexpr int64_t kPin = int64_t{1} << 20;
constexpr int64_t kLock = int64_t{1} << 40;
constexpr int64_t kField = kPin - 1;

constexpr int32_t kNone = -1;
constexpr int kPriorities = 256;
constexpr int kMaxLevels = 8;

bool is_fixed(int64_t uses) { return uses >= kPin; }
bool is_held(int64_t uses) { return uses > 0 && uses < kPin; }

// Pages that may leave one level, the first to go first.
class Queue {
 public:
  int64_t count = 0;

  bool empty(int priority) const { return ends_[priority].first == kNone; }
  int lowest() const {
    for (int word = 0; word < kPriorities / 64; ++word)
      if (filled_[word] != 0) return word * 64 + __builtin_ctzll(filled_[word]);
    return kNone;
  }

  struct Ends {
    int32_t first = kNone, last = kNone;
  };
  Ends& ends(int priority) { return ends_[priority]; }
  void note(int priority) {
    const uint64_t bit = uint64_t{1} << (priority & 63);
    if (empty(priority)) {
      filled_[priority >> 6] &= ~bit;
    } else {
      filled_[priority >> 6] |= bit;
    }
  }

 private:
  Ends ends_[kPriorities];
  uint64_t filled_[kPriorities / 64] = {};
};

struct Link {
  int32_t before, after;
};

struct States {
  // Borrowed columns, one entry per page.
  BufferView uses_view, level_view, group_view, priority_view, slot_view, node_view, num_tokens_view;
  int64_t* uses = nullptr;
  uint8_t *level = nullptr, *group = nullptr, *priority = nullptr;
  int32_t *slot = nullptr, *node = nullptr, *num_tokens = nullptr;

  int64_t num_pages = 0;
  int num_levels = 0;
  int64_t num_locked = 0;
  int64_t num_fixed[kMaxLevels] = {}, num_held[kMaxLevels] = {};
  Queue queues[kMaxLevels];
  std::vector<Link> links;
  std::vector<uint8_t> queued_level;     // 1 + level of the queue that a page is in, 0 for none
  std::vector<uint8_t> queued_priority;  // the priority that it was queued with

  void push(int32_t page, bool front) {
    const int at = level[page], rank = priority[page];
    Queue& queue = queues[at];
    Queue::Ends& ends = queue.ends(rank);
    Link& link = links[page];
    link = front ? Link{kNone, ends.first} : Link{ends.last, kNone};
    if (link.before != kNone) links[link.before].after = page;
    if (link.after != kNone) links[link.after].before = page;
    if (front || ends.first == kNone) ends.first = page;
    if (!front || ends.last == kNone) ends.last = page;
    queue.note(rank);
    ++queue.count;
    queued_level[page] = static_cast<uint8_t>(at + 1);
    queued_priority[page] = static_cast<uint8_t>(rank);
  }

  void discard(int32_t page) {
    if (queued_level[page] == 0) return;
    const int rank = queued_priority[page];
    Queue& queue = queues[queued_level[page] - 1];
    Queue::Ends& ends = queue.ends(rank);
    const Link link = links[page];
    (link.before == kNone ? ends.first : links[link.before].after) = link.after;
    (link.after == kNone ? ends.last : links[link.after].before) = link.before;
    queue.note(rank);
    --queue.count;
    queued_level[page] = 0;
  }

  // Whether a page may wait in the queue of its level, apart from damage, which the caller knows about.
  bool may_leave(int32_t page) const { return uses[page] == 0 || (is_held(uses[page]) && level[page] + 1 < num_levels); }

  // Returns whether nobody needs the page any more and no node offers it.
  bool change(int32_t page, int64_t delta) {
    const int64_t before = uses[page], after = before + delta;
    uses[page] = after;
    num_locked += (after >= kLock) - (before >= kLock);
    num_fixed[level[page]] += is_fixed(after) - is_fixed(before);
    num_held[level[page]] += is_held(after) - is_held(before);
    if (is_fixed(after)) {
      if (!is_fixed(before)) discard(page);
      return false;
    }
    if (after == 0) {
      discard(page);
      if (node[page] == kNone) return true;
      push(page, false);
    } else if (!is_held(before)) {
      discard(page);
      if (level[page] + 1 < num_levels) push(page, false);
    }
    return false;
  }
};

struct PageStates {
  PyObject_HEAD
  States* states;
};

States& states_of(PyObject* self) { return *reinterpret_cast<PageStates*>(self)->states; }

bool acquire_pages(PyObject* object, const States& states, Int32View& pages) {
  if (!pages.acquire(object, "pages")) return false;
  for (Py_ssize_t i = 0; i < pages.size(); ++i) {
    if (pages[i] >= 0 && pages[i] < states.num_pages) continue;
    PyErr_Format(PyExc_IndexError, "page %d is not in 0..%lld", pages[i], static_cast<long long>(states.num_pages - 1));
    return false;
  }
  return true;
}

bool check_level(const States& states, Py_ssize_t level) {
  if (level >= 0 && level < states.num_levels) return true;
  PyErr_Format(PyExc_IndexError, "level %zd is not in 0..%d", level, states.num_levels - 1);
  return false;
}

// The columns in the order of the constructor's arguments, with the bytes of an entry.
struct Column {
  const char* name;
  BufferView States::*view;
  Py_ssize_t item_bytes;
};
constexpr Column kColumns[] = {
    {"uses", &States::uses_view, 8},         {"level", &States::level_view, 1},
    {"group", &States::group_view, 1},       {"priority", &States::priority_view, 1},
    {"slot", &States::slot_view, 4},         {"node", &States::node_view, 4},
    {"num_tokens", &States::num_tokens_view, 4},
};
constexpr Py_ssize_t kNumColumns = sizeof kColumns / sizeof kColumns[0];

bool borrow_columns(PyObject* columns, States& states) {
  if (!PyTuple_Check(columns) || PyTuple_GET_SIZE(columns) != kNumColumns) {
    PyErr_Format(PyExc_TypeError, "the columns must be a tuple of %zd arrays", kNumColumns);
    return false;
  }
  for (Py_ssize_t i = 0; i < kNumColumns; ++i) {
    BufferView& view = states.*kColumns[i].view;
    if (!view.acquire(PyTuple_GET_ITEM(columns, i), kColumns[i].item_bytes, true, kColumns[i].name)) return false;
    const Py_ssize_t entries = view.size() / kColumns[i].item_bytes;
    if (i == 0) states.num_pages = entries;
    if (entries == states.num_pages) continue;
    PyErr_SetString(PyExc_ValueError, "the columns must have one entry for each page");
    return false;
  }
  states.uses = reinterpret_cast<int64_t*>(states.uses_view.words());
  states.level = states.level_view.bytes();
  states.group = states.group_view.bytes();
  states.priority = states.priority_view.bytes();
  states.slot = states.slot_view.numbers();
  states.node = states.node_view.numbers();
  states.num_tokens = states.num_tokens_view.numbers();
  return true;
}

PyObject* states_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject* columns;
  int num_levels;
  if (!PyArg_ParseTuple(arguments, "Oi", &columns, &num_levels)) return nullptr;
  if (num_levels < 1 || num_levels > kMaxLevels) {
    PyErr_Format(PyExc_ValueError, "1 to %d levels, not %d", kMaxLevels, num_levels);
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  States* states = new (std::nothrow) States;
  if (states == nullptr) {
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  reinterpret_cast<PageStates*>(self)->states = states;
  states->num_levels = num_levels;
  if (!borrow_columns(columns, *states)) {
    Py_DECREF(self);
    return nullptr;
  }
  try {
    states->links.resize(states->num_pages);
    states->queued_level.resize(states->num_pages);
    states->queued_priority.resize(states->num_pages);
  } catch (const std::bad_alloc&) {
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  return self;
}

void states_free(PyObject* self) {
  delete reinterpret_cast<PageStates*>(self)->states;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// Refuses to take away what is not there: a borrow would corrupt the other counts.
const char* missing(int64_t uses, int64_t delta) {
  if ((delta == -kLock || delta == kHold - kLock) && uses < kLock) return "unlock of a page that is not locked";
  if ((delta == -kPin || delta == kHold - kPin) && (uses >> 20 & kField) == 0) return "unpin of a page that is not pinned";
  if ((delta == -kHold || delta == kLock - kHold || delta == kPin - kHold) && (uses & kField) == 0) return "unhold of a page that is not held";
  return nullptr;
}

// New pages: where they are, whose they are; nothing is in them yet.
PyObject* states_place(PyObject* self, PyObject* const* arguments, Py_ssize_t num_arguments) {
  if (num_arguments != 5) {
    PyErr_SetString(PyExc_TypeError, "place(pages, slots, level, group, priorities) takes five arguments");
    return nullptr;
  }
  States& states = states_of(self);
  Int32View pages, slots;
  BufferView priorities;
  if (!acquire_pages(arguments[0], states, pages) || !slots.acquire(arguments[1], "slots")) return nullptr;
  const Py_ssize_t level = PyLong_AsSsize_t(arguments[2]);
  const long group = PyLong_AsLong(arguments[3]);
  if (PyErr_Occurred() || !check_level(states, level)) return nullptr;
  const bool one_priority = PyLong_Check(arguments[4]);
  const long priority = one_priority ? PyLong_AsLong(arguments[4]) : 0;
  if (one_priority ? priority == -1 && PyErr_Occurred() : !priorities.acquire(arguments[4], 1, false, "priorities"))
    return nullptr;
  const Py_ssize_t count = pages.size();
  if (slots.size() != count || (!one_priority && priorities.size() != count)) {
    PyErr_Format(PyExc_ValueError, "%zd pages need as many slots and priorities", count);
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    const int32_t page = pages[i];
    states.slot[page] = slots[i];
    states.level[page] = static_cast<uint8_t>(level);
    states.group[page] = static_cast<uint8_t>(group);
    states.priority[page] = one_priority ? static_cast<uint8_t>(priority) : priorities.data()[i];
    states.num_tokens[page] = 0;
  }
  Py_RETURN_NONE;
}

PyObject* states_change(PyObject* self, PyObject* const* arguments, Py_ssize_t num_arguments) {
  if (num_arguments != 3) {
    PyErr_SetString(PyExc_TypeError, "change(pages, delta, freed) takes three arguments");
    return nullptr;
  }
  States& states = states_of(self);
  Int32View pages;
  BufferView freed;
  if (!acquire_pages(arguments[0], states, pages) || !freed.acquire(arguments[2], 4, true, "freed")) return nullptr;
  const int64_t delta = PyLong_AsLongLong(arguments[1]);
  if (delta == -1 && PyErr_Occurred()) return nullptr;
  const Py_ssize_t count = pages.size();
  if (freed.size() / 4 < count) {
    PyErr_Format(PyExc_ValueError, "freed must have room for %zd pages", count);
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (const char* problem = missing(states.uses[pages[i]], delta)) {
      PyErr_SetString(PyExc_ValueError, problem);
      return nullptr;
    }
  }
  Py_ssize_t num_freed = 0;
  for (Py_ssize_t i = 0; i < count; ++i)
    if (states.change(pages[i], delta)) freed.numbers()[num_freed++] = pages[i];
  return PyLong_FromSsize_t(num_freed);
}

PyObject* states_push(PyObject* self, PyObject* const* arguments, Py_ssize_t num_arguments) {
  if (num_arguments != 2) {
    PyErr_SetString(PyExc_TypeError, "push(pages, front) takes two arguments");
    return nullptr;
  }
  States& states = states_of(self);
  Int32View pages;
  if (!acquire_pages(arguments[0], states, pages)) return nullptr;
  const int front = PyObject_IsTrue(arguments[1]);
  if (front < 0) return nullptr;
  const Py_ssize_t count = pages.size();
  for (Py_ssize_t i = 0; i < count; ++i) {
    const int32_t page = pages[front ? count - 1 - i : i];
    states.discard(page);
    if (states.may_leave(page)) states.push(page, front != 0);
  }
  Py_RETURN_NONE;
}

PyObject* states_discard(PyObject* self, PyObject* argument) {
  States& states = states_of(self);
  Int32View pages;
  if (!acquire_pages(argument, states, pages)) return nullptr;
  for (Py_ssize_t i = 0; i < pages.size(); ++i) states.discard(pages[i]);
  Py_RETURN_NONE;
}

PyObject* states_pop(PyObject* self, PyObject* const* arguments, Py_ssize_t num_arguments) {
  if (num_arguments != 2) {
    PyErr_SetString(PyExc_TypeError, "pop(level, out) takes two arguments");
    return nullptr;
  }
  States& states = states_of(self);
  BufferView out;
  if (!out.acquire(arguments[1], 4, true, "out")) return nullptr;
  const Py_ssize_t level = PyLong_AsSsize_t(arguments[0]);
  if ((level == -1 && PyErr_Occurred()) || !check_level(states, level)) return nullptr;
  Queue& queue = states.queues[level];
  Py_ssize_t taken = 0;
  while (taken < out.size() / 4 && queue.count > 0) {
    const int32_t page = queue.ends(queue.lowest()).first;
    states.discard(page);
    out.numbers()[taken++] = page;
  }
  return PyLong_FromSsize_t(taken);
}

PyObject* states_queued(PyObject* self, PyObject* argument) {
  const Py_ssize_t level = PyLong_AsSsize_t(argument);
  if ((level == -1 && PyErr_Occurred()) || !check_level(states_of(self), level)) return nullptr;
  return PyLong_FromLongLong(states_of(self).queues[level].count);
}

PyObject* states_held(PyObject* self, PyObject* argument) {
  const Py_ssize_t level = PyLong_AsSsize_t(argument);
  if ((level == -1 && PyErr_Occurred()) || !check_level(states_of(self), level)) return nullptr;
  return PyLong_FromLongLong(states_of(self).num_held[level]);
}

PyObject* states_fixed(PyObject* self, PyObject* argument) {
  const Py_ssize_t level = PyLong_AsSsize_t(argument);
  if ((level == -1 && PyErr_Occurred()) || !check_level(states_of(self), level)) return nullptr;
  return PyLong_FromLongLong(states_of(self).num_fixed[level]);
}

PyObject* states_is_queued(PyObject* self, PyObject* argument) {
  const Py_ssize_t page = PyLong_AsSsize_t(argument);
  if (page == -1 && PyErr_Occurred()) return nullptr;
  if (page < 0 || page >= states_of(self).num_pages) {
    PyErr_Format(PyExc_IndexError, "page %zd", page);
    return nullptr;
  }
  return PyBool_FromLong(states_of(self).queued_level[page] != 0);
}

PyObject* states_queued_into(PyObject* self, PyObject* argument) {
  const States& states = states_of(self);
  BufferView out;
  if (!out.acquire(argument, 1, true, "out")) return nullptr;
  if (out.size() != states.num_pages) {
    PyErr_Format(PyExc_ValueError, "out must have a byte for each of %lld pages",
                 static_cast<long long>(states.num_pages));
    return nullptr;
  }
  for (int64_t page = 0; page < states.num_pages; ++page) out.bytes()[page] = states.queued_level[page] != 0;
  Py_RETURN_NONE;
}

// The used ones among `pages` are about to be on `level`: must be called before the level column is changed.
PyObject* states_relocate(PyObject* self, PyObject* const* arguments, Py_ssize_t num_arguments) {
  if (num_arguments != 2) {
    PyErr_SetString(PyExc_TypeError, "relocate(pages, level) takes two arguments");
    return nullptr;
  }
  States& states = states_of(self);
  Int32View pages;
  if (!acquire_pages(arguments[0], states, pages)) return nullptr;
  const Py_ssize_t level = PyLong_AsSsize_t(arguments[1]);
  if ((level == -1 && PyErr_Occurred()) || !check_level(states, level)) return nullptr;
  for (Py_ssize_t i = 0; i < pages.size(); ++i) {
    const int32_t page = pages[i];
    states.discard(page);
    if (states.uses[page] == 0) continue;
    int64_t* counts = is_held(states.uses[page]) ? states.num_held : states.num_fixed;
    --counts[states.level[page]];
    ++counts[level];
  }
  Py_RETURN_NONE;
}

PyObject* states_num_locked(PyObject* self, void*) { return PyLong_FromLongLong(states_of(self).num_locked); }
PyObject* states_nbytes(PyObject* self, PyObject*) {
  return PyLong_FromSize_t(sizeof(States) + states_of(self).num_pages * (sizeof(Link) + 2));
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef states_methods[] = {
    {"change", fast(states_change), METH_FASTCALL,
     "change(pages, delta, freed) -> int\n\nAdd delta to the uses of each page; all of them, or none and an error."},
    {"place", fast(states_place), METH_FASTCALL,
     "place(pages, slots, level, group, priorities)\n\nFill in the columns of pages that were free."},
    {"push", fast(states_push), METH_FASTCALL,
     "push(pages, front)\n\nQueue those that may leave their level, behind or ahead of the others."},
    {"discard", states_discard, METH_O, "discard(pages)\n\nTake pages out of whatever queue they are in."},
    {"pop", fast(states_pop), METH_FASTCALL, "pop(level, out) -> int\n\nTake up to len(out) pages, the first to go first."},
    {"relocate", fast(states_relocate), METH_FASTCALL,
     "relocate(pages, level)\n\nUnqueue pages that are about to change their level."},
    {"queued", states_queued, METH_O, "queued(level) -> int"},
    {"held", states_held, METH_O, "held(level) -> int"},
    {"fixed", states_fixed, METH_O, "fixed(level) -> int"},
    {"is_queued", states_is_queued, METH_O, "is_queued(page) -> bool"},
    {"queued_into", states_queued_into, METH_O,
     "queued_into(out)\n\nWrite for every page whether it is in a queue, a byte each."},
    {"nbytes", states_nbytes, METH_NOARGS, "nbytes() -> int"},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef states_properties[] = {
    {"num_locked", states_num_locked, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot states_slots[] = {
    {Py_tp_doc, const_cast<char*>("PageStates(columns, num_levels)\n--\n\nUsers and queues of pages.")},
    {Py_tp_new, reinterpret_cast<void*>(states_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(states_free)},
    {Py_tp_methods, states_methods},
    {Py_tp_getset, states_properties},
    {0, nullptr},
};

PyType_Spec states_spec = {
    "kvmesh.kernels._native.PageStates", sizeof(PageStates), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    states_slots,
};

}  // namespace

// Adds the type to the module. Returns 0, or -1 with an exception set.
extern "C" int kvmesh_page_states_init(PyObject* module) {
  PyObject* type = PyType_FromModuleAndSpec(module, &states_spec, nullptr);
  if (type == nullptr) return -1;
  const int status = PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type));
  Py_DECREF(type);
  return status;
}
