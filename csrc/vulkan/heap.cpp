#include "vulkan/heap.h"

#include <algorithm>
#include <map>

namespace hc::vulkan {

namespace {

// Bytes that the driver allocates beyond the requests: up to 256 KiB, or 2 % if that is more.
constexpr uint64_t kLeastUnused = 256 << 10, kUnusedShare = 50;
// Sizes of a shared chunk. A request takes at most a quarter: the rest at the chunk's end may be lost.
constexpr uint64_t kLeastChunk = 64 << 10, kMostChunk = 64 << 20, kChunkShare = 64, kSharers = 4;

uint64_t aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

// One allocation of the driver, with a buffer over all of it.
struct Chunk {
    Where where;
    uint64_t size = 0;   // of the buffer
    uint64_t given = 0;  // by the driver
    Owned<VkDeviceMemory> memory;
    Owned<VkBuffer> buffer;  // destroyed first
    uint8_t* host = nullptr;
    std::map<uint64_t, uint64_t> free;  // begin and size

    // First fit.
    std::optional<uint64_t> take(uint64_t bytes) {
        for (auto it = free.begin(); it != free.end(); ++it) {
            const auto [begin, size] = *it;
            if (size < bytes) continue;
            free.erase(it);
            if (size > bytes) free[begin + bytes] = size - bytes;
            return begin;
        }
        return std::nullopt;
    }
    void give_back(uint64_t begin, uint64_t bytes) {
        auto next = free.upper_bound(begin);
        if (next != free.end() && begin + bytes == next->first) {
            bytes += next->second;
            next = free.erase(next);
        }
        if (next != free.begin()) {
            const auto before = std::prev(next);
            if (before->first + before->second == begin) {
                before->second += bytes;
                return;
            }
        }
        free[begin] = bytes;
    }
    bool empty() const { return free.size() == 1 && free.begin()->second == size; }
};

Memory::~Memory() { heap_->free(*this); }
VkBuffer Memory::buffer() const { return chunk_->buffer.get(); }
uint8_t* Memory::host() const { return chunk_->host ? chunk_->host + offset_ : nullptr; }

Heap::Heap(std::shared_ptr<Device> device, std::optional<uint64_t> budget)
    : device_(std::move(device)), budget_(budget) {}
Heap::~Heap() = default;

uint64_t Heap::allocated() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return kinds_[0].given;
}

uint64_t Heap::host_allocated() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return kinds_[1].given + kinds_[2].given;
}

void Heap::check_budget() const {
    const uint64_t over = device_->over_budget();
    if (!over) return;
    const uint64_t given = allocated();
    throw VulkanMemoryError(
        device_->info().name + " has " + std::to_string(over) +
            " bytes less memory than its driver gave: these are the processor's memory: choose "
            "a smaller --vram-budget",
        over, given - std::min(over, given), budget_.value_or(0));
}

std::shared_ptr<Memory> Heap::allocate(uint64_t bytes, Where where) {
    device_->check_usable();
    const uint64_t taken = std::max(aligned(bytes), kAlignment);
    std::lock_guard<std::mutex> lock(mutex_);
    Kind& kind = kinds_[int(where)];
    Chunk* chunk = nullptr;
    std::optional<uint64_t> offset;
    for (const auto& each : kind.chunks) {
        offset = each->take(taken);
        chunk = each.get();
        if (offset) break;
    }
    if (!offset) {
        chunk = add_chunk(kind, where, taken);
        offset = chunk->take(taken);
    }
    kind.asked += taken;
    return std::make_shared<Memory>(shared_from_this(), chunk, *offset, taken, bytes);
}

// Extra bytes to allocate with a request, for later requests.
uint64_t Heap::room_for(const Kind& kind, uint64_t bytes) const {
    const uint64_t asked = kind.asked + bytes;
    const uint64_t chunk = std::clamp(asked / kChunkShare, kLeastChunk, kMostChunk);
    if (bytes > chunk / kSharers) return 0;
    const uint64_t unused = kind.given - kind.asked, allowed = std::max(kLeastUnused, asked / kUnusedShare);
    return std::min(chunk - bytes, allowed - std::min(allowed, unused));
}

Chunk* Heap::add_chunk(Kind& kind, Where where, uint64_t bytes) {
    const uint64_t most = device_->info().max_allocation;
    if (bytes > most)
        raise_full(bytes, "the driver allocates at most " + std::to_string(most) + " bytes at once");
    uint64_t left = UINT64_MAX;
    if (where == Where::kDevice && budget_) left = *budget_ - std::min(*budget_, kind.given);
    if (bytes > left) raise_full(bytes, "the budget has " + std::to_string(left) + " bytes left");
    const uint64_t room = std::min({room_for(kind, bytes), most - bytes, (left - bytes) / 4});
    const uint64_t size = bytes + room / kAlignment * kAlignment;
    std::unique_ptr<Chunk> made;
    try {
        made = make(where, size);
    } catch (const VulkanMemoryError& error) {
        try {
            made = make(where, bytes);
        } catch (const VulkanMemoryError&) {
            raise_full(bytes, error.what());
        }
    }
    kind.given += made->given;
    kind.chunks.push_back(std::move(made));
    return kind.chunks.back().get();
}

std::unique_ptr<Chunk> Heap::make(Where where, uint64_t bytes) {
    auto chunk = std::make_unique<Chunk>();
    const Functions& f = device_->f();
    chunk->where = where;
    chunk->size = bytes;
    chunk->memory = Owned<VkDeviceMemory>(device_, f.vkFreeMemory);
    chunk->buffer = Owned<VkBuffer>(device_, f.vkDestroyBuffer);
    chunk->free[0] = bytes;
    VkBufferCreateInfo create{};
    create.sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO;
    create.size = bytes;
    create.usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_TRANSFER_SRC_BIT |
                   VK_BUFFER_USAGE_TRANSFER_DST_BIT | VK_BUFFER_USAGE_INDIRECT_BUFFER_BIT;
    device_->call(f.vkCreateBuffer, device_->handle(), &create, nullptr, chunk->buffer.put());
    VkMemoryRequirements needs{};
    f.vkGetBufferMemoryRequirements(device_->handle(), chunk->buffer.get(), &needs);
    chunk->given = needs.size;
    VkMemoryAllocateInfo allocate{};
    allocate.sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO;
    allocate.allocationSize = needs.size;
    allocate.memoryTypeIndex = type_for(where, needs.memoryTypeBits);
    device_->call(f.vkAllocateMemory, device_->handle(), &allocate, nullptr, chunk->memory.put());
    device_->call(f.vkBindBufferMemory, device_->handle(), chunk->buffer.get(), chunk->memory.get(), 0);
    if (where == Where::kDevice) return chunk;
    void* host = nullptr;
    device_->call(f.vkMapMemory, device_->handle(), chunk->memory.get(), 0, VK_WHOLE_SIZE, 0, &host);
    chunk->host = static_cast<uint8_t*>(host);
    return chunk;
}

uint32_t Heap::type_for(Where where, uint32_t allowed) const {
    constexpr VkMemoryPropertyFlags kOwn = VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT,
                                    kSeen = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT |
                                            VK_MEMORY_PROPERTY_HOST_COHERENT_BIT,
                                    kCached = VK_MEMORY_PROPERTY_HOST_CACHED_BIT;
    // The flags that memory needs, and flags that it should not have; the best choice first.
    struct Choice {
        VkMemoryPropertyFlags needed, unwanted;
    };
    std::vector<Choice> choices;
    if (where == Where::kDevice) choices = {{kOwn, VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT}, {kOwn, 0}};
    if (where == Where::kUpload) choices = {{kSeen, kOwn}, {kSeen, 0}};
    if (where == Where::kDownload) choices = {{kSeen | kCached, kOwn}, {kSeen | kCached, 0}, {kSeen, 0}};
    const VkPhysicalDeviceMemoryProperties& m = device_->memory();
    for (const Choice& choice : choices)
        for (uint32_t i = 0; i < m.memoryTypeCount; ++i) {
            const VkMemoryPropertyFlags flags = m.memoryTypes[i].propertyFlags;
            if (allowed >> i & 1 && (flags & choice.needed) == choice.needed && !(flags & choice.unwanted))
                return i;
        }
    throw VulkanError(device_->info().name + " has no memory for buffers: update its driver");
}

void Heap::free(const Memory& memory) {
    if (!device_->usable()) return;  // another thread may have held the mutex when this process was forked
    std::lock_guard<std::mutex> lock(mutex_);
    Kind& kind = kinds_[int(memory.chunk_->where)];
    Chunk* chunk = memory.chunk_;
    chunk->give_back(memory.offset_, memory.taken_);
    kind.asked -= memory.taken_;
    if (!chunk->empty()) return;
    kind.given -= chunk->given;
    kind.chunks.erase(std::find_if(kind.chunks.begin(), kind.chunks.end(),
                                   [chunk](const auto& each) { return each.get() == chunk; }));
}

void Heap::raise_full(uint64_t bytes, const std::string& why) const {
    const uint64_t given = kinds_[0].given, budget = budget_.value_or(0);
    throw VulkanMemoryError(std::to_string(bytes) + " bytes of memory of " + device_->info().name +
                                " beside " + std::to_string(given) + ": " + why +
                                ": choose another --vram-budget, or fewer neurons or layers on the GPU",
                            bytes, given, budget);
}

}  // namespace hc::vulkan
