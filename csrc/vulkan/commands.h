// Command buffers, and the barriers between their commands.
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
    void begin(VkCommandBuffer, VkCommandBufferUsageFlags usage = 0);  // discards earlier commands
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

// Makes earlier work of shaders and copies visible to later shaders and copies; kToHost: also to the host;
// kFromHost: and the host's writes to them.
enum class Barrier : int { kWork = 0, kToHost = 1, kFromHost = 2 };
void put_barrier(const Functions&, VkCommandBuffer, Barrier barrier = Barrier::kWork);

// Ranges that were read and written since the last barrier.
class Hazards {
  public:
    // Returns true if a barrier must precede commands that read and write these ranges; records the ranges.
    bool add(const std::vector<Span>& reads, const std::vector<Span>& writes);
    void clear();

  private:
    std::vector<Span> reads_, writes_;
};

}  // namespace hc::vulkan
