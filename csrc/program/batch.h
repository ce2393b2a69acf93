// Limits on the numbers of a step.
#pragma once
#include <cstdint>
#include <vector>

#include "ops/arguments.h"

namespace hc {

// Checked before every run, because kernels and shaders trust them.
struct BatchBounds {
    int64_t tokens, sequences, logits;                                    // sizes of the arrays
    int64_t vocab = INT32_MAX, positions = INT32_MAX, pages = INT32_MAX;  // tightened by the ops recorded
    int64_t states = -1;                                                  // slots, where ops keep a state
    void keep_states(int64_t slots) { states = states < 0 || slots < states ? slots : states; }
    int64_t max_decode() const { return tokens < kMaxDecodeRows ? tokens : kMaxDecodeRows; }
};

// std::invalid_argument when the batch holds a number out of bounds.
void check_batch(const Batch&, const BatchBounds&);

// Finds the sequences that have rows, which every row belongs to; std::invalid_argument where one does not,
// or where a slot that one row writes is another's, too.
void check_states(const Batch&, const BatchBounds&, std::vector<int32_t>& found);

}  // namespace hc
