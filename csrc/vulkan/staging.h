// Copies bytes between the host and memory that the host cannot access.
#pragma once
#include <memory>
#include <mutex>

#include "vulkan/commands.h"

namespace hc::vulkan {

// Several threads may call it; calls are serialised.
class Staging {
  public:
    explicit Staging(std::shared_ptr<Heap> heap);
    ~Staging();
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;

    // On return `data` may be reused, and later submits see the write.
    void write(std::shared_ptr<Memory> to, uint64_t offset, const uint8_t* data, uint64_t bytes,
               const CheckInterrupt& check);
    void read(std::shared_ptr<Memory> from, uint64_t offset, uint8_t* data, uint64_t bytes,
              const CheckInterrupt& check);
    void clear(std::shared_ptr<Memory> memory, const CheckInterrupt& check);

  private:
    // Half of the double buffer, and the memory that the device may still use with it.
    struct Lane {
        VkCommandBuffer commands = VK_NULL_HANDLE;
        std::shared_ptr<Memory> host, other;
        uint64_t busy_until = 0;
    };
    Lane& next(Where where, uint64_t bytes, const CheckInterrupt& check);
    void copy(Lane&, const Memory& from, uint64_t from_offset, const Memory& to, uint64_t to_offset,
              uint64_t bytes);

    std::shared_ptr<Heap> heap_;
    std::shared_ptr<Device> device_;
    std::mutex mutex_;
    Commands commands_;
    Lane up_[2], down_;
    int turn_ = 0;
};

}  // namespace hc::vulkan
