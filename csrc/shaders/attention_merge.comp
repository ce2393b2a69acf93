// Merges the splits of each row in their order (online softmax, arXiv 2205.14135). The head's sink comes
// last: a score that counts in the sum and has no value. One invocation per value of the output.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "activation.glsl"
#include "batch.glsl"
#include "window.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint SINKS = 0;
layout(std430, binding = 1) readonly buffer Partials { float partials[]; };
layout(std430, binding = 2) readonly buffer Sinks { float sinks[]; };
layout(std430, binding = 3) writeonly buffer Out { float y[]; };
layout(push_constant) uniform Push { uint first_row, heads, head_dim, most_splits, window; };

void main() {
    const uint row = first_row + gl_WorkGroupID.y, i = gl_GlobalInvocationID.x;
    if (row >= N_TOKENS || i >= heads * head_dim) return;
    const uint position = of_row(POSITIONS, row), head = i / head_dim, size = head_dim + 2;
    const uint first = first_seen(position, window) / 256;
    const uint splits = position / 256 - first + 1;
    const uint begin = (gl_WorkGroupID.y * heads + head) * most_splits * size;
    float largest = SINKS == 1 ? sinks[head] : uintBitsToFloat(0xff800000u);
    for (uint s = 0; s < splits; ++s) {
        const float m = partials[begin + s * size + head_dim];
        if (m > largest) largest = m;
    }
    precise float total = 0.0, sum = 0.0;
    for (uint s = 0; s < splits; ++s) {
        const uint at = begin + s * size;
        precise float above = partials[at + head_dim] - largest;
        precise float share = exponential(above);
        precise float exponentials = share * partials[at + head_dim + 1];
        precise float value = share * partials[at + i % head_dim];
        total = total + exponentials;
        sum = sum + value;
    }
    if (SINKS == 1) {
        precise float above = sinks[head] - largest;
        total = total + exponential(above);
    }
    precise float mean = sum / total;
    y[row * heads * head_dim + i] = mean;
}
