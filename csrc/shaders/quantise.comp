#version 450
#extension GL_GOOGLE_include_directive : require
// Quantises the input of a dot product to int8 codes per 32 values: code = roundEven(x * (127 / amax)), scale
// = amax / 127, both divisions correctly rounded (scales.glsl). A block with a NaN or an infinity has codes 0
// and a NaN as its scale; a block whose largest magnitude is below 2^-100 counts as zero.
//
// 8 invocations share a block, 4 values each, so that even one row keeps a device busy and reads whole lines.
layout(local_size_x = 256) in;
#include "batch.glsl"
#include "counts.glsl"
#include "scales.glsl"

layout(std430, binding = 1) readonly buffer X { vec4 x[]; };
// Codes [rows][blocks][8] words, then for each block its scale and the sums of both halves of its codes, of
// 16 bits each.
layout(std430, binding = 2) writeonly buffer Codes { uint codes[]; };

layout(push_constant) uniform Push {
    uint blocks;  // of a row
    uint rows;    // capacity
    uint count;   // counts.glsl
};

const uint SMALLEST = 0x0d800000;  // 2^-100
const uint INFINITE = 0x7f800000;

shared uint largest[256];
shared int sums[256];

void main() {
    const uint i = gl_LocalInvocationID.x, row = gl_WorkGroupID.y + gl_WorkGroupID.z * gl_NumWorkGroups.y;
    const uint block = gl_WorkGroupID.x * 32 + i / 8;
    if (row >= min(count_of(count), rows)) return;
    const bool within = block < blocks;
    const uint at = row * blocks + block;
    const vec4 values = within ? x[at * 8 + i % 8] : vec4(0);
    const uvec4 sizes = floatBitsToUint(values) & 0x7fffffffu;  // ordered like the values
    largest[i] = max(max(sizes.x, sizes.y), max(sizes.z, sizes.w));
    barrier();
    uint amax = 0;
    for (uint k = i & ~7; k < (i & ~7) + 8; ++k) amax = max(amax, largest[k]);
    const bool finite = amax < INFINITE;
    ivec4 own = ivec4(0);
    if (finite && amax >= SMALLEST) {
        precise const vec4 scaled = values * inverse_of(amax);
        own = ivec4(roundEven(scaled));
    }
    sums[i] = own.x + own.y + own.z + own.w;
    barrier();
    if (!within) return;
    const uvec4 bytes = uvec4(own) & 0xffu;
    codes[at * 8 + i % 8] = bytes.x | bytes.y << 8 | bytes.z << 16 | bytes.w << 24;
    if (i % 8 != 0) return;
    const int low = sums[i] + sums[i + 1] + sums[i + 2] + sums[i + 3];
    const int high = sums[i + 4] + sums[i + 5] + sums[i + 6] + sums[i + 7];
    const float scale = finite && amax >= SMALLEST ? scale_of(amax) : 0;
    const uint factors = 8 * rows * blocks + 2 * at;
    codes[factors] = finite ? floatBitsToUint(scale) : 0x7fc00000;
    codes[factors + 1] = uint(low) & 0xffff | uint(high) << 16;
}
