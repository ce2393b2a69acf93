#version 450
#extension GL_GOOGLE_include_directive : require
// Fills a mailbox: a workgroup for each 256 words of a row.
#include "batch.glsl"
layout(local_size_x = 256) in;
layout(constant_id = 0) const uint HAS_MASK = 0;
layout(constant_id = 1) const uint HAS_CHOSEN = 0;
layout(std430, set = 0, binding = 1) readonly buffer X { uint x[]; };
layout(std430, set = 0, binding = 2) readonly buffer Mask { uint mask[]; };
layout(std430, set = 0, binding = 3) readonly buffer Ids { uint ids[]; };
layout(std430, set = 0, binding = 4) readonly buffer Factors { uint factors[]; };
layout(std430, set = 0, binding = 5) writeonly buffer BoxCounts { uint box_counts[]; };
layout(std430, set = 0, binding = 6) writeonly buffer BoxX { uint box_x[]; };
layout(std430, set = 0, binding = 7) writeonly buffer BoxMask { uint box_mask[]; };
layout(std430, set = 0, binding = 8) writeonly buffer BoxIds { uint box_ids[]; };
layout(std430, set = 0, binding = 9) writeonly buffer BoxFactors { uint box_factors[]; };
// Words of a row: of x, of the mask, of its end that goes into the mailbox, and of chosen experts.
layout(push_constant) uniform Sizes {
    uint dim;
    uint mask_words;
    uint box_words;
    uint experts;
};

void main() {
    uint i = gl_GlobalInvocationID.x;
    uint row = gl_WorkGroupID.y;
    // A step that was given up has no rows and leaves the mailbox unchanged.
    if (row >= N_TOKENS) return;
    if (row == 0 && i < 4) box_counts[i] = batch[i];
    if (i < dim) box_x[row * dim + i] = x[row * dim + i];
    if (HAS_MASK != 0 && row < N_DECODE && i < box_words)
        box_mask[row * box_words + i] = mask[(row + 1) * mask_words - box_words + i];
    if (HAS_CHOSEN != 0 && i < experts) {
        box_ids[row * experts + i] = ids[row * experts + i];
        box_factors[row * experts + i] = factors[row * experts + i];
    }
}
