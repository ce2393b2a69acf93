// RMSNorm and LayerNorm: a workgroup per vector of `width` values, gl_NumWorkGroups.x of them in a row.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "batch.glsl"
#include "tree.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 0) const uint OF_LOGITS = 0;
layout(constant_id = 1) const uint CENTRE = 0;
layout(constant_id = 2) const uint BIAS = 0;
layout(constant_id = 3) const uint WEIGHTED = 1;
layout(std430, binding = 1) readonly buffer X { float x[]; };
layout(std430, binding = 2) readonly buffer Weight { float weight[]; };
layout(std430, binding = 3) readonly buffer Bias { float bias[]; };
layout(std430, binding = 4) writeonly buffer Out { float y[]; };
layout(push_constant) uniform Push {
    uint width;
    uint groups;  // of `width` neighbouring values, with separate weights
    float eps;
};

void main() {
    const uint row = gl_WorkGroupID.y;
    if (row >= (OF_LOGITS == 1 ? N_LOGITS : N_TOKENS)) return;
    const uint begin = (row * gl_NumWorkGroups.x + gl_WorkGroupID.x) * width, first = gl_LocalInvocationIndex;
    const uint own = gl_WorkGroupID.x % groups * width;
    const float n = float(width);
    precise float mean = 0.0;
    if (CENTRE == 1) {
        precise float sum = 0.0;
        for (uint i = first; i < width; i += 256) sum = sum + x[begin + i];
        mean = group_sum(sum);
        mean = mean / n;
    }
    precise float squares = 0.0;
    for (uint i = first; i < width; i += 256) {
        precise float d = x[begin + i];
        if (CENTRE == 1) d = d - mean;
        d = d * d;
        squares = squares + d;
    }
    precise float root = group_sum(squares);
    root = root / n;
    root = root + eps;
    root = sqrt(root);
    for (uint i = first; i < width; i += 256) {
        precise float v = x[begin + i];
        if (CENTRE == 1) v = v - mean;
        v = v / root;
        if (WEIGHTED == 1) v = v * weight[own + i];
        if (BIAS == 1) v = v + bias[own + i];
        y[begin + i] = v;
    }
}
