// Calls that fail on a test's request; only in builds with HOTCOLD_FAULTS.
#include <atomic>

#include "vulkan/functions.h"

namespace hc::vulkan {

namespace {

template <class F> struct Returned;
template <class R, class... A> struct Returned<R(VKAPI_PTR*)(A...)> {
    static constexpr char kind = std::is_same_v<R, VkResult> ? 'r' : std::is_void_v<R> ? 'v' : 'o';
};
constexpr char kReturns[] = {
#define HC_RETURNS(name) Returned<PFN_##name>::kind,
    HC_VULKAN_ALL(HC_RETURNS)
#undef HC_RETURNS
};

struct Watched {
    std::atomic<int64_t> calls{0}, fails_in{0};
    std::atomic<int> result{0};
};
Watched watched[kFunctions];

void watch(const std::string& function, char returns, int64_t nth, int result, const char* otherwise) {
    for (int i = 0; i < kFunctions; ++i) {
        if (function != function_name(FunctionId(i))) continue;
        if (kReturns[i] != returns) throw std::invalid_argument(function + otherwise);
        watched[i].result.store(result);
        watched[i].fails_in.store(nth);
        return;
    }
    throw std::invalid_argument(function + " is none of the functions that are used");
}

}  // namespace

VkResult watched_call(FunctionId id) {
    Watched& w = watched[id];
    w.calls.fetch_add(1, std::memory_order_relaxed);
    if (!w.fails_in.load(std::memory_order_relaxed) || w.fails_in.fetch_sub(1) != 1) return VK_SUCCESS;
    return VkResult(w.result.load());
}

std::map<std::string, int64_t> calls() {
    std::map<std::string, int64_t> found;
    for (int i = 0; i < kFunctions; ++i) found[function_name(FunctionId(i))] = watched[i].calls.load();
    return found;
}

void forget_calls() {
    for (Watched& w : watched) w.calls.store(0);
}

void fail_call(const std::string& function, int64_t nth, int result) {
    watch(function, 'r', nth, result, " returns no result: it cannot fail");
}

void skip_call(const std::string& function, int64_t nth) {
    watch(function, 'v', nth, 1, " returns something: it cannot be skipped");
}

}  // namespace hc::vulkan
