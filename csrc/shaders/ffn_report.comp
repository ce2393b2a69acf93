// Reports the rows that a step read and the active neurons of decode rows. The first workgroup counts.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "ffn.glsl"
layout(local_size_x = 256) in;
layout(constant_id = 2) const bool MASKED = false;
layout(constant_id = 3) const bool SKIP = false;
layout(constant_id = 4) const bool GATED = true;
layout(constant_id = 5) const bool DENSE = false;  // down by output: all of it is read
layout(constant_id = 6) const uint RUN = 0;        // neurons that share scales, 16 or 32: 0 if none do
layout(constant_id = 7) const bool ACTIVE = false;
layout(constant_id = 8) const bool COUNTS = false;
layout(constant_id = 9) const bool GIVEN = false;  // gates were computed before
layout(std430, binding = 3) readonly buffer MaskBuffer { uint mask[]; };
#include "ffn_lists.glsl"
layout(std430, binding = 6) readonly buffer IdBuffer { int ids[]; };
layout(std430, binding = 7) writeonly buffer ActiveBuffer { uint active_bits[]; };
// [L, 5] numbers of 64 bits: FFN_COUNTS of hotcold/kernels/backend.py.
layout(std430, binding = 8) buffer CountBuffer { uvec2 counts[]; };

const uint GATE_ROWS = 0, UP_ROWS = 1, DOWN_ROWS = 2, PAIRS = 3, RUNS = 4, NUMBERS = 5;

shared uint sums[NUMBERS];

uint active_word(uint row, uint word) {
    for (uint c = 0; c < chosen; ++c) {
        const uint q = row * chosen + c, id = EXPERTS ? min(uint(ids[q]), experts - 1) : 0;
        const Expert e = expert_of(id);
        const uint words = (e.end - e.begin + 63) / 64 * 2;
        if (word >= e.word && word < e.word + words) return bits[q * bit_words + word - e.word];
    }
    return 0;
}

void count_word(Tile tile, Expert e, uint word) {
    const uint left = e.end - e.begin - 32 * word, every = left < 32 ? (1u << left) - 1 : ~0u;
    uint named = 0, added = 0, pairs = 0;
    for (uint t = 0; t < tile.count; ++t) {
        const uint choice = choice_of(tile, t);
        const uint own = (MASKED ? mask_word(row_of(choice), e, word) : ~0u) & every;
        const uint own_added = SKIP ? bits[choice * bit_words + word] : own;
        named |= own;
        added |= own_added;
        pairs += bitCount(own_added);
    }
    if (!(GIVEN && SKIP) || DENSE) atomicAdd(sums[GATE_ROWS], bitCount(DENSE ? every : named));
    atomicAdd(sums[DOWN_ROWS], bitCount(DENSE ? every : added));
    atomicAdd(sums[PAIRS], pairs);
    if (RUN == 32) atomicAdd(sums[RUNS], added != 0 ? 1 : 0);
    if (RUN == 16) atomicAdd(sums[RUNS], ((added & 0xffff) != 0 ? 1 : 0) + (added >> 16 != 0 ? 1 : 0));
}

void main() {
    const uint own = gl_LocalInvocationID.x, rows_of_step = min(count_of_rows(), N_DECODE);
    const uint words = ACTIVE ? rows_of_step * active_words : 0;
    for (uint i = gl_GlobalInvocationID.x; i < words; i += gl_NumWorkGroups.x * 256)
        active_bits[i] = active_word(i / active_words, i % active_words);
    if (!COUNTS || gl_WorkGroupID.x > 0 || N_TOKENS > N_DECODE) return;

    if (own < NUMBERS) sums[own] = 0;
    barrier();
    for (uint number = 0; number < most_tiles; ++number) {
        const Tile tile = tile_of(number);
        if (tile.count == 0) break;
        const Expert e = expert_of(tile.expert);
        for (uint word = own; 32 * word < e.end - e.begin; word += 256) count_word(tile, e, word);
        if (own == 0 && GATED && SKIP && !DENSE) atomicAdd(sums[UP_ROWS], lists[most_tiles + number]);
        if (own == 0 && GIVEN && SKIP && !DENSE) atomicAdd(sums[GATE_ROWS], lists[most_tiles + number]);
    }
    barrier();
    if (own >= NUMBERS) return;
    const uint at = counts_row * NUMBERS + own;
    const uint sum = sums[own == UP_ROWS && GATED && (!SKIP || DENSE) ? GATE_ROWS : own];
    uvec2 total = counts[at];
    total.x += sum;
    if (total.x < sum) ++total.y;
    counts[at] = total;
}
