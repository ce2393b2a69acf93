// A device, its one queue, and the count of what that has done.
#pragma once
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "vulkan/functions.h"

namespace hc::vulkan {

struct DeviceInfo {
    int index;
    std::string name, kind;   // discrete, integrated, virtual, software, other
    std::string driver, api;  // the driver's name and version; "1.3.230"
    uint32_t vendor, device;
    std::string uuid;
    uint64_t memory_bytes;               // of the device's own heaps
    std::optional<uint64_t> free_bytes;  // of it, where the driver tells
    bool unified;                        // the processor's memory is the device's
    uint64_t max_range;  // bytes of one range that a shader is given, in one allocation; a multiple of 256
    uint64_t max_allocation;
    uint32_t shared_bytes;  // of a workgroup
    std::string problem;    // why it cannot be used, or ""
};

// VulkanError: no loader, no driver.
std::vector<DeviceInfo> list_devices();

class Instance {
  public:
    Instance();
    ~Instance();
    Instance(const Instance&) = delete;
    Instance& operator=(const Instance&) = delete;

    std::vector<VkPhysicalDevice> devices() const;

    Functions f;
    VkInstance handle = VK_NULL_HANDLE;
    bool kept = false;  // is not destroyed, as a device of it hangs

  private:
    int64_t process_;
};

// Asked about every 50 ms by who waits; what it throws ends the wait.
using CheckInterrupt = std::function<void()>;

class Device {
  public:
    explicit Device(int index);  // VulkanError: there is no such device, or it cannot be used
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    const DeviceInfo& info() const { return info_; }
    const Functions& f() const { return instance_.f; }
    VkDevice handle() const { return handle_; }
    uint32_t queue_family() const { return family_; }
    const VkPhysicalDeviceMemoryProperties& memory() const { return memory_; }
    const VkPhysicalDeviceLimits& limits() const { return limits_; }
    // Not in a process that was forked from the one that opened it, where the driver's threads are not; nor
    // if it hangs: what it may still use is never destroyed.
    bool usable() const;
    void check_usable() const;  // VulkanError: see usable(), or the device was lost

    // As call(), and remembers that the device was lost.
    template <class F, class... A> VkResult call(const Function<F>& function, A&&... arguments) {
        check_usable();
        const VkResult result = function(std::forward<A>(arguments)...);
        if (result < 0) raise(function.id(), result);
        return result;
    }

    // One vkQueueSubmit with a batch for each of these, which raises by one what done() returns once it is
    // executed. Returns the last one's value.
    uint64_t submit(const std::vector<VkCommandBuffer>& batches);
    uint64_t done();  // VulkanError: the device is lost, whatever the driver returns
    void wait(uint64_t value, const CheckInterrupt& check = {});
    bool wait_for(uint64_t value, uint64_t nanoseconds);  // whether it was reached
    void wait_idle() noexcept;                            // whatever happens
    uint64_t submitted() noexcept;                        // what done() returns when all is
    // VulkanError if what was submitted makes no progress for long: asked while waiting. The device is then
    // lost.
    void check_progress();
#ifdef HOTCOLD_FAULTS
    void set_patience(double seconds) { patience_ = seconds; }
#endif
    int32_t next_step() { return steps_.fetch_add(1) + 1; }  // 1, 2, ...

    // Whether timestamps of the device can be told in the host's time.
    bool has_clock() const { return has_clock_; }
    // Bytes that this process has of the device's own memory beyond what the driver has for it; 0: none, or
    // the driver does not tell. Drivers of Windows give them, and move others to the processor's memory.
    uint64_t over_budget() const;
    // Nanoseconds of std::chrono::steady_clock.
    std::vector<int64_t> host_times(const std::vector<uint64_t>& timestamps);

  private:
    [[noreturn]] void raise(FunctionId, VkResult);
    void open(VkPhysicalDevice);
    bool finds_clock(VkPhysicalDevice) const;

    Instance instance_;
    int64_t process_;
    DeviceInfo info_;
    VkPhysicalDevice physical_ = VK_NULL_HANDLE;
    bool tells_budget_ = false;
    VkPhysicalDeviceMemoryProperties memory_{};
    VkPhysicalDeviceLimits limits_{};
    VkDevice handle_ = VK_NULL_HANDLE;
    uint32_t family_ = 0;
    bool has_clock_ = false;
    VkQueue queue_ = VK_NULL_HANDLE;
    VkSemaphore timeline_ = VK_NULL_HANDLE;
    std::mutex mutex_;  // of the queue
    std::atomic<uint64_t> submitted_{0};
    // The parts of one submit; kept, so that a step allocates nothing.
    std::vector<VkSubmitInfo> submits_;
    std::vector<VkTimelineSemaphoreSubmitInfo> signals_;
    std::vector<uint64_t> values_;
    // When work was last submitted or done, and how much was done then.
    std::chrono::steady_clock::time_point progress_at_;
    uint64_t progress_ = 0;
    std::atomic<double> patience_{60};  // seconds; ten minutes of a software driver
    std::atomic<bool> lost_{false}, hung_{false};
    std::atomic<int32_t> steps_{0};
};

// An object of a device, destroyed with this.
template <class T> class Owned {
  public:
    using Destroy = Function<void(VKAPI_PTR*)(VkDevice, T, const VkAllocationCallbacks*)>;
    Owned() = default;
    Owned(std::shared_ptr<Device> device, const Destroy& destroy)
        : device_(std::move(device)), destroy_(&destroy) {}
    ~Owned() { reset(); }
    Owned(Owned&& other) noexcept { *this = std::move(other); }
    Owned& operator=(Owned&& other) noexcept {
        if (this == &other) return *this;
        reset();
        device_ = std::move(other.device_);
        destroy_ = other.destroy_;
        it_ = std::exchange(other.it_, T{});
        return *this;
    }

    T get() const { return it_; }
    T* put() { return &it_; }  // where a vkCreate writes

  private:
    void reset() noexcept {
        if (it_ && device_->usable()) (*destroy_)(device_->handle(), it_, nullptr);
        it_ = T{};
    }

    std::shared_ptr<Device> device_;
    const Destroy* destroy_ = nullptr;
    T it_{};
};

}  // namespace hc::vulkan
