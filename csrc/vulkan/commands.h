// Command buffers, and the barriers between what they hold.
#pragma once
#include <memory>
#include <vector>

#include "vulkan/device.h"
#include "vulkan/heap.h"

namespace hc::vulkan {

// A command pool and its buffers.
class Commands {
  public:
    explicit Commands(std::shared_ptr<Device> device);

    VkCommandBuffer make();
    void begin(VkCommandBuffer, VkCommandBufferUsageFlags usage = 0);  // forgets what was recorded
    void end(VkCommandBuffer);

  private:
    std::shared_ptr<Device> device_;
    Owned<VkCommandPool> pool_;
};

// Bytes of a memory, in a buffer.
struct Span {
    VkBuffer buffer;
    uint64_t begin, end;
};
Span span_of(const Memory& memory, uint64_t offset, uint64_t bytes);

// Earlier work of shaders and copies is seen by shaders and copies that follow; kToHost: also by the host;
// kFromHost: and so is what the host did.
enum class Barrier : int { kWork = 0, kToHost = 1, kFromHost = 2 };
void put_barrier(const Functions&, VkCommandBuffer, Barrier barrier = Barrier::kWork);

// Ranges that were read and written since the last barrier.
class Hazards {
  public:
    // Whether a barrier must come before commands that read and write these. They are noted.
    bool add(const std::vector<Span>& reads, const std::vector<Span>& writes);
    void clear();

  private:
    std::vector<Span> reads_, writes_;
};

}  // namespace hc::vulkan
