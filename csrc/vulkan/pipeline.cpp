#include "vulkan/pipeline.h"

#include <stdexcept>

namespace hc::vulkan {

namespace {

constexpr uint32_t kHardwareHalves = 32;  // number of the constant in csrc/shaders/half.glsl

}  // namespace

Pipeline::Pipeline(std::shared_ptr<Device> device, const std::vector<uint32_t>& spirv, uint32_t ranges,
                   uint32_t push_bytes, std::vector<uint32_t> constants, bool hardware_halves)
    : device_(std::move(device)),
      ranges_(ranges),
      push_bytes_(push_bytes),
      set_layout_(device_, device_->f().vkDestroyDescriptorSetLayout),
      layout_(device_, device_->f().vkDestroyPipelineLayout),
      pipeline_(device_, device_->f().vkDestroyPipeline) {
    const Functions& f = device_->f();
    if (push_bytes % 4 || push_bytes > 128)
        throw std::invalid_argument(std::to_string(push_bytes) +
                                    " bytes of push constants: at most 128, whole words");
    std::vector<VkDescriptorSetLayoutBinding> bindings(ranges);
    for (uint32_t i = 0; i < ranges; ++i)
        bindings[i] = {i, VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, 1, VK_SHADER_STAGE_COMPUTE_BIT, nullptr};
    const VkDescriptorSetLayoutCreateInfo set{VK_STRUCTURE_TYPE_DESCRIPTOR_SET_LAYOUT_CREATE_INFO, nullptr, 0,
                                              ranges, bindings.data()};
    device_->call(f.vkCreateDescriptorSetLayout, device_->handle(), &set, nullptr, set_layout_.put());

    const VkDescriptorSetLayout sets = set_layout_.get();
    const VkPushConstantRange push{VK_SHADER_STAGE_COMPUTE_BIT, 0, push_bytes};
    const VkPipelineLayoutCreateInfo layout{
        VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO, nullptr, 0, 1, &sets, push_bytes ? 1u : 0u, &push};
    device_->call(f.vkCreatePipelineLayout, device_->handle(), &layout, nullptr, layout_.put());

    Owned<VkShaderModule> module(device_, f.vkDestroyShaderModule);
    const VkShaderModuleCreateInfo code{VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO, nullptr, 0,
                                        spirv.size() * 4, spirv.data()};
    device_->call(f.vkCreateShaderModule, device_->handle(), &code, nullptr, module.put());

    std::vector<VkSpecializationMapEntry> entries;
    for (uint32_t i = 0; i < constants.size(); ++i) entries.push_back({i, i * 4, 4});
    entries.push_back({kHardwareHalves, uint32_t(constants.size() * 4), 4});  // ignored by other shaders
    constants.push_back(hardware_halves);
    const VkSpecializationInfo special{uint32_t(entries.size()), entries.data(), constants.size() * 4,
                                       constants.data()};
    VkComputePipelineCreateInfo create{};
    create.sType = VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO;
    create.stage.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO;
    create.stage.stage = VK_SHADER_STAGE_COMPUTE_BIT;
    create.stage.module = module.get();
    create.stage.pName = "main";
    create.stage.pSpecializationInfo = &special;
    create.layout = layout_.get();
    device_->call(f.vkCreateComputePipelines, device_->handle(), VkPipelineCache(VK_NULL_HANDLE), 1u, &create,
                  nullptr, pipeline_.put());
}

}  // namespace hc::vulkan
