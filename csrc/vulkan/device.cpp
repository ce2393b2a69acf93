#include "vulkan/device.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(_WIN32)
#include <windows.h>
#endif

#include "pool/wait.h"

namespace hc::vulkan {

namespace {

constexpr uint32_t kVersion = VK_API_VERSION_1_3;
constexpr uint32_t kInvocations = 256, kSharedBytes = 32 << 10, kStorageBuffers = 11, kGroups = 65535;
constexpr uint64_t kSliceNanoseconds = 50'000'000;
constexpr std::chrono::microseconds kPolling(1000);  // a large head takes this long on a slow card
constexpr int kReadings = 5;                         // pairs of clock readings; the closest pair counts

// Calls a function that returns a count, then fills a list of this size.
template <class T, class List> std::vector<T> listed(List list) {
    std::vector<T> found;
    uint32_t count = 0;
    VkResult result;
    do {
        list(&count, nullptr);
        found.resize(count);
        result = list(&count, found.data());
    } while (result == VK_INCOMPLETE);
    found.resize(count);
    return found;
}

const char* kind_name(VkPhysicalDeviceType type) {
    switch (type) {
        case VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU: return "discrete";
        case VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU: return "integrated";
        case VK_PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU: return "virtual";
        case VK_PHYSICAL_DEVICE_TYPE_CPU: return "software";
        default: return "other";
    }
}

struct Features {
    VkPhysicalDeviceFeatures2 all{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2, nullptr, {}};
    VkPhysicalDeviceVulkan12Features in12{};
    VkPhysicalDeviceVulkan13Features in13{};
    Features() {
        in12.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES;
        in13.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_3_FEATURES;
        all.pNext = &in12;
        in12.pNext = &in13;
    }
    Features(const Features&) = delete;
    Features& operator=(const Features&) = delete;
};

// Returns a compute queue, preferably without graphics, so that it does not wait for the desktop. On some
// GPUs the graphics queue is faster: HOTCOLD_VULKAN_QUEUE=graphics chooses it.
std::optional<uint32_t> compute_family(const Functions& f, VkPhysicalDevice device) {
    const char* const name = std::getenv("HOTCOLD_VULKAN_QUEUE");
    const std::string wanted = name && *name ? name : "compute";
    if (wanted != "compute" && wanted != "graphics")
        throw VulkanError("HOTCOLD_VULKAN_QUEUE is '" + wanted + "': choose compute or graphics");
    uint32_t count = 0;
    f.vkGetPhysicalDeviceQueueFamilyProperties(device, &count, nullptr);
    std::vector<VkQueueFamilyProperties> families(count);
    f.vkGetPhysicalDeviceQueueFamilyProperties(device, &count, families.data());
    std::optional<uint32_t> found;
    for (uint32_t i = 0; i < count; ++i) {
        const VkQueueFlags flags = families[i].queueFlags;
        if (!(flags & VK_QUEUE_COMPUTE_BIT)) continue;
        if (!found) found = i;
        if (bool(flags & VK_QUEUE_GRAPHICS_BIT) == (wanted == "graphics")) return i;
    }
    return found;
}

bool has_extension(const Functions& f, VkPhysicalDevice device, const char* name) {
    const auto all = listed<VkExtensionProperties>([&](uint32_t* count, VkExtensionProperties* to) {
        return call(f.vkEnumerateDeviceExtensionProperties, device, nullptr, count, to);
    });
    return std::any_of(all.begin(), all.end(), [name](const VkExtensionProperties& each) {
        return std::strcmp(each.extensionName, name) == 0;
    });
}

// The clock of std::chrono::steady_clock.
#if defined(_WIN32)
constexpr VkTimeDomainEXT kHostClock = VK_TIME_DOMAIN_QUERY_PERFORMANCE_COUNTER_EXT;
#else
constexpr VkTimeDomainEXT kHostClock = VK_TIME_DOMAIN_CLOCK_MONOTONIC_EXT;
#endif

int64_t host_nanoseconds(uint64_t ticks) {
#if defined(_WIN32)
    LARGE_INTEGER a_second;
    QueryPerformanceFrequency(&a_second);
    return int64_t(double(ticks) * 1e9 / double(a_second.QuadPart));
#else
    return int64_t(ticks);
#endif
}

std::string lacking(const char* what, uint64_t has, uint64_t needed) {
    return std::string("it has ") + std::to_string(has) + " " + what + ", " + std::to_string(needed) +
           " are needed";
}

// Returns why a device cannot be used, or "".
std::string problem_of(const Functions& f, VkPhysicalDevice device, const VkPhysicalDeviceProperties& p) {
    if (p.apiVersion < kVersion)
        return "its driver has Vulkan " + version_name(p.apiVersion) + ", 1.3 is needed: update the driver";
    if (!compute_family(f, device)) return "it has no queue for compute shaders";
    Features features;
    f.vkGetPhysicalDeviceFeatures2(device, &features.all);
    if (!features.in12.timelineSemaphore) return "its driver lacks timelineSemaphore";
    if (!features.in13.shaderIntegerDotProduct) return "its driver lacks shaderIntegerDotProduct";
    const VkPhysicalDeviceLimits& l = p.limits;
    if (l.maxComputeWorkGroupInvocations < kInvocations || l.maxComputeWorkGroupSize[0] < kInvocations)
        return lacking("invocations in a workgroup", l.maxComputeWorkGroupInvocations, kInvocations);
    if (l.maxComputeSharedMemorySize < kSharedBytes)
        return lacking("bytes of shared memory", l.maxComputeSharedMemorySize, kSharedBytes);
    if (l.maxPerStageDescriptorStorageBuffers < kStorageBuffers)
        return lacking("storage buffers of a shader", l.maxPerStageDescriptorStorageBuffers, kStorageBuffers);
    if (l.maxComputeWorkGroupCount[0] < kGroups)
        return lacking("workgroups of a dispatch", l.maxComputeWorkGroupCount[0], kGroups);
    return "";
}

struct Heaps {
    uint64_t own = 0;
    std::optional<uint64_t> free;
    uint64_t over_budget = 0;
};

Heaps heaps_of(const Functions& f, VkPhysicalDevice device, bool tells_budget) {
    VkPhysicalDeviceMemoryBudgetPropertiesEXT budget{};
    budget.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT;
    VkPhysicalDeviceMemoryProperties2 memory{};
    memory.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2;
    memory.pNext = tells_budget ? &budget : nullptr;
    f.vkGetPhysicalDeviceMemoryProperties2(device, &memory);
    Heaps found;
    const VkPhysicalDeviceMemoryProperties& m = memory.memoryProperties;
    for (uint32_t i = 0; i < m.memoryHeapCount; ++i) {
        if (!(m.memoryHeaps[i].flags & VK_MEMORY_HEAP_DEVICE_LOCAL_BIT) || m.memoryHeaps[i].size < found.own)
            continue;
        found.own = m.memoryHeaps[i].size;
        if (!tells_budget) continue;
        const uint64_t most = budget.heapBudget[i], used = budget.heapUsage[i];
        found.free = most - std::min(most, used);
        found.over_budget = used - std::min(most, used);
    }
    return found;
}

DeviceInfo info_of(const Functions& f, VkPhysicalDevice device, int index) {
    VkPhysicalDeviceVulkan13Properties in13{};
    in13.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_3_PROPERTIES;
    in13.maxBufferSize = ~uint64_t(0);
    VkPhysicalDeviceVulkan12Properties in12{};
    in12.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_PROPERTIES;
    VkPhysicalDeviceVulkan11Properties in11{};
    in11.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_PROPERTIES;
    in11.pNext = &in12;
    VkPhysicalDeviceProperties2 all{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2, nullptr, {}};
    f.vkGetPhysicalDeviceProperties2(device, &all);
    const VkPhysicalDeviceProperties& p = all.properties;
    DeviceInfo info{};
    info.index = index;
    info.name = p.deviceName;
    info.kind = kind_name(p.deviceType);
    info.api = version_name(p.apiVersion);
    info.vendor = p.vendorID;
    info.device = p.deviceID;
    info.unified =
        p.deviceType == VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU || p.deviceType == VK_PHYSICAL_DEVICE_TYPE_CPU;
    info.max_range = p.limits.maxStorageBufferRange;
    info.shared_bytes = p.limits.maxComputeSharedMemorySize;
    info.problem = problem_of(f, device, p);
    if (p.apiVersion >= VK_API_VERSION_1_2) {
        if (p.apiVersion >= kVersion) in12.pNext = &in13;
        all.pNext = &in11;
        f.vkGetPhysicalDeviceProperties2(device, &all);
        info.driver = std::string(in12.driverName) + " " + in12.driverInfo;
        info.max_allocation = std::min(in11.maxMemoryAllocationSize, in13.maxBufferSize);  // as one buffer
        info.max_range = std::min(info.max_range, info.max_allocation) & ~uint64_t(255);
        for (uint8_t byte : in11.deviceUUID) {
            char hex[3];
            std::snprintf(hex, sizeof hex, "%02x", byte);
            info.uuid += hex;
        }
    }
    bool tells_budget = false;
    try {
        tells_budget = has_extension(f, device, VK_EXT_MEMORY_BUDGET_EXTENSION_NAME);
    } catch (const VulkanError& error) {  // only this device fails: others may work
        if (info.problem.empty()) info.problem = error.what();
    }
    const Heaps heaps = heaps_of(f, device, tells_budget);
    info.memory_bytes = heaps.own;
    info.free_bytes = heaps.free;
    return info;
}

}  // namespace

Instance::Instance() : process_(process_id()) {
    VkApplicationInfo application{};
    application.sType = VK_STRUCTURE_TYPE_APPLICATION_INFO;
    application.pApplicationName = "Hotcold";
    application.apiVersion = kVersion;
    VkInstanceCreateInfo create{};
    create.sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO;
    create.pApplicationInfo = &application;
    call(f.vkCreateInstance, &create, nullptr, &handle);
    f.find(handle);  // a missing function may also be the one that destroys the instance
}

Instance::~Instance() {
    if (handle && !kept && process_ == process_id()) f.vkDestroyInstance(handle, nullptr);
}

std::vector<VkPhysicalDevice> Instance::devices() const {
    return listed<VkPhysicalDevice>([this](uint32_t* count, VkPhysicalDevice* to) {
        return call(f.vkEnumeratePhysicalDevices, handle, count, to);
    });
}

std::vector<DeviceInfo> list_devices() {
    const Instance instance;
    std::vector<DeviceInfo> found;
    for (VkPhysicalDevice device : instance.devices())
        found.push_back(info_of(instance.f, device, int(found.size())));
    return found;
}

Device::Device(int index) : process_(process_id()) {
    const std::vector<VkPhysicalDevice> all = instance_.devices();
    if (index < 0 || size_t(index) >= all.size())
        throw VulkanError("Vulkan device " + std::to_string(index) + ": there are " +
                          std::to_string(all.size()) + ", counted from 0");
    info_ = info_of(f(), all[size_t(index)], index);
    if (!info_.problem.empty()) throw VulkanError(info_.name + " cannot be used: " + info_.problem);
    if (info_.kind == "software") patience_ = 600;  // as long as the largest submit may take
    physical_ = all[size_t(index)];
    tells_budget_ = has_extension(f(), physical_, VK_EXT_MEMORY_BUDGET_EXTENSION_NAME);
    open(physical_);
}

void Device::open(VkPhysicalDevice device) {
    VkPhysicalDeviceMemoryProperties2 memory{};
    memory.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2;
    f().vkGetPhysicalDeviceMemoryProperties2(device, &memory);
    memory_ = memory.memoryProperties;
    VkPhysicalDeviceProperties2 properties{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2, nullptr, {}};
    f().vkGetPhysicalDeviceProperties2(device, &properties);
    limits_ = properties.properties.limits;
    family_ = *compute_family(f(), device);
    const float priority = 1;
    VkDeviceQueueCreateInfo queue{};
    queue.sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO;
    queue.queueFamilyIndex = family_;
    queue.queueCount = 1;
    queue.pQueuePriorities = &priority;
    Features features;
    features.in12.timelineSemaphore = VK_TRUE;
    features.in13.shaderIntegerDotProduct = VK_TRUE;
    features.in13.maintenance4 = VK_TRUE;
    has_clock_ = finds_clock(device);
    const char* const clock = VK_EXT_CALIBRATED_TIMESTAMPS_EXTENSION_NAME;
    VkDeviceCreateInfo create{};
    create.sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO;
    create.pNext = &features.all;
    create.queueCreateInfoCount = 1;
    create.pQueueCreateInfos = &queue;
    create.enabledExtensionCount = has_clock_;
    create.ppEnabledExtensionNames = &clock;
    vulkan::call(f().vkCreateDevice, device, &create, nullptr, &handle_);
    try {
        instance_.f.find(handle_);
    } catch (const VulkanError&) {  // no destructor runs
        if (f().vkDestroyDevice) f().vkDestroyDevice(handle_, nullptr);
        throw;
    }
    f().vkGetDeviceQueue(handle_, family_, 0, &queue_);
    VkSemaphoreTypeCreateInfo type{};
    type.sType = VK_STRUCTURE_TYPE_SEMAPHORE_TYPE_CREATE_INFO;
    type.semaphoreType = VK_SEMAPHORE_TYPE_TIMELINE;
    VkSemaphoreCreateInfo semaphore{VK_STRUCTURE_TYPE_SEMAPHORE_CREATE_INFO, &type, 0};
    const VkResult made = f().vkCreateSemaphore(handle_, &semaphore, nullptr, &timeline_);
    if (made == VK_SUCCESS) return;
    f().vkDestroyDevice(handle_, nullptr);  // because no destructor runs
    raise_result(f().vkCreateSemaphore.id(), made);
}

bool Device::finds_clock(VkPhysicalDevice device) const {
    uint32_t count = 0;
    f().vkGetPhysicalDeviceQueueFamilyProperties(device, &count, nullptr);
    std::vector<VkQueueFamilyProperties> families(count);
    f().vkGetPhysicalDeviceQueueFamilyProperties(device, &count, families.data());
    // Timestamps of fewer bits wrap around within minutes.
    if (families[family_].timestampValidBits != 64 || limits_.timestampPeriod <= 0) return false;
    if (!f().vkGetPhysicalDeviceCalibrateableTimeDomainsEXT ||
        !has_extension(f(), device, VK_EXT_CALIBRATED_TIMESTAMPS_EXTENSION_NAME))
        return false;
    const auto domains = listed<VkTimeDomainEXT>([&](uint32_t* n, VkTimeDomainEXT* to) {
        return vulkan::call(f().vkGetPhysicalDeviceCalibrateableTimeDomainsEXT, device, n, to);
    });
    const auto has = [&](VkTimeDomainEXT wanted) {
        return std::find(domains.begin(), domains.end(), wanted) != domains.end();
    };
    return has(VK_TIME_DOMAIN_DEVICE_EXT) && has(kHostClock);
}

std::vector<int64_t> Device::host_times(const std::vector<uint64_t>& timestamps) {
    const VkCalibratedTimestampInfoEXT clocks[] = {
        {VK_STRUCTURE_TYPE_CALIBRATED_TIMESTAMP_INFO_EXT, nullptr, VK_TIME_DOMAIN_DEVICE_EXT},
        {VK_STRUCTURE_TYPE_CALIBRATED_TIMESTAMP_INFO_EXT, nullptr, kHostClock}};
    // The clocks are read one after the other; the deviation shows if the process was descheduled in between.
    uint64_t now[2] = {}, least = 0;
    for (int i = 0; i < kReadings; ++i) {
        uint64_t read[2], deviation = 0;
        call(f().vkGetCalibratedTimestampsEXT, handle_, 2u, clocks, read, &deviation);
        if (i > 0 && deviation >= least) continue;
        std::copy(read, read + 2, now);
        least = deviation;
    }
    std::vector<int64_t> times;
    for (uint64_t each : timestamps)
        times.push_back(host_nanoseconds(now[1]) +
                        int64_t(double(int64_t(each - now[0])) * limits_.timestampPeriod));
    return times;
}

Device::~Device() {
    instance_.kept = hung_;
    if (!usable()) return;
    wait_idle();
    f().vkDestroySemaphore(handle_, timeline_, nullptr);
    f().vkDestroyDevice(handle_, nullptr);
}

bool Device::usable() const { return process_ == process_id() && !hung_; }

void Device::check_usable() const {
    if (process_ != process_id())
        throw VulkanError(
            "this process was forked from the one that opened the GPU: load the model in this process");
    if (lost_) throw VulkanError(info_.name + " was lost before: load the model again");
}

void Device::raise(FunctionId id, VkResult result) {
    if (result == VK_ERROR_DEVICE_LOST) lost_ = true;
    raise_result(id, result);
}

uint64_t Device::submit(const std::vector<VkCommandBuffer>& batches) {
    check_usable();
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t n = batches.size();
    submits_.resize(n);
    signals_.resize(n);
    values_.resize(n);
    for (size_t i = 0; i < n; ++i) {
        values_[i] = submitted_ + i + 1;
        signals_[i] = {VK_STRUCTURE_TYPE_TIMELINE_SEMAPHORE_SUBMIT_INFO, nullptr, 0, nullptr, 1, &values_[i]};
        submits_[i] = {};
        submits_[i].sType = VK_STRUCTURE_TYPE_SUBMIT_INFO;
        submits_[i].pNext = &signals_[i];
        submits_[i].commandBufferCount = 1;
        submits_[i].pCommandBuffers = &batches[i];
        submits_[i].signalSemaphoreCount = 1;
        submits_[i].pSignalSemaphores = &timeline_;
    }
    call(f().vkQueueSubmit, queue_, uint32_t(n), submits_.data(), VkFence(VK_NULL_HANDLE));
    submitted_ += n;
    progress_at_ = std::chrono::steady_clock::now();
    return submitted_;
}

uint64_t Device::submitted() noexcept {
    if (!usable()) return 0;
    std::lock_guard<std::mutex> lock(mutex_);
    return submitted_;
}

uint64_t Device::done() {
    uint64_t value = 0;
    call(f().vkGetSemaphoreCounterValue, handle_, timeline_, &value);
    // Drivers of NVIDIA and AMD return success and a value of 2^64 - 1 for a lost device. Another thread may
    // be inside submit(), which holds the lock until it has counted.
    if (value > submitted_ && value > submitted())
        raise(f().vkGetSemaphoreCounterValue.id(), VK_ERROR_DEVICE_LOST);
    return value;
}

void Device::wait(uint64_t value, const CheckInterrupt& check) {
    while (!wait_for(value, kSliceNanoseconds)) {
        if (check) check();
        check_progress();
    }
}

void Device::wait_for_last(uint64_t value, const CheckInterrupt& check) {
    wait(value - 1, check);
    spin_until([&] { return done() >= value; }, kPolling);
    wait(value, check);
}

void Device::check_progress() {
    const uint64_t value = done();
    const auto now = std::chrono::steady_clock::now();
    const std::chrono::duration<double> patience(patience_);
    std::lock_guard<std::mutex> lock(mutex_);
    if (value != progress_ || value >= submitted_) {
        progress_ = value;
        progress_at_ = now;
    }
    if (now - progress_at_ <= patience) return;
    hung_ = true;
    lost_ = true;
    throw VulkanError(
        info_.name + " has done nothing for " + std::to_string(int(patience.count())) +
        " s: restart the program; if it happens again, update the driver or run with --gpu off");
}

bool Device::wait_for(uint64_t value, uint64_t nanoseconds) {
    VkSemaphoreWaitInfo wait{};
    wait.sType = VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO;
    wait.semaphoreCount = 1;
    wait.pSemaphores = &timeline_;
    wait.pValues = &value;
    return call(f().vkWaitSemaphores, handle_, &wait, nanoseconds) != VK_TIMEOUT && done() >= value;
}

uint64_t Device::over_budget() const { return heaps_of(f(), physical_, tells_budget_).over_budget; }

void Device::wait_idle() noexcept {
    if (!usable()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    f().vkDeviceWaitIdle(handle_);
}

}  // namespace hc::vulkan
