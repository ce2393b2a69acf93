// Limits on the numbers of a step.
#pragma once
#include <cstdint>
#include <vector>

#include "ops/arguments.h"

namespace hc {

// Checked before each run, because kernels and shaders trust these numbers.
struct BatchBounds {
    int64_t tokens, sequences, logits;                                    // array sizes
    int64_t vocab = INT32_MAX, positions = INT32_MAX, pages = INT32_MAX;  // tightened by the recorded ops
    int64_t states = -1;                                                  // slots, if ops keep a state
    void keep_states(int64_t slots) { states = states < 0 || slots < states ? slots : states; }
    int64_t max_decode() const { return tokens < kMaxDecodeRows ? tokens : kMaxDecodeRows; }
};

// Throws std::invalid_argument if the batch holds a number out of bounds.
void check_batch(const Batch&, const BatchBounds&);

// Finds the sequences that have rows. Throws std::invalid_argument if a row belongs to none, or if a row
// writes the slot of another row or sequence.
void check_states(const Batch&, const BatchBounds&, std::vector<int32_t>& sequences);

}  // namespace hc
