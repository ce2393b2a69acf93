// x[t] = keep x[t] + scale y[t]; values with a factor of 0 are not read.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "batch.glsl"

layout(local_size_x = 256) in;
layout(std430, binding = 1) buffer X { float x[]; };
layout(std430, binding = 2) readonly buffer Y { float y[]; };
layout(push_constant) uniform Push {
    uint width;
    float keep, scale;
};

void main() {
    const uint row = gl_WorkGroupID.y, i = gl_GlobalInvocationID.x;
    if (row >= N_TOKENS || i >= width) return;
    precise float own = 0.0, more = 0.0, sum;
    if (keep != 0.0) own = keep * x[row * width + i];
    if (scale != 0.0) more = scale * y[row * width + i];
    sum = own + more;
    x[row * width + i] = sum;
}
