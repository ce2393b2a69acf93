// The k largest logits, descending, ties by lower id, after each bias is added to its id's; ids are distinct.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace hc {

inline std::vector<std::pair<float, int32_t>> top_k(const float* logits, int64_t n, int64_t k,
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
    std::vector<Entry> heap;  // its front is the worst that was kept
    heap.reserve(size_t(std::min(k, n)));
    bool full = false;
    float worst = 0;
    std::sort(bias.begin(), bias.end());
    bias.push_back({INT32_MAX, 0});
    auto next = bias.begin();
    for (int64_t i = 0; i < n; ++i) {
        float v = logits[i];
        for (; i == next->first; ++next) v += next->second;
        if (allowed && !(allowed[i / 64] >> (i % 64) & 1)) continue;
        if (full && v < worst) continue;  // nearly all end here
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
        full = int64_t(heap.size()) == k;
        worst = heap.front().first;
    }
    std::sort_heap(heap.begin(), heap.end(), before);
    return heap;
}

}  // namespace hc
