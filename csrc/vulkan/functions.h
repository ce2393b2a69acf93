// Vulkan's functions, found by the loader when a device is opened; and their errors.
#pragma once
#define VK_NO_PROTOTYPES
#include <vulkan/vulkan_core.h>

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace hc::vulkan {

// One line: what failed, why, and what to do.
class VulkanError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// The device's memory, or our budget of it, is full.
class VulkanMemoryError : public VulkanError {
  public:
    VulkanMemoryError(const std::string& what, uint64_t asked, uint64_t allocated, uint64_t budget)
        : VulkanError(what), asked(asked), allocated(allocated), budget(budget) {}
    uint64_t asked, allocated, budget;  // bytes; budget 0: none was set
};

// Functions of no instance, of an instance, and of a device.
#define HC_VULKAN_GLOBAL(X) \
    X(vkCreateInstance)     \
    X(vkEnumerateInstanceVersion)
#define HC_VULKAN_INSTANCE(X)                   \
    X(vkDestroyInstance)                        \
    X(vkEnumeratePhysicalDevices)               \
    X(vkGetPhysicalDeviceProperties2)           \
    X(vkGetPhysicalDeviceFeatures2)             \
    X(vkGetPhysicalDeviceMemoryProperties2)     \
    X(vkGetPhysicalDeviceQueueFamilyProperties) \
    X(vkEnumerateDeviceExtensionProperties)     \
    X(vkCreateDevice)                           \
    X(vkGetDeviceProcAddr)
#define HC_VULKAN_DEVICE(X)          \
    X(vkDestroyDevice)               \
    X(vkGetDeviceQueue)              \
    X(vkDeviceWaitIdle)              \
    X(vkQueueSubmit)                 \
    X(vkCreateSemaphore)             \
    X(vkDestroySemaphore)            \
    X(vkGetSemaphoreCounterValue)    \
    X(vkWaitSemaphores)              \
    X(vkAllocateMemory)              \
    X(vkFreeMemory)                  \
    X(vkMapMemory)                   \
    X(vkCreateBuffer)                \
    X(vkDestroyBuffer)               \
    X(vkGetBufferMemoryRequirements) \
    X(vkBindBufferMemory)            \
    X(vkCreateShaderModule)          \
    X(vkDestroyShaderModule)         \
    X(vkCreateDescriptorSetLayout)   \
    X(vkDestroyDescriptorSetLayout)  \
    X(vkCreatePipelineLayout)        \
    X(vkDestroyPipelineLayout)       \
    X(vkCreateComputePipelines)      \
    X(vkDestroyPipeline)             \
    X(vkCreateDescriptorPool)        \
    X(vkDestroyDescriptorPool)       \
    X(vkAllocateDescriptorSets)      \
    X(vkUpdateDescriptorSets)        \
    X(vkCreateCommandPool)           \
    X(vkDestroyCommandPool)          \
    X(vkAllocateCommandBuffers)      \
    X(vkResetCommandBuffer)          \
    X(vkBeginCommandBuffer)          \
    X(vkEndCommandBuffer)            \
    X(vkCmdBindPipeline)             \
    X(vkCmdBindDescriptorSets)       \
    X(vkCmdPushConstants)            \
    X(vkCmdDispatch)                 \
    X(vkCmdCopyBuffer)               \
    X(vkCmdFillBuffer)               \
    X(vkCmdPipelineBarrier)          \
    X(vkCreateQueryPool)             \
    X(vkDestroyQueryPool)            \
    X(vkCmdResetQueryPool)           \
    X(vkCmdWriteTimestamp)           \
    X(vkGetQueryPoolResults)
// Functions of VK_EXT_calibrated_timestamps, which some drivers lack.
#define HC_VULKAN_CLOCKS_INSTANCE(X) X(vkGetPhysicalDeviceCalibrateableTimeDomainsEXT)
#define HC_VULKAN_CLOCKS_DEVICE(X) X(vkGetCalibratedTimestampsEXT)
#define HC_VULKAN_ALL(X)         \
    HC_VULKAN_GLOBAL(X)          \
    HC_VULKAN_INSTANCE(X)        \
    HC_VULKAN_DEVICE(X)          \
    HC_VULKAN_CLOCKS_INSTANCE(X) \
    HC_VULKAN_CLOCKS_DEVICE(X)

enum FunctionId : int {
#define HC_ID(name) k_##name,
    HC_VULKAN_ALL(HC_ID)
#undef HC_ID
        kFunctions
};

#ifdef HOTCOLD_FAULTS
// For tests (faults.cpp): counts a call and returns the error it should fail with; VK_SUCCESS: proceed.
VkResult watched_call(FunctionId);
std::map<std::string, int64_t> calls();  // number of calls of each function
void forget_calls();
// Makes the nth next call of the function (1: the next) return `result` and do nothing; nth 0: none. Throws
// std::invalid_argument if the function does not exist or returns no VkResult.
void fail_call(const std::string& function, int64_t nth, int result);
// The same for a function that returns nothing.
void skip_call(const std::string& function, int64_t nth);
#endif

template <class F> class Function;
template <class R, class... A> class Function<R(VKAPI_PTR*)(A...)> {
  public:
    using Pointer = R(VKAPI_PTR*)(A...);
    explicit Function(FunctionId id) : id_(id) {}
    R operator()(A... arguments) const {
#ifdef HOTCOLD_FAULTS
        const VkResult injected = watched_call(id_);
        if constexpr (std::is_same_v<R, VkResult>) {
            if (injected) return injected;
        } else if constexpr (std::is_void_v<R>) {
            if (injected) return;
        }
#endif
        return at_(arguments...);
    }
    void set(PFN_vkVoidFunction at) { at_ = reinterpret_cast<Pointer>(at); }
    explicit operator bool() const { return at_ != nullptr; }
    FunctionId id() const { return id_; }

  private:
    FunctionId id_;
    Pointer at_ = nullptr;
};

struct Functions {
#define HC_MEMBER(name) Function<PFN_##name> name{k_##name};
    HC_VULKAN_ALL(HC_MEMBER)
#undef HC_MEMBER

    Functions();  // opens the loader and finds the global functions
    void find(VkInstance);
    void find(VkDevice);

  private:
    PFN_vkGetInstanceProcAddr get_ = nullptr;
};

const char* function_name(FunctionId);
std::string result_name(VkResult);
std::string version_name(uint32_t);

// Throws VulkanError with the names of function and result; VulkanMemoryError if the device is out of memory.
[[noreturn]] void raise_result(FunctionId, VkResult);

// For calls that must succeed; positive results are no failure.
template <class F, class... A> VkResult call(const Function<F>& function, A&&... arguments) {
    const VkResult result = function(std::forward<A>(arguments)...);
    if (result < 0) raise_result(function.id(), result);
    return result;
}

}  // namespace hc::vulkan
