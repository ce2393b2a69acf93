// Stores K and V in the rows' slots of their caches; may rotate keys before, and queries. A workgroup takes a
// head of a row: K, V or Q by gl_WorkGroupID.z. An invocation writes one value, a pair of float16, or a block
// of Q8_0; a word with bits of another invocation is changed atomically.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "batch.glsl"
#include "cache.glsl"
#include "half.glsl"
#include "rope.glsl"
#include "scales.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 2) const bool ROPE = false;
layout(std430, binding = 1) buffer K { uint k[]; };
layout(std430, binding = 2) readonly buffer V { uint v[]; };
layout(std430, binding = 3) buffer KCache { uint k_cache[]; };
layout(std430, binding = 4) buffer VCache { uint v_cache[]; };
layout(std430, binding = 5) readonly buffer Cos { float cosines[]; };
layout(std430, binding = 6) readonly buffer Sin { float sines[]; };
layout(std430, binding = 7) buffer Q { uint q[]; };
layout(push_constant) uniform Push { uint heads, query_heads, pairs; };

const uint KEYS = 0, OF_VALUES = 1, QUERIES = 2;  // parts of the grid
const uint VALUES = CACHE == CACHE_F32 ? 1u : CACHE == CACHE_F16 ? 2u : 32u;  // of one invocation
const uint ELEMENTS = (HEAD_DIM + VALUES - 1) / VALUES;                       // of a head

shared uint head_values[HEAD_DIM];

// Writes the masked bits of a word; the others belong to other elements.
void put(uint word, uint mask, uint bits) {
    if (gl_WorkGroupID.z == KEYS) {
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
    for (uint i = 0; i < 32; ++i) amax = max(amax, head_values[from + i] & 0x7fffffffu);
    const bool lost = amax >= 0x7f800000u;  // a NaN or an infinity: NaN
    const bool none = lost || amax < 0x0d800000u;
    const float inverse = none ? 0.0 : inverse_of(amax);
    uint last = half_of(lost ? 0x7fc00000u : none ? 0u : floatBitsToUint(scale_of(amax)));
    if ((at & 1) == 1) put_half(at, last);
    for (uint i = 0; i < 32; i += 2) {  // halves 1 to 16 of the block
        uint pair = 0;
        for (uint j = 0; j < 2 && !none; ++j) {
            precise float scaled = uintBitsToFloat(head_values[from + i + j]) * inverse;
            pair |= (uint(int(roundEven(scaled))) & 0xffu) << 8 * j;
        }
        const uint here = at + 1 + i / 2;
        if ((here & 1) == 1) put(here / 2, ~0u, last | pair << 16);
        last = pair;
    }
    if ((at & 1) == 0) put_half(at + 16, last);
}

void rotate(uint row) {
    for (uint pair = gl_LocalInvocationIndex; pair < pairs; pair += gl_WorkGroupSize.x) {
        const uvec2 at = pair_places(pair, pairs);
        const uint angle = of_row(POSITIONS, row) * pairs + pair;
        const vec2 before = uintBitsToFloat(uvec2(head_values[at.x], head_values[at.y]));
        const uvec2 after = floatBitsToUint(rotated(before, cosines[angle], sines[angle]));
        head_values[at.x] = after.x;
        head_values[at.y] = after.y;
    }
    barrier();
}

// Stores an element of the head at row `to` of the cache.
void store(uint element, uint to) {
    const uint from = VALUES * element;
    if (CACHE == CACHE_F32) put(to * HEAD_DIM + element, ~0u, head_values[from]);
    if (CACHE == CACHE_Q8_0) put_block(from, 17 * (to * ELEMENTS + element));
    if (CACHE != CACHE_F16) return;
    const uint at = to * HEAD_DIM + 2 * element, first = half_of(head_values[from]);
    if (2 * element + 1 == HEAD_DIM) {
        put_half(at, first);
        return;
    }
    const uint second = half_of(head_values[from + 1]);
    if ((at & 1) == 0) {
        put(at / 2, ~0u, first | second << 16);
    } else {
        put_half(at, first);
        put_half(at + 1, second);
    }
}

void main() {
    const uint row = gl_WorkGroupID.y, head = gl_WorkGroupID.x, part = gl_WorkGroupID.z;
    const uint own = gl_LocalInvocationIndex, all_heads = part == QUERIES ? query_heads : heads;
    if (row >= N_TOKENS || head >= all_heads) return;
    const uint begin = (row * all_heads + head) * HEAD_DIM;
    for (uint d = own; d < HEAD_DIM; d += gl_WorkGroupSize.x)
        head_values[d] = part == KEYS ? k[begin + d] : part == QUERIES ? q[begin + d] : v[begin + d];
    barrier();
    if (ROPE && part != OF_VALUES) {
        rotate(row);
        for (uint d = own; d < 2 * pairs; d += gl_WorkGroupSize.x)
            if (part == KEYS)
                k[begin + d] = head_values[d];
            else
                q[begin + d] = head_values[d];
    }
    if (part == QUERIES) return;
    const uint slot = of_row(SLOTS, row), to = (slot / PAGE * heads + head) * PAGE + slot % PAGE;
    for (uint element = own; element < ELEMENTS; element += gl_WorkGroupSize.x) store(element, to);
}
