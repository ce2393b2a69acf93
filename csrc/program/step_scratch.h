// Scratch bytes that the ops of a step share.
#pragma once
#include <cstddef>
#include <cstdint>

#include "isa/table.h"

namespace hc {

// The shape of a model whose layers are equal.
struct StepShape {
    int64_t tokens, logits, pages_per_sequence;  // of a step
    int64_t dim, heads, kv_heads, head_dim;
    int64_t neurons, experts, chosen;  // neurons of a layer, or of each of its experts
    int64_t shared;                    // neurons of the shared expert
    bool by_output;                    // down is a dot product over all neurons
    PromptMath math;                   // of prompt rows
};

// Records each op on weights and buffers that do not exist, and returns the scratch that the ops request.
// Assumes quantised weights if their rows are whole blocks, but float weights for kSplitMath.
size_t step_scratch_bytes(const Kernels&, const StepShape&);

}  // namespace hc
