// Limits on the numbers of a step.
#pragma once
#include <cstdint>

#include "simd/kernels.h"

namespace hc {

// Checked before every run, because kernels and shaders trust them.
struct BatchBounds {
    int64_t tokens, sequences, logits;                                    // sizes of the arrays
    int64_t vocab = INT32_MAX, positions = INT32_MAX, pages = INT32_MAX;  // tightened by the ops recorded
    int64_t max_decode() const { return tokens < kMaxDecodeRows ? tokens : kMaxDecodeRows; }
};

// std::invalid_argument when the batch holds a number out of bounds.
void check_batch(const Batch&, const BatchBounds&);

}  // namespace hc
