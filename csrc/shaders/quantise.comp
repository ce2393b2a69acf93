#version 450
#extension GL_GOOGLE_include_directive : require
// Quantises rows, the input of a dot product.
layout(local_size_x = 256) in;
#include "batch.glsl"
#include "counts.glsl"

layout(std430, binding = 1) readonly buffer X { vec4 x[]; };
layout(std430, binding = 2) writeonly buffer Codes { uint codes[]; };

layout(push_constant) uniform Push {
    uint blocks;  // of a row
    uint rows;    // capacity
    uint count;   // counts.glsl
};

#define QUANTISERS 256
#include "quantise.glsl"

void main() {
    const uint i = gl_LocalInvocationID.x, row = gl_WorkGroupID.y + gl_WorkGroupID.z * gl_NumWorkGroups.y;
    const uint block = gl_WorkGroupID.x * 32 + i / 8;
    if (row >= min(count_of(count), rows)) return;
    const bool within = block < blocks;
    const uint at = row * blocks + block;
    quantise_four(within ? x[at * 8 + i % 8] : vec4(0), within, at, rows * blocks);
}
