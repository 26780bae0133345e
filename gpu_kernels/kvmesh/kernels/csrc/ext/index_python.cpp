// Conversions between Python and the prefix index.
#include "index_python.h"

#include <cstring>

#include "buffer_view.h"
#include "index_states.h"
#include "xxh3.h"

namespace kvmesh::index {
namespace {

constexpr uint64_t kSeed = 1337;  // of routing hashes
constexpr size_t kTokenBytes = 4;

void append_tagged(char tag, const char* text, Py_ssize_t size, std::string* key) {
  const uint32_t length = static_cast<uint32_t>(size);
  key->push_back(tag);
  key->append(reinterpret_cast<const char*>(&length), sizeof length);
  key->append(text, size);
}

// The value of an int below 2**64, several times as fast as PyLong_AsUnsignedLongLong; false for anything else.
bool read_plain(PyObject* object, uint64_t* value) {
  static_assert(PyLong_SHIFT == 30);
  if (!PyLong_CheckExact(object)) return false;
#if PY_VERSION_HEX >= 0x030C0000
  const _PyLongValue& number = reinterpret_cast<PyLongObject*>(object)->long_value;
  if ((number.lv_tag & 3) == 2) return false;  // negative
  const size_t count = number.lv_tag >> 3;
  const digit* digits = number.ob_digit;
#else
  const Py_ssize_t count = Py_SIZE(object);
  const digit* digits = reinterpret_cast<PyLongObject*>(object)->ob_digit;
#endif
  switch (count) {
    case 0: *value = 0; return true;
    case 1: *value = digits[0]; return true;
    case 2: *value = digits[0] | static_cast<uint64_t>(digits[1]) << 30; return true;
    case 3:
      *value = digits[0] | static_cast<uint64_t>(digits[1]) << 30 | static_cast<uint64_t>(digits[2]) << 60;
      return digits[2] < 16;
    default: return false;
  }
}

// Numbers of a list as int32.
bool read_token_list(PyObject* list, size_t most, std::vector<int32_t>* tokens) {
  const size_t count = std::min<size_t>(PyList_GET_SIZE(list), most);
  tokens->resize(count);
  for (size_t i = 0; i < count; ++i) {
    int overflow = 0;
    const long value = PyLong_AsLongAndOverflow(PyList_GET_ITEM(list, i), &overflow);
    if (value == -1 && PyErr_Occurred()) return false;
    if (overflow != 0 || value < INT32_MIN || value > INT32_MAX) {
      PyErr_SetString(PyExc_OverflowError, "a token id does not fit 32 bits");
      return false;
    }
    (*tokens)[i] = static_cast<int32_t>(value);
  }
  return true;
}

size_t num_blocks(size_t tokens, Cut cut) {
  return tokens < cut.lookahead ? 0 : (tokens - cut.lookahead) / cut.block_size;
}

void hash_bytes(const uint8_t* tokens, Cut cut, size_t count, std::vector<uint64_t>* locals) {
  const size_t step = cut.block_size * kTokenBytes, bytes = step + cut.lookahead * kTokenBytes;
  locals->resize(count);
  for (size_t i = 0; i < count; ++i) (*locals)[i] = xxh3_64(tokens + i * step, bytes, kSeed);
}

}  // namespace

void append_text(const char* text, size_t size, std::string* key) {
  append_tagged(kTextTag, text, static_cast<Py_ssize_t>(size), key);
}

void append_number(int64_t number, std::string* key) {
  key->push_back(kNumberTag);
  key->append(reinterpret_cast<const char*>(&number), sizeof number);
}

bool append_value(PyObject* value, std::string* key) {
  if (value == Py_None) {
    key->push_back(kNoneTag);
    return true;
  }
  if (PyUnicode_Check(value)) {
    Py_ssize_t size;
    const char* text = PyUnicode_AsUTF8AndSize(value, &size);
    if (text != nullptr) {
      append_text(text, size, key);
      return true;
    }
    PyErr_Clear();  // lone surrogates
    const Ref bytes(PyUnicode_AsEncodedString(value, "utf-8", "surrogatepass"));
    if (!bytes) return false;
    append_text(PyBytes_AS_STRING(bytes.get()), PyBytes_GET_SIZE(bytes.get()), key);
    return true;
  }
  if (!PyLong_Check(value)) {
    PyErr_Format(PyExc_TypeError, "a scope is made of str, int and None, not %.100s", Py_TYPE(value)->tp_name);
    return false;
  }
  int overflow;
  const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
  if (number == -1 && PyErr_Occurred()) return false;
  if (overflow == 0) {
    append_number(number, key);
    return true;
  }
  const Ref text(PyNumber_ToBase(value, 16));
  Py_ssize_t size;
  const char* digits = text ? PyUnicode_AsUTF8AndSize(text.get(), &size) : nullptr;
  if (digits == nullptr) return false;
  append_tagged(kLargeTag, digits, size, key);
  return true;
}

Ref read_value(const std::string& key, size_t* at) {
  const char tag = *at < key.size() ? key[(*at)++] : 0;
  if (tag == kNoneTag) return Ref::borrowed(Py_None);
  if (tag == kNumberTag && key.size() - *at >= sizeof(long long)) {
    long long number;
    std::memcpy(&number, key.data() + *at, sizeof number);
    *at += sizeof number;
    return Ref(PyLong_FromLongLong(number));
  }
  uint32_t length = 0;
  if ((tag == kTextTag || tag == kLargeTag) && key.size() - *at >= sizeof length) {
    std::memcpy(&length, key.data() + *at, sizeof length);
    *at += sizeof length;
    if (key.size() - *at >= length) {
      const std::string text = key.substr(*at, length);
      *at += length;
      if (tag == kTextTag) return Ref(PyUnicode_DecodeUTF8(text.data(), length, "surrogatepass"));
      return Ref(PyLong_FromString(text.c_str(), nullptr, 16));
    }
  }
  PyErr_SetString(PyExc_ValueError, "not the key of a scope");
  return Ref();
}

Ref scope_tuple(const std::string& key) {
  constexpr Py_ssize_t kFields = 4;
  Ref tuple(PyTuple_New(kFields));
  size_t at = 0;
  for (Py_ssize_t i = 0; tuple && i < kFields; ++i) {
    Ref value = read_value(key, &at);
    if (!value) return Ref();
    PyTuple_SET_ITEM(tuple.get(), i, value.release());
  }
  if (tuple && at != key.size()) {
    PyErr_SetString(PyExc_ValueError, "not the key of a scope");
    return Ref();
  }
  return tuple;
}

bool read_hashes(PyObject* object, std::vector<uint64_t>* hashes) {
  if (!PyList_Check(object) && !PyTuple_Check(object)) {
    BufferView view;
    if (!view.acquire(object, sizeof(uint64_t), false, "hashes")) return false;
    hashes->assign(view.words(), view.words() + view.size() / sizeof(uint64_t));
    return true;
  }
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(object);
  PyObject** items = PySequence_Fast_ITEMS(object);
  hashes->resize(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (read_plain(items[i], &(*hashes)[i])) continue;
    (*hashes)[i] = PyLong_AsUnsignedLongLong(items[i]);
    if ((*hashes)[i] == UINT64_MAX && PyErr_Occurred()) return false;
  }
  return true;
}

void hash_blocks(const int32_t* tokens, Cut cut, size_t count, std::vector<uint64_t>* locals) {
  hash_bytes(reinterpret_cast<const uint8_t*>(tokens), cut, count, locals);
}

Py_ssize_t num_tokens(PyObject* tokens) {
  if (PyList_Check(tokens)) return PyList_GET_SIZE(tokens);
  BufferView view;
  if (!view.acquire(tokens, kTokenBytes, false, "tokens")) return -1;
  return view.size() / static_cast<Py_ssize_t>(kTokenBytes);
}

bool read_locals(PyObject* tokens, Cut cut, size_t most, std::vector<uint64_t>* locals) {
  if (PyList_Check(tokens)) {
    const size_t count = std::min(num_blocks(PyList_GET_SIZE(tokens), cut), most);
    std::vector<int32_t> numbers;
    if (count > 0 && !read_token_list(tokens, count * cut.block_size + cut.lookahead, &numbers)) return false;
    hash_blocks(numbers.data(), cut, count, locals);
    return true;
  }
  BufferView view;
  if (!view.acquire(tokens, kTokenBytes, false, "tokens")) return false;
  hash_bytes(view.data(), cut, std::min(num_blocks(view.size() / kTokenBytes, cut), most), locals);
  return true;
}

void roll(std::vector<uint64_t>* locals) {
  for (size_t i = 1; i < locals->size(); ++i) (*locals)[i] = xxh3_64_of_pair((*locals)[i - 1], (*locals)[i], kSeed);
}

bool read_block_size(PyObject* object, uint32_t* block_size) {
  const long value = PyLong_AsLong(object);
  if (value == -1 && PyErr_Occurred()) return false;
  if (value < 1 || value > INT32_MAX) {
    PyErr_Format(PyExc_ValueError, "a block has 1 to %d tokens, not %ld", INT32_MAX, value);
    return false;
  }
  *block_size = static_cast<uint32_t>(value);
  return true;
}

bool read_lookahead(PyObject* object, uint32_t* lookahead) {
  const long value = PyLong_AsLong(object);
  if (value == -1 && PyErr_Occurred()) return false;
  if (value < 0 || value > INT32_MAX) {
    PyErr_Format(PyExc_ValueError, "a lookahead has 0 to %d tokens, not %ld", INT32_MAX, value);
    return false;
  }
  *lookahead = static_cast<uint32_t>(value);
  return true;
}

bool read_tier(PyObject* object, int* tier) {
  const long value = PyLong_AsLong(object);
  if (value == -1 && PyErr_Occurred()) return false;
  if (value < 0 || value >= kTiers) {
    PyErr_Format(PyExc_ValueError, "there is no tier %ld", value);
    return false;
  }
  *tier = static_cast<int>(value);
  return true;
}

bool read_optional(PyObject* object, std::optional<uint64_t>* value) {
  value->reset();
  if (object == Py_None) return true;
  const Ref number(PyNumber_Index(object));
  if (!number) return false;
  *value = PyLong_AsUnsignedLongLong(number.get());
  return !PyErr_Occurred();
}

bool read_group(PyObject* object, std::optional<int64_t>* group) {
  group->reset();
  if (object == Py_None) return true;
  *group = static_cast<int64_t>(PyLong_AsUnsignedLongLongMask(object));
  return !PyErr_Occurred();
}

}  // namespace kvmesh::index
