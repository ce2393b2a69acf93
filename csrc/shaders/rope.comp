// Rotates pairs of each head by the row's position, in place.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "batch.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint INTERLEAVED = 0;
layout(std430, binding = 1) buffer X { float x[]; };
layout(std430, binding = 2) readonly buffer Cos { float cosines[]; };
layout(std430, binding = 3) readonly buffer Sin { float sines[]; };
layout(push_constant) uniform Push { uint heads, head_dim, pairs; };

void main() {
    const uint row = gl_WorkGroupID.y, i = gl_GlobalInvocationID.x, head = i / pairs, pair = i % pairs;
    if (row >= N_TOKENS || head >= heads) return;
    const uint begin = (row * heads + head) * head_dim;
    const uint at = begin + (INTERLEAVED == 1 ? 2 * pair : pair), far = at + (INTERLEAVED == 1 ? 1 : pairs);
    const uint angle = of_row(POSITIONS, row) * pairs + pair;
    const float a = x[at], b = x[far], c = cosines[angle], s = sines[angle];
    precise float ac = a * c, bs = b * s, as = a * s, bc = b * c;
    precise float first = ac - bs, second = as + bc;
    x[at] = first;
    x[far] = second;
}
