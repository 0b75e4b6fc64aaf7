// Memory of packed weights.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace farsight {

constexpr size_t kHugePage = 2 << 20;

// Zeros on huge pages, where the system has them: a row reads all weights once, and pages would cost as much. They begin at
// a cache line, so that no vector lies in two.
class Bytes {
 public:
  // Throws std::length_error beyond what addresses reach, std::bad_alloc where there is not so much.
  void resize(size_t size) {
    if (size > PTRDIFF_MAX) throw std::length_error("a length beyond all addresses");
    const size_t whole = (size + kHugePage - 1) / kHugePage * kHugePage;
    const bool large = size >= kHugePage;
    data_.reset(static_cast<uint8_t*>(std::aligned_alloc(large ? kHugePage : 64, large ? whole : (size + 63) / 64 * 64)));
    if (size && !data_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (large) madvise(data_.get(), whole, MADV_HUGEPAGE);
#endif
    if (size) std::memset(data_.get(), 0, size);
  }
  uint8_t* data() { return data_.get(); }
  const uint8_t* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint8_t, Free> data_;
};

}  // namespace farsight
