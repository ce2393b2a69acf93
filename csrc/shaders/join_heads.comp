// out[t, h] = x[t, h] from one of its values on, then y[t, h].
#version 450
#extension GL_GOOGLE_include_directive : require
#include "batch.glsl"

layout(local_size_x = 256) in;
layout(std430, binding = 1) readonly buffer X { float x[]; };
layout(std430, binding = 2) readonly buffer Y { float y[]; };
layout(std430, binding = 3) writeonly buffer Out { float joined[]; };
layout(push_constant) uniform Push {
    uint heads, x_width, x_first, y_width;  // of the values of a head
};

void main() {
    const uint row = gl_WorkGroupID.y, i = gl_GlobalInvocationID.x;
    const uint taken = x_width - x_first, width = taken + y_width;
    if (row >= N_TOKENS || i >= heads * width) return;
    const uint head = row * heads + i / width, value = i % width;
    const float from = value < taken ? x[head * x_width + x_first + value] : y[head * y_width + value - taken];
    joined[row * heads * width + i] = from;
}
