// How far each source reaches along a prompt: O(log blocks) look-ups for each different end, not one a block.
#pragma once

#include <cstdint>
#include <vector>

#include "index_core.h"

namespace kvmesh::index {

struct Match {
  uint32_t number;  // of the source
  uint64_t tokens[kTiers];
};

class Search {
 public:
  explicit Search(Core& core) : core_(core) {}

  void begin();
  // Looks for the prompt whose blocks have these prefix hashes in one tree; more trees may follow.
  void look(uint32_t tree, const uint64_t* keys, size_t count);
  // Sources that hold any; a colder tier's count includes what the warmer ones hold.
  const std::vector<Match>& finish();

 private:
  void reach(uint32_t tree, const uint64_t* keys, size_t count, int tier, const std::vector<uint64_t>& among);
  bool all_ready(uint32_t node, int tier);
  void keep_ready(uint32_t node, int tier, const std::vector<uint64_t>* among);
  void note(uint64_t bits, size_t word, int tier, uint64_t tokens);

  Core& core_;
  // The sources that are still followed, as words of their mask, and which words.
  std::vector<uint64_t> bits_, rest_bits_, among_;
  std::vector<uint32_t> words_, rest_words_;
  std::vector<uint32_t> entry_of_;  // by number, kNone outside of a search
  std::vector<Match> found_;
};

}  // namespace kvmesh::index
