// out[t] = x[t] * act(gate[t]).
#version 450
#extension GL_GOOGLE_include_directive : require
#include "activation.glsl"
#include "batch.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 0) const uint ACTIVATION = 0;
layout(std430, binding = 1) readonly buffer X { float x[]; };
layout(std430, binding = 2) readonly buffer Gate { float gates[]; };
layout(std430, binding = 3) buffer Out { float y[]; };
layout(push_constant) uniform Push { uint width; };

const uint AS_IT_IS = 0, BY_SILU = 1, BY_SIGMOID = 2, BY_RELU = 3;  // in the order of recurrent.py

void main() {
    const uint row = gl_WorkGroupID.y, i = gl_GlobalInvocationID.x, at = row * width + i;
    if (row >= N_TOKENS || i >= width) return;
    const float g = gates[at];
    const float gate = ACTIVATION == BY_SILU      ? activate(SILU, g, 0.0)
                       : ACTIVATION == BY_SIGMOID ? sigmoid(g)
                       : ACTIVATION == BY_RELU    ? (g < 0.0 ? 0.0 : g)
                                                  : g;
    precise float product = x[at] * gate;
    y[at] = product;
}
