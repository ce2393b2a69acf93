#include "vulkan/commands.h"

#include <algorithm>

namespace hc::vulkan {

Commands::Commands(std::shared_ptr<Device> device)
    : device_(std::move(device)), pool_(device_, device_->f().vkDestroyCommandPool) {
    VkCommandPoolCreateInfo create{};
    create.sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO;
    create.flags = VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT;
    create.queueFamilyIndex = device_->queue_family();
    device_->call(device_->f().vkCreateCommandPool, device_->handle(), &create, nullptr, pool_.put());
}

VkCommandBuffer Commands::make() {
    VkCommandBufferAllocateInfo allocate{};
    allocate.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO;
    allocate.commandPool = pool_.get();
    allocate.level = VK_COMMAND_BUFFER_LEVEL_PRIMARY;
    allocate.commandBufferCount = 1;
    VkCommandBuffer made = VK_NULL_HANDLE;
    device_->call(device_->f().vkAllocateCommandBuffers, device_->handle(), &allocate, &made);
    return made;
}

void Commands::begin(VkCommandBuffer commands, VkCommandBufferUsageFlags usage) {
    device_->call(device_->f().vkResetCommandBuffer, commands,
                  0u);  // an error may have left it half recorded
    VkCommandBufferBeginInfo begin{};
    begin.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO;
    begin.flags = usage;
    device_->call(device_->f().vkBeginCommandBuffer, commands, &begin);
}

void Commands::end(VkCommandBuffer commands) { device_->call(device_->f().vkEndCommandBuffer, commands); }

Span span_of(const Memory& memory, uint64_t offset, uint64_t bytes) {
    const uint64_t begin = memory.offset() + offset;
    return {memory.buffer(), begin, begin + bytes};
}

void put_barrier(const Functions& f, VkCommandBuffer commands, Barrier kind) {
    VkPipelineStageFlags before = VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | VK_PIPELINE_STAGE_TRANSFER_BIT;
    VkPipelineStageFlags after = before;
    VkMemoryBarrier barrier{};
    barrier.sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER;
    barrier.srcAccessMask = VK_ACCESS_SHADER_WRITE_BIT | VK_ACCESS_TRANSFER_WRITE_BIT;
    barrier.dstAccessMask = VK_ACCESS_SHADER_READ_BIT | VK_ACCESS_SHADER_WRITE_BIT |
                            VK_ACCESS_TRANSFER_READ_BIT | VK_ACCESS_TRANSFER_WRITE_BIT;
    if (kind == Barrier::kToHost) {
        after |= VK_PIPELINE_STAGE_HOST_BIT;
        barrier.dstAccessMask |= VK_ACCESS_HOST_READ_BIT;
    }
    if (kind == Barrier::kFromHost) {
        before |= VK_PIPELINE_STAGE_HOST_BIT;
        barrier.srcAccessMask |= VK_ACCESS_HOST_WRITE_BIT;
    }
    f.vkCmdPipelineBarrier(commands, before, after, 0, 1, &barrier, 0, nullptr, 0, nullptr);
}

bool Hazards::add(const std::vector<Span>& reads, const std::vector<Span>& writes) {
    const auto meet = [](const std::vector<Span>& a, const std::vector<Span>& b) {
        return std::any_of(a.begin(), a.end(), [&b](const Span& x) {
            return std::any_of(b.begin(), b.end(), [&x](const Span& y) {
                return x.buffer == y.buffer && x.begin < y.end && y.begin < x.end;
            });
        });
    };
    const bool hazard = meet(reads, writes_) || meet(writes, writes_) || meet(writes, reads_);
    if (hazard) clear();
    reads_.insert(reads_.end(), reads.begin(), reads.end());
    writes_.insert(writes_.end(), writes.begin(), writes.end());
    return hazard;
}

void Hazards::clear() {
    reads_.clear();
    writes_.clear();
}

}  // namespace hc::vulkan
