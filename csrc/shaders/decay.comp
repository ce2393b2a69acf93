// out = factor * ln(1 + e^(x + bias)); `neighbours` neighbouring values share a factor.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "activation.glsl"
#include "batch.glsl"
#include "recurrence.glsl"

layout(local_size_x = 256) in;
layout(std430, binding = 1) readonly buffer X { float x[]; };
layout(std430, binding = 2) readonly buffer Bias { float bias[]; };
layout(std430, binding = 3) readonly buffer Factor { float factor[]; };
layout(std430, binding = 4) writeonly buffer Out { float y[]; };
layout(push_constant) uniform Push { uint width, neighbours; };

void main() {
    const uint row = gl_WorkGroupID.y, i = gl_GlobalInvocationID.x;
    if (row >= N_TOKENS || i >= width) return;
    precise float sum = x[row * width + i] + bias[i];
    precise float product = factor[i / neighbours] * softplus(sum);
    y[row * width + i] = product;
}
