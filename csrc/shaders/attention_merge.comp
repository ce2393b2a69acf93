// Adds the splits of each row in their order (online softmax, arXiv 2205.14135). The head's sink comes
// last: a score that counts in the sum and has no value. A workgroup has 64 values of a head. If a dot
// product reads the rows next, it also quantises them.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "activation.glsl"
#include "batch.glsl"
#include "window.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint SINKS = 0;
layout(constant_id = 1) const uint QUANTISED = 0;
layout(std430, binding = 1) readonly buffer Partials { float partials[]; };
layout(std430, binding = 2) readonly buffer Sinks { float sinks[]; };
layout(std430, binding = 3) writeonly buffer Out { float y[]; };
layout(std430, binding = 4) writeonly buffer Codes { uint codes[]; };
layout(push_constant) uniform Push { uint first_row, heads, head_dim, most_splits, window; };

#define QUANTISERS 64
#include "quantise.glsl"

const uint AT_ONCE = 64;  // splits whose shares are computed at a time
const uint AHEAD = 4;     // splits whose values are read before any is added

shared float largest_scores[AT_ONCE], shares[AT_ONCE], exponentials[AT_ONCE], tile[64];

// The largest score of `splits` splits and of the sink; NaN counts as none.
float largest_of(uint begin, uint splits, uint head) {
    const uint own = gl_LocalInvocationIndex;
    float most = SINKS == 1 ? sinks[head] : uintBitsToFloat(0xff800000u);
    for (uint s = own; s < splits; s += AT_ONCE) {
        const float m = partials[begin + s * (head_dim + 2) + head_dim];
        if (m > most) most = m;
    }
    largest_scores[own] = most;
    barrier();
    for (uint k = 0; k < min(splits, AT_ONCE); ++k)
        if (largest_scores[k] > most) most = largest_scores[k];
    return most;
}

void main() {
    const uint row = first_row + gl_WorkGroupID.z, head = gl_WorkGroupID.y, own = gl_LocalInvocationIndex;
    if (row >= N_TOKENS) return;
    const uint d = gl_GlobalInvocationID.x, value = min(d, head_dim - 1), size = head_dim + 2;
    const uint position = of_row(POSITIONS, row), first = first_seen(position, window) / 256;
    const uint splits = position / 256 - first + 1;
    const uint begin = (gl_WorkGroupID.z * heads + head) * most_splits * size;
    const float most = largest_of(begin, splits, head);
    precise float total = 0.0, sum = 0.0;
    for (uint from = 0; from < splits; from += AT_ONCE) {
        const uint count = min(splits - from, AT_ONCE);
        barrier();
        if (own < count) {
            const uint at = begin + (from + own) * size + head_dim;
            precise float above = partials[at] - most;
            precise float share = exponential(above);
            precise float exponentials_sum = share * partials[at + 1];
            shares[own] = share;
            exponentials[own] = exponentials_sum;
        }
        barrier();
        for (uint s = 0; s < count; s += AHEAD) {
            float values[AHEAD];
            [[unroll]] for (uint k = 0; k < AHEAD; ++k)
                values[k] = partials[begin + (from + min(s + k, count - 1)) * size + value];
            // No branches: compilers would move loads into them.
            [[unroll]] for (uint k = 0; k < AHEAD; ++k) {
                precise float product = shares[s + k] * values[k];
                precise float next_total = total + exponentials[s + k], next_sum = sum + product;
                total = s + k < count ? next_total : total;
                sum = s + k < count ? next_sum : sum;
            }
        }
    }
    if (SINKS == 1) {
        precise float above = sinks[head] - most;
        total = total + exponential(above);
    }
    precise float mean = sum / total;
    if (d < head_dim) y[(row * heads + head) * head_dim + d] = mean;
    if (QUANTISED == 0) return;
    tile[own] = mean;
    barrier();
    const uint four = 4 * min(own, 15), blocks = heads * head_dim / 32;
    const uint block = (head * head_dim + gl_WorkGroupID.x * 64) / 32 + own / 8;
    const bool within = own < 16 && gl_WorkGroupID.x * 64 + 32 * (own / 8) < head_dim;
    const vec4 values = vec4(tile[four], tile[four + 1], tile[four + 2], tile[four + 3]);
    quantise_four(values, within, row * blocks + block, gl_NumWorkGroups.z * blocks);
}
