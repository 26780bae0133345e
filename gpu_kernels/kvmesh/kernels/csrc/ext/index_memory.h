// Growable arrays of the prefix index: their memory is counted, and large ones are mappings of their own, so that what
// is counted is what the process has, and shrinking gives it back.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

namespace kvmesh::index {

constexpr uint32_t kNone = UINT32_MAX;
constexpr size_t kLineBytes = 64;  // of the processor's cache

// Prefetching. To gcc, a function that does nothing but prefetch does nothing at all, and calls of it are left out: hence
// the statement without instructions.
inline void fetch(const void* at) {
  __builtin_prefetch(at);
  __asm__ volatile("");
}
inline void fetch_to_write(const void* at) {
  __builtin_prefetch(at, 1);
  __asm__ volatile("");
}

// From here on an array is mapped: growing it moves pages, not bytes, and needs no second copy.
constexpr size_t kMappedBytes = 64 * 1024;
// From here on it grows in small steps.
constexpr size_t kLargeBytes = 256 * 1024;
constexpr size_t kPageBytes = 4096;
// From here on an array is of huge pages: it is read at random places, and its pages are had at a fifth of the price.
constexpr size_t kHugeBytes = 2 * 1024 * 1024;
constexpr size_t kHugePageBytes = 2 * 1024 * 1024;
// Address space for so many times what a huge array needs, so that it grows in its place: what moves cannot keep them.
constexpr size_t kReservedTimes = 8;

// How many values to make room for when `needed` do not fit: small arrays grow by half, large ones by an eighth.
inline size_t grown(size_t needed, size_t now, size_t value_bytes) {
  const size_t step = now * value_bytes < kLargeBytes ? now / 2 : now / 8;
  return std::max<size_t>({needed, now + step, 16});
}

template <typename T>
class Array {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  // `account` is kept at the sum of the bytes of all arrays that share it.
  explicit Array(size_t* account) : account_(account) {}
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { set_capacity(0); }

  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t capacity() const { return bytes_ / sizeof(T); }
  size_t bytes() const { return bytes_; }
  size_t* account() const { return account_; }

  static size_t bytes_for(size_t capacity) {
    const size_t bytes = capacity * sizeof(T);
    const size_t step = bytes < kMappedBytes ? kLineBytes : bytes < kHugeBytes ? kPageBytes : kHugePageBytes;
    return (bytes + step - 1) / step * step;
  }

  // Keeps the leading values. On bad_alloc nothing has changed; making an array smaller never fails.
  void set_capacity(size_t capacity) {
    const size_t wanted = bytes_for(capacity);
    if (wanted == bytes_) return;
    T* data = resized(wanted);
    if (data == nullptr && wanted > 0) {
      if (wanted < bytes_) return;
      throw std::bad_alloc();
    }
    *account_ += wanted - bytes_;
    data_ = data;
    if (wanted >= kMappedBytes && wanted > bytes_) populate(bytes_ < kMappedBytes ? 0 : bytes_, wanted);
    bytes_ = wanted;
  }

  void swap(Array& other) {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(reserved_, other.reserved_);
    std::swap(account_, other.account_);
  }

 private:
  // The array with so many bytes, or null. It may have moved, and what is beyond its old end is not there yet.
  T* resized(size_t wanted) {
    const bool in_place = bytes_ >= kHugeBytes && wanted <= reserved_;
    if (wanted >= kHugeBytes) return in_place ? resized_in_place(wanted) : moved(wanted);
    const bool was_mapped = bytes_ >= kMappedBytes, is_mapped = wanted >= kMappedBytes;
    if (was_mapped && is_mapped && bytes_ < kHugeBytes) {
      T* data = checked(mremap(data_, bytes_, wanted, MREMAP_MAYMOVE));
      if (data != nullptr) reserved_ = wanted;
      return data;
    }
    // Where a value is a large part of a line of the cache, it shall not lie in two of them.
    constexpr bool kAligned = sizeof(T) >= kLineBytes / 2;
    if (!kAligned && !was_mapped && !is_mapped && wanted > 0) return static_cast<T*>(std::realloc(data_, wanted));
    T* data = nullptr;
    if (is_mapped) {
      data = mapped(wanted);
    } else if (wanted > 0) {
      data = static_cast<T*>(std::aligned_alloc(kLineBytes, wanted));
    }
    if (data == nullptr && wanted > 0) return nullptr;
    if (data != nullptr && data_ != nullptr)
      std::memcpy(static_cast<void*>(data), data_, std::min(bytes_, wanted));
    if (was_mapped) {
      munmap(data_, reserved_);
    } else {
      std::free(data_);
    }
    reserved_ = is_mapped ? wanted : 0;
    return data;
  }
  T* resized_in_place(size_t wanted) {
    if (wanted < bytes_) madvise(reinterpret_cast<char*>(data_) + wanted, bytes_ - wanted, MADV_DONTNEED);
    return data_;
  }
  // To a mapping with address space for more, a page at a time: there is never memory for both.
  T* moved(size_t wanted) {
    size_t reserved = wanted * kReservedTimes;
    char* space = reinterpret_cast<char*>(mapped(reserved + kHugePageBytes));
    if (space == nullptr) {
      reserved = wanted;
      space = reinterpret_cast<char*>(mapped(reserved + kHugePageBytes));
      if (space == nullptr) return nullptr;
    }
    const size_t before = -reinterpret_cast<uintptr_t>(space) % kHugePageBytes;
    if (before > 0) munmap(space, before);
    char* data = space + before;
    munmap(data + reserved, kHugePageBytes - before);
    madvise(data, reserved, MADV_HUGEPAGE);  // it is as well without
    char* old = reinterpret_cast<char*>(data_);
    for (size_t at = 0; at < bytes_; at += kHugePageBytes) {
      const size_t size = std::min(bytes_ - at, kHugePageBytes);
      std::memcpy(data + at, old + at, size);
      if (bytes_ >= kMappedBytes) madvise(old + at, size, MADV_DONTNEED);
    }
    if (bytes_ >= kMappedBytes) {
      munmap(old, reserved_);
    } else {
      std::free(old);
    }
    reserved_ = reserved;
    return reinterpret_cast<T*>(data);
  }
  // What is new is used soon, and counted already: its pages are had more cheaply together than one by one.
  void populate([[maybe_unused]] size_t begin, [[maybe_unused]] size_t end) {
#ifdef MADV_POPULATE_WRITE
    madvise(reinterpret_cast<char*>(data_) + begin, end - begin, MADV_POPULATE_WRITE);  // old kernels refuse
#endif
  }
  static T* mapped(size_t bytes) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    return checked(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kFlags, -1, 0));
  }
  static T* checked(void* mapping) { return mapping == MAP_FAILED ? nullptr : static_cast<T*>(mapping); }

  T* data_ = nullptr;
  size_t bytes_ = 0;
  size_t reserved_ = 0;  // address space of a mapping, of which bytes_ are in use
  size_t* account_;
};

// For maps and sets of few entries: their nodes are counted with what malloc adds to each.
template <typename T>
struct CountedAllocator {
  using value_type = T;

  explicit CountedAllocator(size_t* account) : account(account) {}
  template <typename Other>
  CountedAllocator(const CountedAllocator<Other>& other) : account(other.account) {}

  T* allocate(size_t count) {
    T* values = std::allocator<T>().allocate(count);
    *account += bytes_for(count);
    return values;
  }
  void deallocate(T* values, size_t count) noexcept {
    *account -= bytes_for(count);
    std::allocator<T>().deallocate(values, count);
  }
  bool operator==(const CountedAllocator& other) const { return account == other.account; }
  bool operator!=(const CountedAllocator& other) const { return account != other.account; }

  size_t* account;

 private:
  // glibc's chunks: a header of 8 bytes, multiples of 16, at least 32.
  static size_t bytes_for(size_t count) { return std::max<size_t>((count * sizeof(T) + 23) / 16 * 16, 32); }
};

}  // namespace kvmesh::index
