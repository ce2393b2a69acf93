// A compute shader, ready to dispatch.
#pragma once
#include <memory>
#include <vector>

#include "vulkan/device.h"

namespace hc::vulkan {

class Pipeline {
  public:
    // `spirv` is a module whose main() reads `ranges` storage buffers, bindings 0, 1, ... of set 0, and push
    // constants; `constants` are its specialisation constants 0, 1, ... `hardware_halves` is the constant of
    // csrc/shaders/half.glsl.
    Pipeline(std::shared_ptr<Device> device, const std::vector<uint32_t>& spirv, uint32_t ranges,
             uint32_t push_bytes, std::vector<uint32_t> constants, bool hardware_halves = false);

    const std::shared_ptr<Device>& device() const { return device_; }
    VkPipeline get() const { return pipeline_.get(); }
    VkPipelineLayout layout() const { return layout_.get(); }
    VkDescriptorSetLayout set_layout() const { return set_layout_.get(); }
    uint32_t ranges() const { return ranges_; }
    uint32_t push_bytes() const { return push_bytes_; }

  private:
    std::shared_ptr<Device> device_;
    uint32_t ranges_, push_bytes_;
    Owned<VkDescriptorSetLayout> set_layout_;
    Owned<VkPipelineLayout> layout_;
    Owned<VkPipeline> pipeline_;
};

}  // namespace hc::vulkan
