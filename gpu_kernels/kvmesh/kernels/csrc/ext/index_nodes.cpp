// Scopes, trees and the nodes in them.
#include "index_nodes.h"

#include <cstring>
#include <string_view>

namespace kvmesh::index {
namespace {

// Takes the next part off a scope's key.
std::string_view next_part(std::string_view* key) {
  size_t size = 1;
  uint32_t length;
  if (key->empty()) return {};
  if (key->front() == kNumberTag) {
    size += sizeof(uint64_t);
  } else if (key->front() != kNoneTag && key->size() > sizeof length) {
    std::memcpy(&length, key->data() + 1, sizeof length);
    size += sizeof length + length;
  }
  const std::string_view part = key->substr(0, size);
  key->remove_prefix(part.size());
  return part;
}

}  // namespace

// The strings, the map's node and the vectors' elements; their exact sizes are the library's business.
size_t Scopes::bytes_of(const std::string& key) { return 2 * sizeof(Scope) + key.capacity() + 64; }

uint32_t Scopes::find(const std::string& key) const {
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? kNone : found->second;
}

uint32_t Scopes::use(const std::string& key) {
  uint32_t scope = find(key);
  if (scope == kNone) {
    if (free_.empty()) {
      scopes_.emplace_back();
      free_.reserve(scopes_.capacity());
      free_.push_back(static_cast<uint32_t>(scopes_.size() - 1));
    }
    scope = free_.back();
    scopes_[scope].key = &by_key_.emplace(key, scope).first->first;
    free_.pop_back();
    *account_ += bytes_of(*scopes_[scope].key);
  }
  ++scopes_[scope].uses;
  return scope;
}

void Scopes::drop(uint32_t scope) {
  Scope& entry = scopes_[scope];
  if (--entry.uses > 0) return;
  *account_ -= bytes_of(*entry.key);
  by_key_.erase(by_key_.find(*entry.key));
  entry = Scope{};
  free_.push_back(scope);
}

bool Scopes::continues(uint32_t scope, uint32_t other, uint32_t base) const {
  if (scope == other || scope == base) return true;
  std::string_view named = key(scope), inherited = key(other), unnamed = key(base);
  while (!named.empty()) {
    const std::string_view part = next_part(&named), above = next_part(&inherited);
    if (next_part(&unnamed) != part && part != above) return false;
  }
  return true;
}

void Scopes::add_tree(uint32_t scope, uint32_t tree) {
  scopes_[scope].trees.push_back(tree);
  if (scopes_[scope].trees.size() == 1) ++num_with_trees_;
  use(scope);
}

void Scopes::remove_tree(uint32_t scope, uint32_t tree) {
  std::vector<uint32_t>& trees = scopes_[scope].trees;
  trees.erase(std::find(trees.begin(), trees.end(), tree));
  if (trees.empty()) --num_with_trees_;
  drop(scope);
}

uint32_t Nodes::use_tree(uint32_t scope, Cut cut) {
  for (const uint32_t tree : scopes.trees(scope)) {
    if (!(trees_[tree].cut == cut)) continue;
    ++trees_[tree].uses;
    return tree;
  }
  if (free_trees_.empty()) {
    trees_.emplace_back();
    free_trees_.reserve(trees_.capacity());
    free_trees_.push_back(static_cast<uint32_t>(trees_.size() - 1));
  }
  const uint32_t tree = free_trees_.back();
  scopes.add_tree(scope, tree);
  free_trees_.pop_back();
  trees_[tree] = {scope, cut, 1};
  return tree;
}

void Nodes::drop_tree(uint32_t tree, uint32_t uses) {
  if ((trees_[tree].uses -= uses) > 0) return;
  scopes.remove_tree(trees_[tree].scope, tree);
  free_trees_.push_back(tree);
}

uint32_t Nodes::add_at(Table::Place free, uint32_t tag, uint32_t tree, uint64_t key, uint32_t parent) {
  const uint32_t node = first_free_ == kNone ? end_ : first_free_;
  table_.insert_at(free, tag, node);
  if (first_free_ == kNone) {
    ++end_;
  } else {
    first_free_ = nodes_[node].next;
  }
  const uint32_t sibling = parent == kNone ? kNone : nodes_[parent].first_child;
  nodes_[node] = {key, parent, kNone, sibling, kNone, States::kNobody, tree};
  if (sibling != kNone) nodes_[sibling].previous = node;
  if (parent != kNone) nodes_[parent].first_child = node;
  ++trees_[tree].uses;
  return node;
}

void Nodes::prune(uint32_t node) {
  if (node == kNone || !is_unused(node)) return;
  Removing removing(*this, nodes_[node].tree());
  while (node != kNone && is_unused(node)) node = removing.remove(node);
}

size_t Nodes::growth(size_t count) const {
  const size_t free = num_free();
  size_t bytes = 0;
  if (count > free && end_ + count - free > nodes_.capacity()) {
    bytes += Array<Node>::bytes_for(grown(end_ + count - free, end_, sizeof(Node))) - nodes_.bytes();
  }
  if (!table_.has_room(count)) bytes += Table::bytes_for(table_.grown_for(table_.count() + count)) - table_.bytes();
  return bytes;
}

void Nodes::reserve(size_t count) {
  const size_t free = num_free();
  if (count > free && end_ + count - free > nodes_.capacity()) {
    if (end_ + count - free >= Node::kAsked) throw std::bad_alloc();
    nodes_.set_capacity(grown(end_ + count - free, end_, sizeof(Node)));
  }
  if (!table_.has_room(count)) table_.resize(table_.grown_for(table_.count() + count));
}

std::vector<uint32_t> Nodes::compact() {
  std::vector<uint32_t> moved(end_, kNone);
  uint32_t end = 0;
  for (uint32_t node = 0; node < end_; ++node)
    if (!is_free(node)) moved[node] = end++;
  const auto renamed = [&](uint32_t node) { return node == kNone ? kNone : moved[node]; };
  for (uint32_t node = 0; node < end_; ++node) {
    if (is_free(node)) continue;
    Node& to = nodes_[moved[node]];
    to = nodes_[node];
    to.parent = renamed(to.parent);
    to.first_child = renamed(to.first_child);
    to.next = renamed(to.next);
    to.previous = renamed(to.previous);
  }
  table_.rename([&](uint32_t node) { return moved[node]; });
  end_ = end;
  first_free_ = kNone;
  nodes_.set_capacity(end_ + end_ / 16);
  table_.shrink(end_ + end_ / 16);
  return moved;
}

}  // namespace kvmesh::index
