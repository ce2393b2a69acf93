#version 450
#extension GL_GOOGLE_include_directive : require
// Adds a layer's answer, rows that the host has written. The answers of all layers share one place, and in
// the bounded spin the host writes them while this step is executed. So no cache may hold the previous
// layer's answer (volatile in GLSL is also coherent).
#include "batch.glsl"
layout(local_size_x = 256) in;
layout(std430, set = 0, binding = 1) volatile readonly buffer Y { float y[]; };
layout(std430, set = 0, binding = 2) buffer Out { float result[]; };
layout(push_constant) uniform Sizes { uint dim; };

void main() {
    uint i = gl_GlobalInvocationID.x;
    uint row = gl_WorkGroupID.y;
    if (row >= N_TOKENS || i >= dim) return;
    precise float sum = result[row * dim + i] + y[row * dim + i];
    result[row * dim + i] = sum;
}
