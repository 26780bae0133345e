// Python's values as the prefix index wants them: hashes, tokens, and scopes as bytes. Failures leave an exception set.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "index_nodes.h"

namespace kvmesh::index {

// An owned reference.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* object) : object_(object) {}
  Ref(Ref&& other) noexcept : object_(other.object_) { other.object_ = nullptr; }
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  static Ref borrowed(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }
  PyObject* get() const { return object_; }
  PyObject* release() {
    PyObject* object = object_;
    object_ = nullptr;
    return object;
  }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// Appends a text's or number's value, as append_value does.
void append_text(const char* text, size_t size, std::string* key);
void append_number(int64_t number, std::string* key);
// Appends None, an int or a str in a form that differs for different values and of which none begins another.
bool append_value(PyObject* value, std::string* key);
// Undoes it; `at` moves on.
Ref read_value(const std::string& key, size_t* at);
// The (model, tenant, lora, salt) of a scope's key.
Ref scope_tuple(const std::string& key);

// Numbers below 2**64, from a list, a tuple or a buffer of 8-byte integers.
bool read_hashes(PyObject* object, std::vector<uint64_t>* hashes);
// XXH3 of each full block's tokens and what follows it, from a buffer of 4-byte integers or a list. `most` blocks at
// most; those that end less than the lookahead before the end are left out.
bool read_locals(PyObject* tokens, Cut cut, size_t most, std::vector<uint64_t>* locals);
// The same of so many blocks' tokens, and those that follow them.
void hash_blocks(const int32_t* tokens, Cut cut, size_t count, std::vector<uint64_t>* locals);
// Number of tokens in a buffer of 4-byte integers or a list; -1 with an exception.
Py_ssize_t num_tokens(PyObject* tokens);
// keys[i] = XXH3(keys[i-1] || locals[i]), keys[0] = locals[0].
void roll(std::vector<uint64_t>* locals);

bool read_block_size(PyObject* object, uint32_t* block_size);
bool read_lookahead(PyObject* object, uint32_t* lookahead);
bool read_tier(PyObject* object, int* tier);
bool read_optional(PyObject* object, std::optional<uint64_t>* value);
// Any int; numbers beyond 64 bits are told apart by their low bits.
bool read_group(PyObject* object, std::optional<int64_t>* group);

}  // namespace kvmesh::index
