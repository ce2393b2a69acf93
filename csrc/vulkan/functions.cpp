#include "vulkan/functions.h"

#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace hc::vulkan {

namespace {

constexpr const char* kNames[] = {
#define HC_NAME(name) #name,
    HC_VULKAN_ALL(HC_NAME)
#undef HC_NAME
};

#if defined(_WIN32)
constexpr const char* kLoader = "vulkan-1.dll";
// Searches the program's folder and the system's, never the current folder.
void* open_loader() {
    return reinterpret_cast<void*>(LoadLibraryExA(kLoader, nullptr, LOAD_LIBRARY_SEARCH_DEFAULT_DIRS));
}
void* find_symbol(void* library, const char* name) {
    return reinterpret_cast<void*>(GetProcAddress(static_cast<HMODULE>(library), name));
}
#else
#if defined(__APPLE__)
constexpr const char* kLoader = "libvulkan.1.dylib";
#else
constexpr const char* kLoader = "libvulkan.so.1";
#endif
void* open_loader() { return dlopen(kLoader, RTLD_NOW | RTLD_LOCAL); }
void* find_symbol(void* library, const char* name) { return dlsym(library, name); }
#endif

// Stays open: not all drivers survive being closed and opened again.
PFN_vkGetInstanceProcAddr loader() {
    static void* const library = open_loader();
    if (!library)
        throw VulkanError(std::string("no Vulkan loader (") + kLoader +
                          "): install the GPU's driver; on Debian and Ubuntu: apt install libvulkan1 "
                          "mesa-vulkan-drivers");
    void* found = find_symbol(library, "vkGetInstanceProcAddr");
    if (!found) throw VulkanError(std::string(kLoader) + " is no Vulkan loader: install the GPU's driver");
    return reinterpret_cast<PFN_vkGetInstanceProcAddr>(found);
}

template <class F> void set(Function<F>& function, PFN_vkVoidFunction at) {
    if (!at)
        throw VulkanError(std::string("the Vulkan driver lacks ") + function_name(function.id()) +
                          ": install one that has Vulkan 1.3");
    function.set(at);
}

const char* advice(VkResult result) {
    switch (result) {
        case VK_ERROR_OUT_OF_HOST_MEMORY: return "the driver got no host memory: close other programs";
        case VK_ERROR_OUT_OF_DEVICE_MEMORY:
            return "the device's memory is full: choose a smaller --vram-budget, or close what else uses it";
        case VK_ERROR_DEVICE_LOST:
            return "the device was lost (reset by its driver, perhaps after work that took too long): load "
                   "the "
                   "model again; if it happens again, update the driver or run with --gpu off";
        case VK_ERROR_INCOMPATIBLE_DRIVER:
            return "no Vulkan driver is found: install the GPU's, or name its manifest (a .json file) in "
                   "VK_DRIVER_FILES; a container needs the capability graphics "
                   "(NVIDIA_DRIVER_CAPABILITIES=all); a software one on Debian and Ubuntu: apt install "
                   "mesa-vulkan-drivers";
        case VK_ERROR_INITIALIZATION_FAILED:
            return "the driver could not start: is the device open to this user (groups video, render)?";
        case VK_ERROR_LAYER_NOT_PRESENT: return "a layer that the environment names is not installed";
        case VK_ERROR_TOO_MANY_OBJECTS: return "too many allocations: close other models";
        default: return "update the GPU's driver, or run with --gpu off";
    }
}

}  // namespace

Functions::Functions() : get_(loader()) {
#define HC_FIND(name) set(name, get_(nullptr, #name));
    HC_VULKAN_GLOBAL(HC_FIND)
#undef HC_FIND
}

void Functions::find(VkInstance instance) {
#define HC_FIND(name) set(name, get_(instance, #name));
    HC_VULKAN_INSTANCE(HC_FIND)
#undef HC_FIND
#define HC_FIND(name) name.set(get_(instance, #name));
    HC_VULKAN_CLOCKS_INSTANCE(HC_FIND)
#undef HC_FIND
}

void Functions::find(VkDevice device) {
#define HC_FIND(name) set(name, vkGetDeviceProcAddr(device, #name));
    HC_VULKAN_DEVICE(HC_FIND)
#undef HC_FIND
#define HC_FIND(name) name.set(vkGetDeviceProcAddr(device, #name));
    HC_VULKAN_CLOCKS_DEVICE(HC_FIND)
#undef HC_FIND
}

const char* function_name(FunctionId id) { return kNames[id]; }

std::string result_name(VkResult result) {
    switch (result) {
#define HC_RESULT(name) \
    case name: return #name;
        HC_RESULT(VK_NOT_READY)
        HC_RESULT(VK_TIMEOUT)
        HC_RESULT(VK_INCOMPLETE)
        HC_RESULT(VK_ERROR_OUT_OF_HOST_MEMORY)
        HC_RESULT(VK_ERROR_OUT_OF_DEVICE_MEMORY)
        HC_RESULT(VK_ERROR_INITIALIZATION_FAILED)
        HC_RESULT(VK_ERROR_DEVICE_LOST)
        HC_RESULT(VK_ERROR_MEMORY_MAP_FAILED)
        HC_RESULT(VK_ERROR_LAYER_NOT_PRESENT)
        HC_RESULT(VK_ERROR_EXTENSION_NOT_PRESENT)
        HC_RESULT(VK_ERROR_FEATURE_NOT_PRESENT)
        HC_RESULT(VK_ERROR_INCOMPATIBLE_DRIVER)
        HC_RESULT(VK_ERROR_TOO_MANY_OBJECTS)
        HC_RESULT(VK_ERROR_FRAGMENTED_POOL)
        HC_RESULT(VK_ERROR_OUT_OF_POOL_MEMORY)
        HC_RESULT(VK_ERROR_INVALID_EXTERNAL_HANDLE)
        HC_RESULT(VK_ERROR_UNKNOWN)
#undef HC_RESULT
        default: return "VkResult " + std::to_string(int(result));
    }
}

std::string version_name(uint32_t version) {
    return std::to_string(VK_API_VERSION_MAJOR(version)) + "." +
           std::to_string(VK_API_VERSION_MINOR(version)) + "." +
           std::to_string(VK_API_VERSION_PATCH(version));
}

void raise_result(FunctionId id, VkResult result) {
    const std::string what =
        std::string(function_name(id)) + ": " + result_name(result) + ": " + advice(result);
    if (result == VK_ERROR_OUT_OF_DEVICE_MEMORY) throw VulkanMemoryError(what, 0, 0, 0);
    throw VulkanError(what);
}

}  // namespace hc::vulkan
