// Gathers the choices of rows by expert, in tiles. One workgroup.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "ffn.glsl"
layout(local_size_x = 256) in;
layout(std430, binding = 3) readonly buffer IdBuffer { int ids[]; };
// The first invalid choice, of the lowest row: 1, the row, the id, the id before it.
layout(std430, binding = 4) buffer StatusBuffer { uint status[]; };

const uint MOST_EXPERTS = 1024, SHARE = MOST_EXPERTS / 256;

shared uint begins[MOST_EXPERTS];  // of each expert: its choices, then their start
shared uvec2 sums[256];            // choices and tiles of the experts of each invocation
shared uint wrong;                 // the lowest invalid choice

bool is_wrong(uint choice) {
    const uint at = begin_of_rows() * chosen + choice;
    return uint(ids[at]) >= experts || (choice % chosen > 0 && ids[at] <= ids[at - 1]);
}

void main() {
    const uint own = gl_LocalInvocationID.x, choices = count_of_rows() * chosen;
    const uint first_id = begin_of_rows() * chosen;
    if (own == 0) wrong = choices;
    for (uint e = own; e < MOST_EXPERTS; e += 256) begins[e] = 0;
    barrier();
    for (uint q = own; q < choices; q += 256) {
        if (is_wrong(q)) atomicMin(wrong, q);
        if (uint(ids[first_id + q]) < experts) atomicAdd(begins[ids[first_id + q]], 1);
    }
    barrier();
    if (own == 0 && wrong < choices && status[0] == 0) {
        const uint at = first_id + wrong;
        status[1] = at / chosen;
        status[2] = ids[at];
        status[3] = wrong % chosen > 0 ? ids[at - 1] : 0;
        status[0] = uint(ids[at]) >= experts ? 1 : 2;
    }
    if (!EXPERTS) return;

    uvec2 sum = uvec2(0);
    for (uint i = 0; i < SHARE; ++i) {
        const uint count = begins[own * SHARE + i];
        sum += uvec2(count, (count + TILE - 1) / TILE);
    }
    sums[own] = sum;
    for (uint step = 1; step < 256; step *= 2) {
        barrier();
        const uvec2 before = own >= step ? sums[own - step] : uvec2(0);
        barrier();
        sums[own] += before;
    }
    uvec2 at = sums[own] - sum;
    for (uint i = 0; i < SHARE; ++i) {
        const uint e = own * SHARE + i, count = begins[e];
        begins[e] = at.x;
        for (uint first = 0; first < count; first += TILE) {
            tiles[4 + 4 * at.y] = e;
            tiles[4 + 4 * at.y + 1] = at.x + first;
            tiles[4 + 4 * at.y + 2] = min(TILE, count - first);
            ++at.y;
        }
        at.x += count;
    }
    if (own == 255) tiles[0] = at.y;
    barrier();
    for (uint q = own; q < choices; q += 256) {
        const int e = ids[first_id + q];
        if (uint(e) < experts) tiles[4 + 4 * most_tiles + atomicAdd(begins[e], 1)] = q;
    }
}
