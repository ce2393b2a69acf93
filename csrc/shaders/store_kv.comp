// Stores K and V in the rows' slots of their caches. An invocation writes one value, a pair of float16, or a
// block of Q8_0; a word with bits of another invocation is changed atomically.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "batch.glsl"
#include "cache.glsl"
#include "half.glsl"
#include "scales.glsl"

layout(local_size_x = 64) in;
layout(std430, binding = 1) readonly buffer K { uint k[]; };
layout(std430, binding = 2) readonly buffer V { uint v[]; };
layout(std430, binding = 3) buffer KCache { uint k_cache[]; };
layout(std430, binding = 4) buffer VCache { uint v_cache[]; };
layout(push_constant) uniform Push { uint heads; };

const uint VALUES = CACHE == CACHE_F32 ? 1u : CACHE == CACHE_F16 ? 2u : 32u;  // of one invocation
const uint ELEMENTS = (HEAD_DIM + VALUES - 1) / VALUES;                       // of a head

uint input_at(uint i) { return gl_WorkGroupID.z == 0 ? k[i] : v[i]; }

// Writes the masked bits of a word; the others belong to other elements.
void put(uint word, uint mask, uint bits) {
    if (gl_WorkGroupID.z == 0) {
        if (mask == ~0u) {
            k_cache[word] = bits;
        } else {
            atomicAnd(k_cache[word], ~mask);
            atomicOr(k_cache[word], bits);
        }
    } else {
        if (mask == ~0u) {
            v_cache[word] = bits;
        } else {
            atomicAnd(v_cache[word], ~mask);
            atomicOr(v_cache[word], bits);
        }
    }
}

// Writes one 16-bit value.
void put_half(uint at, uint h) { put(at / 2, 0xffffu << (at & 1) * 16, h << (at & 1) * 16); }

// Writes 32 values as a scale and codes, from a 16-bit position on.
void put_block(uint from, uint at) {
    uint amax = 0;
    for (uint i = 0; i < 32; ++i) amax = max(amax, input_at(from + i) & 0x7fffffffu);
    const bool lost = amax >= 0x7f800000u;  // a NaN or an infinity: NaN
    const bool none = lost || amax < 0x0d800000u;
    const float inverse = none ? 0.0 : inverse_of(amax);
    uint last = half_of(lost ? 0x7fc00000u : none ? 0u : floatBitsToUint(scale_of(amax)));
    if ((at & 1) == 1) put_half(at, last);
    for (uint i = 0; i < 32; i += 2) {  // halves 1 to 16 of the block
        uint pair = 0;
        for (uint j = 0; j < 2 && !none; ++j) {
            precise float scaled = uintBitsToFloat(input_at(from + i + j)) * inverse;
            pair |= (uint(int(roundEven(scaled))) & 0xffu) << 8 * j;
        }
        const uint here = at + 1 + i / 2;
        if ((here & 1) == 1) put(here / 2, ~0u, last | pair << 16);
        last = pair;
    }
    if ((at & 1) == 0) put_half(at + 16, last);
}

void main() {
    const uint row = gl_WorkGroupID.y, i = gl_GlobalInvocationID.x;
    const uint head = i / ELEMENTS, element = i % ELEMENTS;
    if (row >= N_TOKENS || head >= heads) return;
    const uint slot = of_row(SLOTS, row), from = (row * heads + head) * HEAD_DIM + VALUES * element;
    const uint to = (slot / PAGE * heads + head) * PAGE + slot % PAGE;  // a row of the cache
    if (CACHE == CACHE_F32) put(to * HEAD_DIM + element, ~0u, input_at(from));
    if (CACHE == CACHE_Q8_0) put_block(from, 17 * (to * ELEMENTS + element));
    if (CACHE != CACHE_F16) return;
    const uint at = to * HEAD_DIM + 2 * element, first = half_of(input_at(from));
    if (2 * element + 1 == HEAD_DIM) {
        put_half(at, first);
        return;
    }
    const uint second = half_of(input_at(from + 1));
    if ((at & 1) == 0) {
        put(at / 2, ~0u, first | second << 16);
    } else {
        put_half(at, first);
        put_half(at + 1, second);
    }
}
