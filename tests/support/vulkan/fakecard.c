/* A Vulkan layer that makes a software driver behave as cards do where that is not checked elsewhere.

   VK_LAYER_HOTCOLD_fakecard; tests/support/vulkan/cards.py builds it and chooses by the environment:
     FAKE_TYPES=1     memory types of a card: its own, which the host cannot map; the host's, uncached; the host's,
                      cached. FAKE_TYPES=2: and the card's own that the host sees (ReBAR)
     FAKE_QUEUES=1    a second family of queues, which only computes
     FAKE_DIRTY=1     memory is full of NaN when it is allocated
     FAKE_LOST=N      the card is lost at the Nth submit: calls succeed, nothing is done, and the timeline's value
                      is 2^64 - 1
     FAKE_BUDGET=N    the driver says that it has N bytes of the card's own memory, and gives more

   It serves one instance and one device at a time, which is all that Hotcold opens. */
#define VK_NO_PROTOTYPES
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vulkan/vulkan_core.h>

/* From vk_layer.h. */
typedef struct NextInstance {
    struct NextInstance* next;
    PFN_vkGetInstanceProcAddr get_instance;
    PFN_vkVoidFunction get_physical_device;
} NextInstance;
typedef struct NextDevice {
    struct NextDevice* next;
    PFN_vkGetInstanceProcAddr get_instance;
    PFN_vkGetDeviceProcAddr get_device;
} NextDevice;
typedef struct {
    VkStructureType type;
    const void* next;
    int function; /* 0: links of the chain */
    void* link;
} LayerInfo;
typedef struct {
    VkStructureType type; /* in fact an int, 1 */
    void* next;
    uint32_t version;
    PFN_vkGetInstanceProcAddr get_instance;
    PFN_vkGetDeviceProcAddr get_device;
    PFN_vkVoidFunction get_physical_device;
} Negotiation;

enum { kTypes = 4, kMost = 4096 };
static const VkMemoryPropertyFlags kFlags[kTypes] = {
    VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT,
    VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT,
    VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT | VK_MEMORY_PROPERTY_HOST_CACHED_BIT,
    VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT | VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT,
};

static PFN_vkGetInstanceProcAddr next_instance;
static PFN_vkGetDeviceProcAddr next_device;
static VkInstance instance;
static VkDevice device;
static _Atomic long submits;
static _Atomic uint64_t used; /* bytes of the card's own memory */
/* The allocations that the layer must know again: those of the card's own memory. */
static struct {
    VkDeviceMemory memory;
    uint64_t bytes;
    int unmappable;
} known[kMost];

static long option(const char* name) {
    const char* value = getenv(name);
    return value ? atol(value) : 0;
}
static uint32_t types(void) { return option("FAKE_TYPES") == 2 ? 4 : 3; }
static int lost(void) { return option("FAKE_LOST") && submits >= option("FAKE_LOST"); }
/* Of the instance that was made last; they serve any, also after it was destroyed. */
#define INSTANCE_FUNCTIONS(X)                                                                   \
    X(vkGetPhysicalDeviceMemoryProperties2) X(vkGetPhysicalDeviceQueueFamilyProperties)         \
    X(vkEnumerateDeviceExtensionProperties)
#define NEXT_POINTER(name) static PFN_##name next_##name;
INSTANCE_FUNCTIONS(NEXT_POINTER)
#define NEXT_INSTANCE(name) next_##name
#define NEXT_DEVICE(name) ((PFN_##name)next_device(device, #name))

static void fake_memory(VkPhysicalDeviceMemoryProperties* m) {
    if (!option("FAKE_TYPES")) return;
    const uint64_t bytes = m->memoryHeaps[0].size;
    m->memoryHeapCount = 2;
    m->memoryHeaps[0] = (VkMemoryHeap){bytes, VK_MEMORY_HEAP_DEVICE_LOCAL_BIT};
    m->memoryHeaps[1] = (VkMemoryHeap){bytes, 0};
    m->memoryTypeCount = types();
    for (uint32_t i = 0; i < types(); ++i) {
        m->memoryTypes[i].propertyFlags = kFlags[i];
        m->memoryTypes[i].heapIndex = kFlags[i] & VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT ? 0 : 1;
    }
}

static VKAPI_ATTR void VKAPI_CALL fake_vkGetPhysicalDeviceMemoryProperties2(VkPhysicalDevice physical,
                                                                         VkPhysicalDeviceMemoryProperties2* to) {
    NEXT_INSTANCE(vkGetPhysicalDeviceMemoryProperties2)(physical, to);
    fake_memory(&to->memoryProperties);
    for (VkBaseOutStructure* each = to->pNext; each; each = each->pNext) {
        if (each->sType != VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT) continue;
        VkPhysicalDeviceMemoryBudgetPropertiesEXT* budget = (VkPhysicalDeviceMemoryBudgetPropertiesEXT*)each;
        const uint64_t all = to->memoryProperties.memoryHeaps[0].size;
        budget->heapBudget[0] = option("FAKE_BUDGET") ? (uint64_t)option("FAKE_BUDGET") : all;
        budget->heapUsage[0] = used;
        budget->heapBudget[1] = all;
        budget->heapUsage[1] = 0;
    }
}

static VKAPI_ATTR VkResult VKAPI_CALL fake_vkEnumerateDeviceExtensionProperties(VkPhysicalDevice physical,
                                                                             const char* layer, uint32_t* count,
                                                                             VkExtensionProperties* to) {
    const VkExtensionProperties budget = {VK_EXT_MEMORY_BUDGET_EXTENSION_NAME, 1};
    const uint32_t out_buffer = *count;
    if (to && out_buffer) *count = out_buffer - 1;
    const VkResult result = NEXT_INSTANCE(vkEnumerateDeviceExtensionProperties)(physical, layer, count, to);
    if (result < 0) return result;
    if (to && out_buffer) to[*count] = budget;
    ++*count;
    return result;
}

static VKAPI_ATTR void VKAPI_CALL fake_vkGetPhysicalDeviceQueueFamilyProperties(VkPhysicalDevice physical,
                                                                             uint32_t* count,
                                                                             VkQueueFamilyProperties* to) {
    if (!option("FAKE_QUEUES")) {
        NEXT_INSTANCE(vkGetPhysicalDeviceQueueFamilyProperties)(physical, count, to);
        return;
    }
    VkQueueFamilyProperties own[8];
    uint32_t families = 8;
    NEXT_INSTANCE(vkGetPhysicalDeviceQueueFamilyProperties)(physical, &families, own);
    if (to && *count > 1) {
        to[0] = to[1] = own[0];
        to[0].queueFlags |= VK_QUEUE_GRAPHICS_BIT;
        to[1].queueFlags = VK_QUEUE_COMPUTE_BIT | VK_QUEUE_TRANSFER_BIT;
    }
    *count = 2;
}

static VKAPI_ATTR VkResult VKAPI_CALL fake_vkCreateDevice(VkPhysicalDevice physical, const VkDeviceCreateInfo* info,
                                                       const VkAllocationCallbacks* by, VkDevice* to) {
    LayerInfo* chain = (LayerInfo*)info->pNext;
    while (chain && !(chain->type == VK_STRUCTURE_TYPE_LOADER_DEVICE_CREATE_INFO && chain->function == 0))
        chain = (LayerInfo*)chain->next;
    NextDevice* link = chain->link;
    chain->link = link->next;
    const PFN_vkCreateDevice create = (PFN_vkCreateDevice)link->get_instance(instance, "vkCreateDevice");
    VkDeviceQueueCreateInfo queue = info->pQueueCreateInfos[0];
    VkDeviceCreateInfo own = *info;
    fprintf(stderr, "fakecard: family %u\n", queue.queueFamilyIndex); /* cards.py looks for it */
    if (option("FAKE_QUEUES")) {
        queue.queueFamilyIndex = 0;
        own.pQueueCreateInfos = &queue;
    }
    const VkResult result = create(physical, &own, by, to);
    if (result != VK_SUCCESS) return result;
    device = *to;
    next_device = link->get_device;
    submits = 0;
    used = 0;
    memset(known, 0, sizeof known);
    return result;
}

static VKAPI_ATTR void VKAPI_CALL fake_vkGetDeviceQueue(VkDevice of, uint32_t family, uint32_t index, VkQueue* to) {
    NEXT_DEVICE(vkGetDeviceQueue)(of, option("FAKE_QUEUES") ? 0 : family, index, to);
}

static VKAPI_ATTR VkResult VKAPI_CALL fake_vkCreateCommandPool(VkDevice of, const VkCommandPoolCreateInfo* info,
                                                            const VkAllocationCallbacks* by, VkCommandPool* to) {
    VkCommandPoolCreateInfo own = *info;
    if (option("FAKE_QUEUES")) own.queueFamilyIndex = 0;
    return NEXT_DEVICE(vkCreateCommandPool)(of, &own, by, to);
}

static VKAPI_ATTR void VKAPI_CALL fake_vkGetBufferMemoryRequirements(VkDevice of, VkBuffer buffer,
                                                                  VkMemoryRequirements* to) {
    NEXT_DEVICE(vkGetBufferMemoryRequirements)(of, buffer, to);
    if (option("FAKE_TYPES")) to->memoryTypeBits = (1u << types()) - 1;
}

static VKAPI_ATTR VkResult VKAPI_CALL fake_vkAllocateMemory(VkDevice of, const VkMemoryAllocateInfo* info,
                                                         const VkAllocationCallbacks* by, VkDeviceMemory* to) {
    VkMemoryAllocateInfo own = *info;
    const VkMemoryPropertyFlags flags = option("FAKE_TYPES") ? kFlags[info->memoryTypeIndex] : kFlags[3];
    if (option("FAKE_TYPES")) own.memoryTypeIndex = 0; /* of a software driver: all that there is */
    const VkResult result = NEXT_DEVICE(vkAllocateMemory)(of, &own, by, to);
    if (result != VK_SUCCESS) return result;
    void* bytes = NULL;
    if (option("FAKE_DIRTY") &&
        NEXT_DEVICE(vkMapMemory)(of, *to, 0, VK_WHOLE_SIZE, 0, &bytes) == VK_SUCCESS) {
        const uint32_t nan = 0x7fc00000;
        for (uint64_t i = 0; i + 4 <= info->allocationSize; i += 4) memcpy((char*)bytes + i, &nan, 4);
        NEXT_DEVICE(vkUnmapMemory)(of, *to);
    }
    if (!(flags & VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT)) return result;
    used += info->allocationSize;
    for (int i = 0; i < kMost; ++i) {
        if (known[i].memory) continue;
        known[i].memory = *to;
        known[i].bytes = info->allocationSize;
        known[i].unmappable = !(flags & VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT);
        break;
    }
    return result;
}

static VKAPI_ATTR void VKAPI_CALL fake_vkFreeMemory(VkDevice of, VkDeviceMemory memory,
                                                 const VkAllocationCallbacks* by) {
    for (int i = 0; memory && i < kMost; ++i) {
        if (known[i].memory != memory) continue;
        used -= known[i].bytes;
        known[i].memory = VK_NULL_HANDLE;
        break;
    }
    NEXT_DEVICE(vkFreeMemory)(of, memory, by);
}

static VKAPI_ATTR VkResult VKAPI_CALL fake_vkMapMemory(VkDevice of, VkDeviceMemory memory, VkDeviceSize offset,
                                                    VkDeviceSize size, VkMemoryMapFlags flags, void** to) {
    for (int i = 0; i < kMost; ++i)
        if (known[i].memory == memory && known[i].unmappable) return VK_ERROR_MEMORY_MAP_FAILED;
    return NEXT_DEVICE(vkMapMemory)(of, memory, offset, size, flags, to);
}

static VKAPI_ATTR VkResult VKAPI_CALL fake_vkQueueSubmit(VkQueue queue, uint32_t count, const VkSubmitInfo* infos,
                                                      VkFence fence) {
    ++submits;
    return lost() ? VK_SUCCESS : NEXT_DEVICE(vkQueueSubmit)(queue, count, infos, fence);
}

static VKAPI_ATTR VkResult VKAPI_CALL fake_vkGetSemaphoreCounterValue(VkDevice of, VkSemaphore semaphore,
                                                                   uint64_t* to) {
    if (!lost()) return NEXT_DEVICE(vkGetSemaphoreCounterValue)(of, semaphore, to);
    *to = UINT64_MAX;
    return VK_SUCCESS;
}

static VKAPI_ATTR VkResult VKAPI_CALL fake_vkWaitSemaphores(VkDevice of, const VkSemaphoreWaitInfo* info,
                                                         uint64_t timeout) {
    return lost() ? VK_SUCCESS : NEXT_DEVICE(vkWaitSemaphores)(of, info, timeout);
}

static VKAPI_ATTR VkResult VKAPI_CALL fake_vkCreateInstance(const VkInstanceCreateInfo* info,
                                                         const VkAllocationCallbacks* by, VkInstance* to) {
    LayerInfo* chain = (LayerInfo*)info->pNext;
    while (chain && !(chain->type == VK_STRUCTURE_TYPE_LOADER_INSTANCE_CREATE_INFO && chain->function == 0))
        chain = (LayerInfo*)chain->next;
    NextInstance* link = chain->link;
    chain->link = link->next;
    const PFN_vkCreateInstance create = (PFN_vkCreateInstance)link->get_instance(NULL, "vkCreateInstance");
    const VkResult result = create(info, by, to);
    if (result != VK_SUCCESS) return result;
    instance = *to;
    next_instance = link->get_instance;
#define FIND_NEXT(name) next_##name = (PFN_##name)next_instance(instance, #name);
    INSTANCE_FUNCTIONS(FIND_NEXT)
    return result;
}

static PFN_vkVoidFunction own_function(const char* name);

static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL fake_vkGetDeviceProcAddr(VkDevice of, const char* name) {
    const PFN_vkVoidFunction own = own_function(name);
    return own ? own : next_device(of, name);
}

static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL fake_vkGetInstanceProcAddr(VkInstance of, const char* name) {
    const PFN_vkVoidFunction own = own_function(name);
    return own ? own : next_instance ? next_instance(of, name) : NULL;
}

#define FAKED(X)                                                                                          \
    X(vkGetInstanceProcAddr) X(vkGetDeviceProcAddr) X(vkCreateInstance) X(vkCreateDevice)                 \
    X(vkGetPhysicalDeviceMemoryProperties2) X(vkGetPhysicalDeviceQueueFamilyProperties)                   \
    X(vkEnumerateDeviceExtensionProperties) X(vkGetDeviceQueue) X(vkCreateCommandPool)                    \
    X(vkGetBufferMemoryRequirements) X(vkAllocateMemory) X(vkFreeMemory) X(vkMapMemory) X(vkQueueSubmit)  \
    X(vkGetSemaphoreCounterValue) X(vkWaitSemaphores)

static PFN_vkVoidFunction own_function(const char* name) {
#define FAKED_FUNCTION(function) \
    if (!strcmp(name, #function)) return (PFN_vkVoidFunction)fake_##function;
    FAKED(FAKED_FUNCTION)
    return NULL;
}

__attribute__((visibility("default"))) VkResult vkNegotiateLoaderLayerInterfaceVersion(Negotiation* with) {
    if (with->version > 2) with->version = 2;
    with->get_instance = fake_vkGetInstanceProcAddr;
    with->get_device = fake_vkGetDeviceProcAddr;
    with->get_physical_device = NULL;
    return VK_SUCCESS;
}
