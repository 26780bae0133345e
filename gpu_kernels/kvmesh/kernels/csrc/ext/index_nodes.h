// Blocks in their places: trees of nodes, one for each scope and cut, found by prefix hash.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "index_memory.h"
#include "index_states.h"
#include "index_table.h"

namespace kvmesh::index {

// A scope's key is of parts (model, tenant, adapter, salt), each a tag and what belongs to it: nothing, 8 bytes, or a
// length of 4 bytes and so many.
constexpr char kNoneTag = 'n', kTextTag = 's', kNumberTag = 'i', kLargeTag = 'I';

// What must be equal for two prompts to share blocks, as bytes, counted by its users.
class Scopes {
 public:
  explicit Scopes(size_t* account) : account_(account) {}

  // Counts a use.
  uint32_t use(const std::string& key);
  void use(uint32_t scope) { ++scopes_[scope].uses; }
  void drop(uint32_t scope);
  uint32_t find(const std::string& key) const;  // or kNone
  const std::string& key(uint32_t scope) const { return *scopes_[scope].key; }
  // Whether blocks of one scope can continue those of another: what differs is not named, which looks like `base`.
  bool continues(uint32_t scope, uint32_t other, uint32_t base) const;
  std::vector<uint32_t>& trees(uint32_t scope) { return scopes_[scope].trees; }
  size_t num_with_trees() const { return num_with_trees_; }
  void add_tree(uint32_t scope, uint32_t tree);
  void remove_tree(uint32_t scope, uint32_t tree);

 private:
  struct Scope {
    const std::string* key = nullptr;
    uint32_t uses = 0;
    std::vector<uint32_t> trees;
  };
  static size_t bytes_of(const std::string& key);

  size_t* account_;
  std::vector<Scope> scopes_;
  std::vector<uint32_t> free_;
  std::unordered_map<std::string, uint32_t> by_key_;
  size_t num_with_trees_ = 0;
};

struct Node {
  uint64_t key;  // rolling hash of the whole prefix that ends with this block
  uint32_t parent;
  uint32_t first_child;
  uint32_t next;  // sibling; of a free node, the next free one
  uint32_t previous;
  uint32_t state;
  uint32_t place;  // its tree, and whether a match ended here since the memory bound last looked

  static constexpr uint32_t kAsked = uint32_t{1} << 31, kFree = kNone;
  uint32_t tree() const { return place & ~kAsked; }
  bool asked() const { return (place & kAsked) != 0; }
  void set_asked(bool asked) { place = asked ? place | kAsked : place & ~kAsked; }
};

// How prompts are cut into blocks.
struct Cut {
  uint32_t block_size = 0;
  uint32_t lookahead = 0;  // so many tokens after its own are part of a block's identity

  bool operator==(const Cut& other) const { return block_size == other.block_size && lookahead == other.lookahead; }
};

struct Tree {
  uint32_t scope;
  Cut cut;
  uint32_t uses;  // its nodes, and who is working on it
};

class Nodes {
  struct Equals {
    const Nodes& nodes;
    uint32_t tree;
    uint64_t key;
    bool operator()(uint32_t node) const { return nodes[node].key == key && nodes[node].tree() == tree; }
  };

 public:
  Nodes(size_t* account, States& states)
      : scopes(account), account_(account), states_(states), nodes_(account), table_(account) {}

  Scopes scopes;

  Node& operator[](uint32_t node) { return nodes_[node]; }
  const Node& operator[](uint32_t node) const { return nodes_[node]; }
  size_t count() const { return table_.count(); }
  uint32_t end() const { return end_; }
  bool is_free(uint32_t node) const { return nodes_[node].place == Node::kFree; }
  const Tree& tree(uint32_t tree) const { return trees_[tree]; }
  uint32_t scope_of(uint32_t node) const { return trees_[nodes_[node].tree()].scope; }

  // The tree of a scope and cut, new if need be, with one use more.
  uint32_t use_tree(uint32_t scope, Cut cut);
  void use_tree(uint32_t tree) { ++trees_[tree].uses; }
  void drop_tree(uint32_t tree, uint32_t uses = 1);

  // The node, or kNone.
  uint32_t find(uint32_t tree, uint64_t key) const { return table_.find(tag(tree, key), Equals{*this, tree, key}); }
  // With a tag that the caller has from `tag`, as below. Where there is room for more, and the node is not there, `free`
  // is where it may be added.
  uint32_t find_tagged(uint32_t tag, uint32_t tree, uint64_t key, Table::Place* free) const {
    return table_.find(tag, Equals{*this, tree, key}, free);
  }
  uint32_t tag(uint32_t node) const { return tag(nodes_[node].tree(), nodes_[node].key); }
  static uint32_t tag(uint32_t tree, uint64_t key) { return tag_of(key ^ (tree + 1) * 0xD6E8FEB86659FD93u); }
  void prefetch_slot_tagged(uint32_t tag) const { table_.prefetch(tag); }
  void prefetch_spill_tagged(uint32_t tag) const { table_.prefetch_spill(tag); }
  void prefetch(uint32_t node) const { fetch(nodes_.data() + node); }
  // Whether a number, which need not be one of a node, is that of the node with this key.
  bool is(uint32_t node, uint32_t tree, uint64_t key) const {
    return node < end_ && nodes_[node].key == key && nodes_[node].tree() == tree;  // no free one has a tree
  }
  // Of `count` nodes in a row.
  void prefetch_from(uint32_t node, size_t count) const {
    for (size_t i = 0; i < count; i += kLineBytes / sizeof(Node)) fetch(nodes_.data() + node + i);
  }
  // Where the next `count` nodes will mostly be written.
  void prefetch_end(size_t count) const {
    if (first_free_ != kNone) return;
    for (size_t i = 0; i < count; i += kLineBytes / sizeof(Node)) fetch_to_write(nodes_.data() + end_ + i);
  }

  // The node, or a new one; there must be room for it.
  uint32_t find_or_add(uint32_t tree, uint64_t key, uint32_t parent) {
    Table::Place free{};
    const uint32_t tag = this->tag(tree, key), node = find_tagged(tag, tree, key, &free);
    return node == kNone ? add_at(free, tag, tree, key, parent) : node;
  }
  // A new one, where find_tagged has found none: a key is in the table once, as snapshots and look-ups rely on.
  uint32_t add_at(Table::Place free, uint32_t tag, uint32_t tree, uint64_t key, uint32_t parent);
  // Adds nodes one after the other, for which there must be room, while it is plain that they are not there; see
  // Table::Filling. Each is the only child of one that has none, with a state whose use is for the caller to count.
  class Adding {
   public:
    Adding(const Adding&) = delete;
    Adding& operator=(const Adding&) = delete;
    Adding(Nodes& nodes, uint32_t tree, uint32_t state)
        : filling(nodes.table_), nodes_(nodes), data_(nodes.nodes_.data()), end_(nodes.end_), free_(nodes.first_free_),
          tree_(tree), state_(state) {}
    ~Adding() {
      nodes_.end_ = end_;
      nodes_.first_free_ = free_;
      nodes_.trees_[tree_].uses += count_;
    }

    // Where `filling` has found a place.
    uint32_t add(uint32_t tag, uint64_t key, uint32_t parent) {
      uint32_t node = free_;
      if (node == kNone) {
        node = end_++;
      } else {
        free_ = data_[node].next;
      }
      filling.put(tag, node);
      data_[node] = {key, parent, kNone, kNone, kNone, state_, tree_};
      data_[parent].first_child = node;
      ++count_;
      return node;
    }

    Table::Filling filling;

   private:
    Nodes& nodes_;
    Node* data_;
    uint32_t end_, free_, tree_, state_;
    uint32_t count_ = 0;
  };
  // Takes out a node that nobody holds and that has nothing below it, and its ancestors likewise.
  void prune(uint32_t node);
  // Takes out such nodes of one tree, one after the other; see Table::Emptying.
  class Removing {
   public:
    Removing(Nodes& nodes, uint32_t tree)
        : nodes_(nodes), emptying_(nodes.table_), data_(nodes.nodes_.data()), free_(nodes.first_free_), tree_(tree) {}
    Removing(const Removing&) = delete;
    Removing& operator=(const Removing&) = delete;
    ~Removing() {
      nodes_.first_free_ = free_;
      if (count_ > 0) nodes_.drop_tree(tree_, count_);
    }

    // Its parent, whose turn it may be now.
    uint32_t remove(uint32_t node) {
      Node& gone = data_[node];
      emptying_.erase(tag(tree_, gone.key), node);
      const uint32_t parent = gone.parent, next = gone.next;
      if (gone.previous != kNone) {
        data_[gone.previous].next = next;
      } else if (parent != kNone) {
        data_[parent].first_child = next;
      }
      if (next != kNone) data_[next].previous = gone.previous;
      gone.place = Node::kFree;
      gone.next = free_;
      free_ = node;
      ++count_;
      return parent;
    }

   private:
    Nodes& nodes_;
    Table::Emptying emptying_;
    Node* data_;
    uint32_t free_, tree_;
    uint32_t count_ = 0;
  };
  bool is_unused(uint32_t node) const {
    return nodes_[node].first_child == kNone && nodes_[node].state == States::kNobody;
  }
  void set_state(uint32_t node, uint32_t state) {
    states_.use(state);
    states_.drop(nodes_[node].state);
    nodes_[node].state = state;
  }

  // Bytes more that `count` new nodes may need, at the worst moment.
  size_t growth(size_t count) const;
  void reserve(size_t count);
  bool worth_compacting() const { return end_ > 1024 && table_.count() < end_ - end_ / 4; }
  // Moves nodes together and gives back the memory behind them. The new number of each old one.
  std::vector<uint32_t> compact();

 private:
  size_t num_free() const { return end_ - table_.count(); }

  size_t* account_;
  States& states_;
  Array<Node> nodes_;
  Table table_;
  uint32_t end_ = 0;
  uint32_t first_free_ = kNone;
  std::vector<Tree> trees_;
  std::vector<uint32_t> free_trees_;
};

}  // namespace kvmesh::index
