// The k largest logits, descending, ties by lower id, after each bias is added to the logit of its id; ids
// are distinct.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

namespace hc {

// NaN ranks below all numbers. `allowed`: a bit for each id, or null.
std::vector<std::pair<float, int32_t>> top_k(const float* logits, int64_t n, int64_t k,
                                             std::vector<std::pair<int32_t, float>> bias,
                                             const uint64_t* allowed);

}  // namespace hc
