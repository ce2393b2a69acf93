// Not in a file of the bindings, because those are compiled for size.
#include "simd/top_k.h"

#include <algorithm>

namespace hc {

namespace {

constexpr int kRanked = 64;  // logits compared together: a word of a mask

// True if any of kRanked values is larger; NaN never is. Compilers vectorise this loop.
bool any_above(const float* v, float worst) {
    int above = 0;
    for (int i = 0; i < kRanked; ++i) above += v[i] > worst;
    return above;
}

}  // namespace

std::vector<std::pair<float, int32_t>> top_k(const float* logits, int64_t n, int64_t k,
                                             std::vector<std::pair<int32_t, float>> bias,
                                             const uint64_t* allowed) {
    using Entry = std::pair<float, int32_t>;
    // NaN ranks below all numbers, as in the reference backend.
    const auto before = [](const Entry& a, const Entry& b) {
        const bool an = a.first != a.first, bn = b.first != b.first;
        if (an != bn) return bn;
        if (!an && a.first != b.first) return a.first > b.first;
        return a.second < b.second;
    };
    std::vector<Entry> heap;  // its front is the worst entry
    heap.reserve(size_t(std::min(k, n)));
    bool full = false;  // k numbers are kept: values not above the worst are skipped, because ids ascend
    float worst = 0;
    std::sort(bias.begin(), bias.end());
    bias.push_back({INT32_MAX, 0});
    auto next = bias.begin();
    for (int64_t start = 0; start < n; start += kRanked) {
        const int64_t end = std::min(n, start + kRanked);
        const uint64_t bits = allowed ? allowed[start / kRanked] : ~uint64_t(0);
        const bool plain = next->first >= end;
        // Nearly all blocks end here.
        if (plain && (!bits || (full && end - start == kRanked && !any_above(logits + start, worst))))
            continue;
        for (int64_t i = start; i < end; ++i) {
            float v = logits[i];
            for (; i == next->first; ++next) v += next->second;
            if (!(bits >> (i - start) & 1) || (full && !(v > worst))) continue;
            const Entry entry(v, int32_t(i));
            if (int64_t(heap.size()) < k) {
                heap.push_back(entry);
            } else if (k > 0 && before(entry, heap.front())) {
                std::pop_heap(heap.begin(), heap.end(), before);
                heap.back() = entry;
            } else {
                continue;
            }
            std::push_heap(heap.begin(), heap.end(), before);
            worst = heap.front().first;
            full = int64_t(heap.size()) == k && worst == worst;
        }
    }
    std::sort_heap(heap.begin(), heap.end(), before);
    return heap;
}

}  // namespace hc
