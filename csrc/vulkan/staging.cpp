#include "vulkan/staging.h"

#include <algorithm>
#include <cstring>

namespace hc::vulkan {

namespace {

// Size limits of one buffer: as many bytes as are moved, within these.
constexpr uint64_t kLeast = 1 << 20, kMost = 32 << 20;

}  // namespace

Staging::Staging(std::shared_ptr<Heap> heap)
    : heap_(std::move(heap)), device_(heap_->device()), commands_(device_) {
    for (Lane* lane : {&up_[0], &up_[1], &down_}) lane->commands = commands_.make();
}

Staging::~Staging() { device_->wait_idle(); }

Staging::Lane& Staging::next(Where where, uint64_t bytes, const CheckInterrupt& check) {
    Lane& lane = where == Where::kDownload ? down_ : up_[turn_];
    if (where == Where::kUpload) turn_ = 1 - turn_;
    device_->wait(lane.busy_until, check);
    lane.other = nullptr;
    if (bytes && (!lane.host || (lane.host->size() < bytes && lane.host->size() < kMost))) {
        lane.host = nullptr;
        lane.host = heap_->allocate(std::clamp(bytes, kLeast, kMost), where);
    }
    commands_.begin(lane.commands, VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT);
    put_barrier(device_->f(), lane.commands);
    return lane;
}

void Staging::copy(Lane& lane, const Memory& from, uint64_t from_offset, const Memory& to, uint64_t to_offset,
                   uint64_t bytes) {
    const VkBufferCopy range{from.offset() + from_offset, to.offset() + to_offset, bytes};
    device_->f().vkCmdCopyBuffer(lane.commands, from.buffer(), to.buffer(), 1, &range);
}

void Staging::write(std::shared_ptr<Memory> to, uint64_t offset, const uint8_t* data, uint64_t bytes,
                    const CheckInterrupt& check) {
    device_->check_usable();
    std::lock_guard<std::mutex> lock(mutex_);
    for (uint64_t at = 0; at < bytes;) {
        Lane& lane = next(Where::kUpload, bytes - at, check);
        const uint64_t size = std::min(bytes - at, lane.host->size());
        std::memcpy(lane.host->host(), data + at, size);
        copy(lane, *lane.host, 0, *to, offset + at, size);
        commands_.end(lane.commands);
        lane.other = to;
        lane.busy_until = device_->submit({lane.commands});
        at += size;
    }
}

void Staging::read(std::shared_ptr<Memory> from, uint64_t offset, uint8_t* data, uint64_t bytes,
                   const CheckInterrupt& check) {
    device_->check_usable();
    std::lock_guard<std::mutex> lock(mutex_);
    for (uint64_t at = 0; at < bytes;) {
        Lane& lane = next(Where::kDownload, bytes - at, check);
        const uint64_t size = std::min(bytes - at, lane.host->size());
        copy(lane, *from, offset + at, *lane.host, 0, size);
        put_barrier(device_->f(), lane.commands, Barrier::kToHost);
        commands_.end(lane.commands);
        lane.other = from;
        lane.busy_until = device_->submit({lane.commands});
        device_->wait(lane.busy_until, check);
        std::memcpy(data + at, lane.host->host(), size);
        at += size;
    }
}

void Staging::clear(std::shared_ptr<Memory> memory, const CheckInterrupt& check) {
    device_->check_usable();
    std::lock_guard<std::mutex> lock(mutex_);
    Lane& lane = next(Where::kUpload, 0, check);
    const uint64_t bytes = (memory->size() + 3) / 4 * 4;  // ranges end at multiples of kAlignment
    device_->f().vkCmdFillBuffer(lane.commands, memory->buffer(), memory->offset(), bytes, 0);
    commands_.end(lane.commands);
    lane.other = std::move(memory);
    lane.busy_until = device_->submit({lane.commands});
}

}  // namespace hc::vulkan
