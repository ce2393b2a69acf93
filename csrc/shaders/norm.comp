// RMSNorm and LayerNorm: a workgroup per vector of `width` values, gl_NumWorkGroups.x of them in a row. If a
// dot product reads the rows next, it also quantises them.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "batch.glsl"
#include "tree.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 0) const uint OF_LOGITS = 0;
layout(constant_id = 1) const uint CENTRE = 0;
layout(constant_id = 2) const uint BIAS = 0;
layout(constant_id = 3) const uint WEIGHTED = 1;
layout(constant_id = 4) const uint HELD = 0;  // values of an invocation, all in registers; 0: too many for it
layout(constant_id = 5) const uint QUANTISED = 0;
layout(std430, binding = 1) readonly buffer X { float x[]; };
layout(std430, binding = 2) readonly buffer Weight { float weight[]; };
layout(std430, binding = 3) readonly buffer Bias { float bias[]; };
layout(std430, binding = 4) writeonly buffer Out { float y[]; };
layout(std430, binding = 5) writeonly buffer Codes { uint codes[]; };
layout(push_constant) uniform Push {
    uint width;
    uint groups;  // of `width` neighbouring values, with separate weights
    float eps;
};

#define QUANTISERS 256
#include "quantise.glsl"

shared float tile[1024];

float held[HELD > 0 ? HELD : 1];
uint begin;  // of the vector

uint rounds() { return HELD > 0 ? HELD : (width + 255) / 256; }

// Value i of the vector, number k of this invocation.
float value(uint k, uint i) {
    if (HELD > 0) return held[k];
    return i < width ? x[begin + i] : 0;
}

void quantise_row() {
    const uint own = gl_LocalInvocationIndex, blocks = width / 32;
    [[unroll]] for (uint k = 0; k < HELD; k += 4) {
        barrier();
        [[unroll]] for (uint j = k; j < k + 4; ++j)
            if (j < HELD) tile[256 * (j - k) + own] = held[j];
        barrier();
        const uint block = 8 * k + own / 8, at = 4 * own;
        const vec4 four = vec4(tile[at], tile[at + 1], tile[at + 2], tile[at + 3]);
        quantise_four(four, block < blocks, gl_WorkGroupID.y * blocks + block, gl_NumWorkGroups.y * blocks);
    }
}

void main() {
    const uint row = gl_WorkGroupID.y;
    if (row >= (OF_LOGITS == 1 ? N_LOGITS : N_TOKENS)) return;
    const uint first = gl_LocalInvocationIndex, own = gl_WorkGroupID.x % groups * width;
    begin = (row * gl_NumWorkGroups.x + gl_WorkGroupID.x) * width;
    const float n = float(width);
    [[unroll]] for (uint k = 0; k < HELD; ++k) {
        const uint i = first + 256 * k;
        held[k] = i < width ? x[begin + i] : 0;
    }
    precise float mean = 0.0;
    if (CENTRE == 1) {
        precise float sum = 0.0;
        [[unroll]] for (uint k = 0; k < rounds(); ++k) sum = sum + value(k, first + 256 * k);
        mean = group_sum(sum);
        mean = mean / n;
    }
    precise float squares = 0.0;
    [[unroll]] for (uint k = 0; k < rounds(); ++k) {
        precise float d = value(k, first + 256 * k);
        if (CENTRE == 1) d = first + 256 * k < width ? d - mean : 0;
        d = d * d;
        squares = squares + d;
    }
    precise float root = group_sum(squares);
    root = root / n;
    root = root + eps;
    root = sqrt(root);
    [[unroll]] for (uint k = 0; k < rounds(); ++k) {
        const uint i = first + 256 * k;
        if (i < width) {
            precise float v = value(k, i);
            if (CENTRE == 1) v = v - mean;
            v = v / root;
            if (WEIGHTED == 1) v = v * weight[own + i];
            if (BIAS == 1) v = v + bias[own + i];
            y[begin + i] = v;
            if (HELD > 0) held[k] = v;
        }
    }
    if (QUANTISED == 1) quantise_row();
}
