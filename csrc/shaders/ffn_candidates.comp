// Prepares decode rows: no neuron is listed or active yet. With a mask, lists the neurons that any of a
// tile's rows names. One workgroup per tile.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "ffn.glsl"
layout(local_size_x = 256) in;
layout(constant_id = 2) const bool MASKED = false;
layout(std430, binding = 3) readonly buffer MaskBuffer { uint mask[]; };
#include "ffn_lists.glsl"

shared uint count;

void main() {
    const uint own = gl_LocalInvocationID.x, number = gl_WorkGroupID.x;
    const uint words = count_of_rows() * chosen * bit_words;
    for (uint i = number * 256 + own; i < words; i += gl_NumWorkGroups.x * 256) bits[i] = 0;
    const Tile tile = tile_of(number);
    if (tile.count == 0) return;
    if (own == 0) lists[most_tiles + number] = 0;
    if (!MASKED) return;

    if (own == 0) count = 0;
    barrier();
    const Expert e = expert_of(tile.expert);
    const uint neurons = e.end - e.begin;
    for (uint word = own; 32 * word < neurons; word += 256) {
        uint any = 0;
        for (uint t = 0; t < tile.count; ++t) any |= mask_word(row_of(choice_of(tile, t)), e, word);
        if (neurons - 32 * word < 32) any &= (1u << neurons - 32 * word) - 1;
        uint at = atomicAdd(count, bitCount(any));
        for (; any != 0; any &= any - 1) lists[list_at(0, number, at++)] = 32 * word + findLSB(any);
    }
    barrier();
    if (own == 0) lists[number] = count;
}
