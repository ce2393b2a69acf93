// logits[r] = cap tanh(logits[r] / cap).
#version 450
#extension GL_GOOGLE_include_directive : require
#include "batch.glsl"
#include "activation.glsl"

layout(local_size_x = 256) in;
layout(std430, binding = 1) buffer Logits { float x[]; };
layout(push_constant) uniform Push {
    uint width;
    float cap;
};

void main() {
    const uint row = gl_WorkGroupID.y, i = gl_GlobalInvocationID.x;
    if (row >= N_LOGITS || i >= width) return;
    x[row * width + i] = capped(x[row * width + i], cap);
}
