// Rotates pairs of each head by the row's position, in place.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "batch.glsl"
#include "rope.glsl"

layout(local_size_x = 64) in;
layout(std430, binding = 1) buffer X { float x[]; };
layout(std430, binding = 2) readonly buffer Cos { float cosines[]; };
layout(std430, binding = 3) readonly buffer Sin { float sines[]; };
layout(push_constant) uniform Push { uint heads, head_dim, pairs; };

void main() {
    const uint row = gl_WorkGroupID.y, i = gl_GlobalInvocationID.x, head = i / pairs, pair = i % pairs;
    if (row >= N_TOKENS || head >= heads) return;
    const uvec2 at = (row * heads + head) * head_dim + pair_places(pair, pairs);
    const uint angle = of_row(POSITIONS, row) * pairs + pair;
    const vec2 turned = rotated(vec2(x[at.x], x[at.y]), cosines[angle], sines[angle]);
    x[at.x] = turned.x;
    x[at.y] = turned.y;
}
