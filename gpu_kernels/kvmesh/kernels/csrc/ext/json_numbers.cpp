// One list of integers out of a JSON object, without a Python object for each.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include "buffer_view.h"

namespace {

constexpr int kMaxDepth = 64;

// Finds its way through one JSON text. It does not judge the text: whoever reads what is left of it does.
class Scanner {
 public:
  Scanner(const char* at, const char* end) : at_(at), end_(end) {}

  const char* at() const { return at_; }
  bool done() {
    blank();
    return at_ == end_;
  }

  bool take(char wanted) {
    blank();
    if (at_ == end_ || *at_ != wanted) return false;
    ++at_;
    return true;
  }

  // A text without escapes.
  bool plain_text(const char** begin, size_t* size) {
    if (!take('"')) return false;
    *begin = at_;
    while (at_ != end_ && *at_ != '"') {
      if (*at_ == '\\') return false;
      ++at_;
    }
    if (at_ == end_) return false;
    *size = static_cast<size_t>(at_++ - *begin);
    return true;
  }

  bool skip(int depth = 0) {
    blank();
    if (at_ == end_ || depth > kMaxDepth) return false;
    if (*at_ == '"') return skip_text();
    if (*at_ != '[' && *at_ != '{') return skip_word();
    const char close = *at_++ == '[' ? ']' : '}';
    if (take(close)) return true;
    do {
      if (close == '}' && !(take_text() && take(':'))) return false;
      if (!skip(depth + 1)) return false;
    } while (take(','));
    return take(close);
  }

  // A list of integers of 32 bits.
  bool integers(std::vector<int32_t>* out) {
    if (!take('[')) return false;
    if (take(']')) return true;
    for (;;) {
      int32_t value;
      if (!short_number(&value) && !integer(&value)) return false;
      out->push_back(value);
      if (at_ != end_ && *at_ == ',') {
        ++at_;
        at_ += at_ != end_ && *at_ == ' ';
      } else if (!take(',')) {
        return take(']');
      }
    }
  }

 private:
  void blank() {
    while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\r' || *at_ == '\t')) ++at_;
  }

  // A number of one to seven digits, without a branch that depends on how many there are: token ids have any length,
  // and each guess that goes wrong costs more than reading the number.
  bool short_number(int32_t* value) {
    if (end_ - at_ < 8) return false;
    uint64_t digits;
    std::memcpy(&digits, at_, sizeof digits);
    digits ^= 0x3030303030303030;  // a digit's value in each byte, more than 9 in others
    const uint64_t others = (digits + 0x7676767676767676 | digits) & 0x8080808080808080;
    if (others == 0) return false;
    const int bits = __builtin_ctzll(others) & ~7;
    if (bits == 0 || (bits > 8 && (digits & 0xFF) == 0)) return false;
    // Zeros in front make it eight digits; neighbours are then added up by twos, fours and eights.
    digits <<= 64 - bits;
    digits = (digits * (1 + (10 << 8))) >> 8 & 0x00FF00FF00FF00FF;
    digits = (digits * (1 + (100 << 16))) >> 16 & 0x0000FFFF0000FFFF;
    digits = digits * (1 + (uint64_t{10000} << 32)) >> 32;
    *value = static_cast<int32_t>(digits);
    at_ += bits / 8;
    return true;
  }

  bool integer(int32_t* value) {
    blank();
    const bool negative = at_ != end_ && *at_ == '-';
    if (negative) ++at_;
    const char* const first = at_;
    int64_t number = 0;
    while (at_ != end_ && *at_ >= '0' && *at_ <= '9' && at_ - first < 11) number = number * 10 + (*at_++ - '0');
    const bool padded = at_ - first > 1 && *first == '0';
    if (at_ == first || padded || (negative && number == 0)) return false;
    // What goes on (a fraction, another digit) is no separator, which the caller sees.
    number = negative ? -number : number;
    *value = static_cast<int32_t>(number);
    return number == *value;
  }

  bool take_text() {
    blank();
    return at_ != end_ && *at_ == '"' && skip_text();
  }

  bool skip_text() {
    for (++at_; at_ != end_; ++at_) {
      if (*at_ == '"') {
        ++at_;
        return true;
      }
      if (*at_ == '\\' && ++at_ == end_) return false;
    }
    return false;
  }

  bool skip_word() {
    const char* const begin = at_;
    while (at_ != end_ && std::strchr(",]}:\" \n\r\t", *at_) == nullptr) ++at_;
    return at_ != begin;
  }

  const char* at_;
  const char* end_;
};

// Where the list stands in the text.
struct Found {
  const char* begin = nullptr;
  const char* end = nullptr;
  std::vector<int32_t> numbers;
};

// False for anything but an object that has the key exactly once, with a list of integers of 32 bits.
bool find_list(const char* begin, const char* end, const char* key, size_t key_size, Found* found) {
  Scanner scanner(begin, end);
  if (!scanner.take('{')) return false;
  do {
    const char* name;
    size_t size;
    if (!scanner.plain_text(&name, &size) || !scanner.take(':')) return false;
    if (size != key_size || std::memcmp(name, key, size) != 0) {
      if (!scanner.skip()) return false;
      continue;
    }
    if (found->begin != nullptr) return false;
    found->begin = scanner.at();
    if (!scanner.integers(&found->numbers)) return false;
    found->end = scanner.at();
  } while (scanner.take(','));
  return scanner.take('}') && scanner.done() && found->begin != nullptr;
}

PyObject* json_take_integers(PyObject*, PyObject* args) {
  PyObject* text;
  const char* key;
  Py_ssize_t key_size;
  if (!PyArg_ParseTuple(args, "Os#", &text, &key, &key_size)) return nullptr;
  kvmesh::BufferView view;
  if (!view.acquire(text, 1, false, "text")) return nullptr;
  const char* const begin = reinterpret_cast<const char*>(view.data());
  const char* const end = begin + view.size();
  Found found;
  try {
    found.numbers.reserve(static_cast<size_t>(view.size()) / 6);
    if (!find_list(begin, end, key, static_cast<size_t>(key_size), &found)) Py_RETURN_NONE;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  const Py_ssize_t before = found.begin - begin, after = end - found.end;
  PyObject* rest = PyBytes_FromStringAndSize(nullptr, before + 2 + after);
  if (rest == nullptr) return nullptr;
  char* to = PyBytes_AS_STRING(rest);
  std::memcpy(to, begin, static_cast<size_t>(before));
  std::memcpy(to + before, "[]", 2);
  std::memcpy(to + before + 2, found.end, static_cast<size_t>(after));
  PyObject* numbers = PyBytes_FromStringAndSize(reinterpret_cast<const char*>(found.numbers.data()),
                                                static_cast<Py_ssize_t>(found.numbers.size() * sizeof(int32_t)));
  if (numbers == nullptr) {
    Py_DECREF(rest);
    return nullptr;
  }
  return Py_BuildValue("NN", rest, numbers);
}

}  // namespace

extern "C" PyMethodDef kvmesh_json_methods[];
PyMethodDef kvmesh_json_methods[] = {
    {"json_take_integers", json_take_integers, METH_VARARGS,
     "json_take_integers(text, key) -> (rest, numbers) | None\n\n"
     "The int32 numbers of the list under `key` of a JSON object, and the text with [] in its place, which is still to\n"
     "be checked. None if there is no such list, or anything in the way."},
    {nullptr, nullptr, 0, nullptr},
};
