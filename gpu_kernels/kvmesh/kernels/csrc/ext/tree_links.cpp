// Links of the prefix tree: chains of new blocks, and subtrees taken out, over columns of int32 indexed by node.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "buffer_view.h"

namespace {

using kvmesh::BufferView;

constexpr int32_t kNone = -1;
constexpr int32_t kFree = -1;  // in num_tokens: the node is not in the tree

// The columns of a tree: its own six, then the pages of each layer group.
class Columns {
 public:
  int32_t *parent, *first_child, *next, *previous, *num_children, *num_tokens;
  int32_t** pages;
  Py_ssize_t num_groups, capacity;

  // On failure an exception is set.
  bool acquire(PyObject* tuple) {
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) < kFixed) {
      PyErr_Format(PyExc_TypeError, "the columns must be a tuple of at least %zd arrays", kFixed);
      return false;
    }
    const Py_ssize_t count = PyTuple_GET_SIZE(tuple);
    views_.reset(new (std::nothrow) BufferView[count]);
    numbers_.reset(new (std::nothrow) int32_t*[count]);
    if (!views_ || !numbers_) {
      PyErr_NoMemory();
      return false;
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!views_[i].acquire(PyTuple_GET_ITEM(tuple, i), 4, true, "a column")) return false;
      if (views_[i].size() != views_[0].size()) {
        PyErr_SetString(PyExc_ValueError, "the columns must have the same length");
        return false;
      }
      numbers_[i] = views_[i].numbers();
    }
    parent = numbers_[0], first_child = numbers_[1], next = numbers_[2];
    previous = numbers_[3], num_children = numbers_[4], num_tokens = numbers_[5];
    pages = numbers_.get() + kFixed;
    num_groups = count - kFixed;
    capacity = views_[0].size() / 4;
    return true;
  }

  bool check(const int32_t* nodes, Py_ssize_t count) const {
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (nodes[i] >= 0 && nodes[i] < capacity) continue;
      PyErr_Format(PyExc_IndexError, "node %d is not in 0..%zd", nodes[i], capacity - 1);
      return false;
    }
    return true;
  }

  bool has_pages(int32_t node) const {
    for (Py_ssize_t group = 0; group < num_groups; ++group)
      if (pages[group][node] != kNone) return true;
    return false;
  }

  void link(int32_t node, int32_t above) {
    const int32_t first = first_child[above];
    parent[node] = above;
    next[node] = first;
    if (first != kNone) previous[first] = node;
    first_child[above] = node;
    ++num_children[above];
  }

  void take_out(int32_t node) {
    const int32_t above = parent[node], before = previous[node], after = next[node];
    (before == kNone ? first_child[above] : next[before]) = after;
    if (after != kNone) previous[after] = before;
    --num_children[above];
    num_tokens[node] = kFree;
  }

 private:
  static constexpr Py_ssize_t kFixed = 6;
  std::unique_ptr<BufferView[]> views_;
  std::unique_ptr<int32_t*[]> numbers_;
};

// The token rows of all nodes: int32 [capacity, tokens_per_block].
struct Rows {
  BufferView view;
  int32_t* tokens = nullptr;
  Py_ssize_t width = 0;

  bool acquire(PyObject* object, Py_ssize_t capacity, bool writable) {
    if (!view.acquire(object, 4, writable, "the token rows")) return false;
    if (capacity == 0 || view.size() % (capacity * 4) != 0) {
      PyErr_Format(PyExc_ValueError, "the token rows must be as many as the nodes, %zd", capacity);
      return false;
    }
    tokens = view.numbers();
    width = view.size() / 4 / capacity;
    return true;
  }
  int32_t* at(int32_t node) const { return tokens + node * width; }
};

PyObject* link_chain(PyObject*, PyObject* const* arguments, Py_ssize_t num_arguments) {
  if (num_arguments != 5) {
    PyErr_SetString(PyExc_TypeError, "link_chain(columns, rows, parent, nodes, tokens) takes five arguments");
    return nullptr;
  }
  Columns tree;
  Rows rows;
  BufferView nodes_view, tokens;
  if (!tree.acquire(arguments[0]) || !rows.acquire(arguments[1], tree.capacity, true)) return nullptr;
  if (!nodes_view.acquire(arguments[3], 4, false, "nodes") || !tokens.acquire(arguments[4], 4, false, "tokens"))
    return nullptr;
  const int32_t above = static_cast<int32_t>(PyLong_AsLong(arguments[2]));
  if (PyErr_Occurred()) return nullptr;
  const int32_t* nodes = nodes_view.numbers();
  const Py_ssize_t count = nodes_view.size() / 4;
  if (!tree.check(nodes, count) || !tree.check(&above, 1)) return nullptr;
  if (tokens.size() / 4 != count * rows.width) {
    PyErr_Format(PyExc_ValueError, "%zd nodes need %zd tokens each", count, rows.width);
    return nullptr;
  }
  int32_t before = above;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const int32_t node = nodes[i];
    tree.first_child[node] = tree.previous[node] = kNone;
    tree.num_children[node] = 0;
    tree.num_tokens[node] = static_cast<int32_t>(rows.width);
    for (Py_ssize_t group = 0; group < tree.num_groups; ++group) tree.pages[group][node] = kNone;
    std::memcpy(rows.at(node), tokens.numbers() + i * rows.width, rows.width * 4);
    tree.link(node, before);
    before = node;
  }
  Py_RETURN_NONE;
}

// How many leading tokens of `wanted` each child of `parent` holds, newest child first.
PyObject* shared_prefixes(PyObject*, PyObject* const* arguments, Py_ssize_t num_arguments) {
  if (num_arguments != 4) {
    PyErr_SetString(PyExc_TypeError, "shared_prefixes(columns, rows, parent, wanted) takes four arguments");
    return nullptr;
  }
  Columns tree;
  Rows rows;
  BufferView wanted;
  if (!tree.acquire(arguments[0]) || !rows.acquire(arguments[1], tree.capacity, false)) return nullptr;
  if (!wanted.acquire(arguments[3], 4, false, "the wanted tokens")) return nullptr;
  const int32_t parent = static_cast<int32_t>(PyLong_AsLong(arguments[2]));
  if (PyErr_Occurred() || !tree.check(&parent, 1)) return nullptr;
  PyObject* list = PyList_New(0);
  if (list == nullptr) return nullptr;
  for (int32_t child = tree.first_child[parent]; child != kNone; child = tree.next[child]) {
    const Py_ssize_t width = std::min<Py_ssize_t>(tree.num_tokens[child], wanted.size() / 4);
    const int32_t* row = rows.at(child);
    Py_ssize_t shared = 0;
    while (shared < width && row[shared] == wanted.numbers()[shared]) ++shared;
    PyObject* pair = Py_BuildValue("(in)", child, shared);
    const int status = pair == nullptr ? -1 : PyList_Append(list, pair);
    Py_XDECREF(pair);
    if (status != 0) {
      Py_DECREF(list);
      return nullptr;
    }
  }
  return list;
}

// The subtree of `node`, every block after all blocks that continue it.
void post_order(const Columns& tree, int32_t node, std::vector<int32_t>& pending, std::vector<int32_t>& order) {
  order.clear();
  pending.assign(1, node);
  while (!pending.empty()) {
    const int32_t current = pending.back();
    pending.pop_back();
    order.push_back(current);
    for (int32_t child = tree.first_child[current]; child != kNone; child = tree.next[child]) pending.push_back(child);
  }
}

void unlink(Columns& tree, const int32_t* nodes, Py_ssize_t count, std::vector<int32_t>& removed,
            std::vector<int32_t>& roots) {
  std::vector<int32_t> pending, order;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (tree.num_tokens[nodes[i]] == kFree) continue;  // went with the subtree of an earlier one
    int32_t above = tree.parent[nodes[i]];
    post_order(tree, nodes[i], pending, order);
    for (auto node = order.rbegin(); node != order.rend(); ++node) {
      tree.take_out(*node);
      removed.push_back(*node);
    }
    while (above != kNone && tree.num_children[above] == 0) {
      const int32_t next = tree.parent[above];
      if (tree.num_tokens[above] == 0) {
        tree.num_tokens[above] = kFree;
        roots.push_back(above);
      } else if (!tree.has_pages(above)) {
        tree.take_out(above);
        removed.push_back(above);
      } else {
        break;
      }
      above = next;
    }
  }
}

PyObject* as_bytes(const std::vector<int32_t>& numbers) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof numbers[0]);
}

PyObject* unlink_subtrees(PyObject*, PyObject* const* arguments, Py_ssize_t num_arguments) {
  if (num_arguments != 2) {
    PyErr_SetString(PyExc_TypeError, "unlink_subtrees(columns, nodes) takes two arguments");
    return nullptr;
  }
  Columns tree;
  BufferView nodes;
  if (!tree.acquire(arguments[0]) || !nodes.acquire(arguments[1], 4, false, "nodes")) return nullptr;
  const Py_ssize_t count = nodes.size() / 4;
  if (!tree.check(nodes.numbers(), count)) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (tree.num_tokens[nodes.numbers()[i]] == kFree || tree.parent[nodes.numbers()[i]] != kNone) continue;
    PyErr_Format(PyExc_ValueError, "node %d is a root", nodes.numbers()[i]);
    return nullptr;
  }
  std::vector<int32_t> removed, roots;
  try {
    removed.reserve(count);
    unlink(tree, nodes.numbers(), count, removed, roots);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  PyObject* removed_bytes = as_bytes(removed);
  PyObject* root_bytes = removed_bytes == nullptr ? nullptr : as_bytes(roots);
  if (root_bytes == nullptr) {
    Py_XDECREF(removed_bytes);
    return nullptr;
  }
  return Py_BuildValue("(NN)", removed_bytes, root_bytes);
}

// Visiting a block twice would find another one before it than the first time: the loop ends.
bool linked(const Columns& tree) {
  Py_ssize_t num_blocks = 0, num_linked = 0;
  for (int32_t node = 0; node < tree.capacity; ++node) {
    if (tree.num_tokens[node] == kFree) continue;
    num_blocks += tree.num_tokens[node] != 0;
    int32_t before = kNone;
    for (int32_t child = tree.first_child[node]; child != kNone; child = tree.next[child]) {
      if (child < 0 || child >= tree.capacity || tree.num_tokens[child] <= 0) return false;
      if (tree.parent[child] != node || tree.previous[child] != before) return false;
      before = child;
      ++num_linked;
    }
  }
  return num_linked == num_blocks;
}

PyObject* check_links(PyObject*, PyObject* columns) {
  Columns tree;
  if (!tree.acquire(columns)) return nullptr;
  return PyBool_FromLong(linked(tree));
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace

extern "C" PyMethodDef kvmesh_tree_methods[];
PyMethodDef kvmesh_tree_methods[] = {
    {"link_chain", fast(link_chain), METH_FASTCALL,
     "link_chain(columns, rows, parent, nodes, tokens)\n\nMake fresh nodes a chain below parent, without pages."},
    {"shared_prefixes", fast(shared_prefixes), METH_FASTCALL,
     "shared_prefixes(columns, rows, parent, wanted) -> list[tuple[int, int]]\n\n"
     "Each child of parent, newest first, and how many leading tokens of wanted it holds."},
    {"check_links", check_links, METH_O,
     "check_links(columns) -> bool\n\nWhether the lists of children hold exactly all blocks, linked both ways."},
    {"unlink_subtrees", fast(unlink_subtrees), METH_FASTCALL,
     "unlink_subtrees(columns, nodes) -> (bytes, bytes)\n\n"
     "Take out nodes, what continues them, and ancestors left without children and pages: int32 of blocks, of roots."},
    {nullptr, nullptr, 0, nullptr},
};
