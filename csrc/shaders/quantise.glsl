// Quantises inputs of dot products to int8 codes per 32 values: code = roundEven(x * (127 / amax)), scale =
// amax / 127, both divisions correctly rounded (scales.glsl). A block with a NaN or an infinity has codes 0
// and a NaN as its scale; a block whose largest magnitude is below 2^-100 counts as zero.
//
// 8 invocations share a block, 4 values each, so that even one row keeps a device busy and reads whole lines.
// The including shader defines QUANTISERS, its invocations, and codes[]: codes [rows][blocks][8] words, then
// for each block its scale and the sums of both halves of its codes, of 16 bits each.
#include "scales.glsl"

const uint SMALLEST = 0x0d800000;  // 2^-100
const uint INFINITE = 0x7f800000;

shared uint largest[QUANTISERS];
shared int code_sums[QUANTISERS];

// All invocations call it. Block `at` counts in all rows; `all_blocks` is the number of blocks in all rows.
void quantise_four(vec4 values, bool within, uint at, uint all_blocks) {
    const uint i = gl_LocalInvocationIndex;
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
    code_sums[i] = own.x + own.y + own.z + own.w;
    barrier();
    if (!within) return;
    const uvec4 bytes = uvec4(own) & 0xffu;
    codes[at * 8 + i % 8] = bytes.x | bytes.y << 8 | bytes.z << 16 | bytes.w << 24;
    if (i % 8 != 0) return;
    const int low = code_sums[i] + code_sums[i + 1] + code_sums[i + 2] + code_sums[i + 3];
    const int high = code_sums[i + 4] + code_sums[i + 5] + code_sums[i + 6] + code_sums[i + 7];
    const float scale = finite && amax >= SMALLEST ? scale_of(amax) : 0;
    const uint factors = 8 * all_blocks + 2 * at;
    codes[factors] = finite ? floatBitsToUint(scale) : 0x7fc00000;
    codes[factors + 1] = uint(low) & 0xffff | uint(high) << 16;
}
