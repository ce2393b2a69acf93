// out[r] = x[logits_rows[r]].
#version 450
#extension GL_GOOGLE_include_directive : require
#include "batch.glsl"

layout(local_size_x = 256) in;
layout(std430, binding = 1) readonly buffer X { uint x[]; };
layout(std430, binding = 2) writeonly buffer Out { uint y[]; };
layout(push_constant) uniform Push { uint width; };

void main() {
    const uint row = gl_WorkGroupID.y, i = gl_GlobalInvocationID.x;
    if (row >= N_LOGITS || i >= width) return;
    y[row * width + i] = x[of_row(LOGITS_ROWS, row) * width + i];
}
