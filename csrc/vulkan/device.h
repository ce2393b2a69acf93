// A device, its one queue, and the progress of that queue.
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
    uint64_t memory_bytes;               // of the device's local heaps
    std::optional<uint64_t> free_bytes;  // free bytes of these, if the driver reports them
    bool unified;                        // shares the processor's memory
    uint64_t max_range;  // bytes of one range of a shader, in one allocation; a multiple of 256
    uint64_t max_allocation;
    uint32_t shared_bytes;  // of a workgroup
    std::string problem;    // why it cannot be used, or ""
};

// Throws VulkanError without a loader or driver.
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
    bool kept = false;  // never destroyed, because one of its devices hangs

  private:
    int64_t process_;
};

// Called about every 50 ms by a waiting thread; its exception ends the wait.
using CheckInterrupt = std::function<void()>;

class Device {
  public:
    explicit Device(int index);  // VulkanError: no such device, or it cannot be used
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    const DeviceInfo& info() const { return info_; }
    const Functions& f() const { return instance_.f; }
    VkDevice handle() const { return handle_; }
    uint32_t queue_family() const { return family_; }
    const VkPhysicalDeviceMemoryProperties& memory() const { return memory_; }
    const VkPhysicalDeviceLimits& limits() const { return limits_; }
    // False in a process forked from the one that opened the device, which lacks the driver's threads. Also
    // false if the device hangs: objects it may still use are never destroyed.
    bool usable() const;
    void check_usable() const;  // throws VulkanError: see usable(), or the device was lost

    // Like vulkan::call(), but remembers a lost device.
    template <class F, class... A> VkResult call(const Function<F>& function, A&&... arguments) {
        check_usable();
        const VkResult result = function(std::forward<A>(arguments)...);
        if (result < 0) raise(function.id(), result);
        return result;
    }

    // One vkQueueSubmit with a batch for each command buffer; each batch raises done() by one when it is
    // executed. Returns the value of the last batch.
    uint64_t submit(const std::vector<VkCommandBuffer>& batches);
    uint64_t done();  // VulkanError: the device is lost, whatever the driver returns
    void wait(uint64_t value, const CheckInterrupt& check = {});
    // Like wait(), but polls for the last batch, because a sleeping thread wakes 20 to 60 us late.
    void wait_for_last(uint64_t value, const CheckInterrupt& check = {});
    bool wait_for(uint64_t value, uint64_t nanoseconds);  // true if it was reached
    void wait_idle() noexcept;                            // ignores errors
    uint64_t submitted() noexcept;                        // value of done() when all work is done
    // Called while waiting. Throws VulkanError if submitted work makes no progress for too long; the device
    // then counts as lost.
    void check_progress();
#ifdef HOTCOLD_FAULTS
    void set_patience(double seconds) { patience_ = seconds; }
#endif
    int32_t next_step() { return steps_.fetch_add(1) + 1; }  // 1, 2, ...

    // True if timestamps of the device can be converted to the host's time.
    bool has_clock() const { return has_clock_; }
    // Bytes of device memory that this process has beyond the driver's budget; 0 if none, or if the driver
    // does not report it. Drivers of Windows allow the excess and move memory to the processor.
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
    // Time of the last submit or progress, and the work done by then.
    std::chrono::steady_clock::time_point progress_at_;
    uint64_t progress_ = 0;
    std::atomic<double> patience_{60};  // seconds; ten minutes for a software driver
    std::atomic<bool> lost_{false}, hung_{false};
    std::atomic<int32_t> steps_{0};
};

// An object of a device, destroyed with its owner.
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
    T* put() { return &it_; }  // target of a vkCreate function

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
