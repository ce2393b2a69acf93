// Memory of a device: ranges of a few large allocations.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "vulkan/device.h"

namespace hc::vulkan {

// kDevice: for shaders. kUpload: written by the host, read by the device. kDownload: the reverse.
enum class Where : int { kDevice = 0, kUpload = 1, kDownload = 2 };

constexpr uint64_t kAlignment = 256;  // of every range: no device requires more

class Heap;
struct Chunk;

// A range of a chunk, freed with the last reference.
class Memory {
  public:
    Memory(std::shared_ptr<Heap> heap, Chunk* chunk, uint64_t offset, uint64_t taken, uint64_t size)
        : heap_(std::move(heap)), chunk_(chunk), offset_(offset), taken_(taken), size_(size) {}
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    VkBuffer buffer() const;
    uint64_t offset() const { return offset_; }  // in the buffer
    uint64_t size() const { return size_; }
    uint8_t* host() const;  // null if the host cannot access it

  private:
    friend class Heap;
    std::shared_ptr<Heap> heap_;
    Chunk* chunk_;
    uint64_t offset_, taken_, size_;
};

// Large requests get chunks of their own size; small ones share chunks.
class Heap : public std::enable_shared_from_this<Heap> {
  public:
    // `budget`: maximum bytes of the device's own memory.
    Heap(std::shared_ptr<Device> device, std::optional<uint64_t> budget);
    ~Heap();

    std::shared_ptr<Memory> allocate(uint64_t bytes, Where where);
    uint64_t allocated() const;  // of the device's own memory
    uint64_t host_allocated() const;
    // Throws VulkanMemoryError if the driver has allocated more of the device's memory than this process may
    // use.
    void check_budget() const;
    const std::shared_ptr<Device>& device() const { return device_; }

  private:
    friend class Memory;
    // Bytes requested and bytes allocated by the driver, of one kind.
    struct Kind {
        uint32_t type = 0;
        uint64_t asked = 0, given = 0;
        std::vector<std::unique_ptr<Chunk>> chunks;
    };

    uint32_t type_for(Where, uint32_t allowed) const;
    std::unique_ptr<Chunk> make(Where, uint64_t bytes);
    uint64_t room_for(const Kind&, uint64_t bytes) const;
    Chunk* add_chunk(Kind&, Where, uint64_t bytes);
    void free(const Memory&);
    [[noreturn]] void raise_full(uint64_t bytes, const std::string& why) const;

    std::shared_ptr<Device> device_;
    const std::optional<uint64_t> budget_;
    mutable std::mutex mutex_;
    Kind kinds_[3];
};

}  // namespace hc::vulkan
