// Down by neuron for prompt rows: leaves in order; a binary counter of leaves adds their sums like the tree.
//
// A workgroup takes 64 outputs of CHOICES choices of a tile; an invocation 4 outputs of every 16th choice.
// The sums of more choices would not fit in registers.
#include "ffn.glsl"
const uint QUADS = 1;
#include "ffn_weights.glsl"
layout(local_size_x = 256) in;
layout(std430, binding = 4) readonly buffer ValueBuffer { float values[]; };
layout(std430, binding = 5) writeonly buffer PartialBuffer { float partial[]; };

const uint SLICE = 32;           // neurons; 64 are a word of a mask
const uint CHOICES = 32;         // divides TILE
const uint OWN = CHOICES / 16;   // choices of an invocation
const uint WIDTH = CHOICES + 1;  // so that a column's values are in different banks
const uint C_TILE = SLICE * WIDTH;

shared vec4 w_tile[SLICE * 16];
shared float c_tile[C_TILE];

void load(Expert e, Tile tile, uint begin, uint end) {
    const Layout rows_layout = layout_of(rows, dim);
    for (uint i = gl_LocalInvocationID.x; i < SLICE * 16; i += 256) {
        const uint quad = gl_WorkGroupID.x * 16 + i % 16, neuron = begin + i / 16;
        vec4 w = vec4(0);
        if (4 * quad < dim && neuron < end)
            w = down_values(load_down(rows_layout, place_of(rows_layout, quad / 8), e.begin + neuron, quad),
                            quad, 0);
        w_tile[i] = w;
    }
    for (uint i = gl_LocalInvocationID.x; i < SLICE * CHOICES; i += 256) {
        const uint neuron = begin + i % SLICE, place = i / SLICE;
        float c = 0;
        if (place < tile.count && neuron < end) c = values[choice_of(tile, place) * most + neuron];
        c_tile[i % SLICE * WIDTH + place] = c;
    }
}

void main() {
    Tile tile = tile_of(gl_WorkGroupID.z / (TILE / CHOICES));
    const uint skipped = gl_WorkGroupID.z % (TILE / CHOICES) * CHOICES;
    if (skipped >= tile.count) return;
    tile.first += skipped;
    tile.count = min(tile.count - skipped, CHOICES);
    const Expert e = expert_of(tile.expert);
    const uint leaf_count = leaves_of(e), first_leaf = gl_WorkGroupID.y * together;
    if (first_leaf >= leaf_count || e.end == e.begin) return;
    if (e.begin + leaf_begin(e, first_leaf) - first >= rows) return;  // of another part
    const uint own_quad = gl_LocalInvocationID.x % 16, own_place = gl_LocalInvocationID.x / 16;

    vec4 levels[7][OWN];
    vec4 sums[OWN];
    const uint count = min(together, leaf_count - first_leaf);
    for (uint leaf = 0; leaf < count; ++leaf) {
        [[unroll]] for (uint t = 0; t < OWN; ++t) sums[t] = vec4(0);
        const uint end = leaf_begin(e, first_leaf + leaf + 1);
        for (uint begin = leaf_begin(e, first_leaf + leaf); begin < end; begin += SLICE) {
            barrier();
            load(e, tile, begin, end);
            barrier();
            for (uint k = 0; k < SLICE; ++k) {
                const vec4 w = w_tile[k * 16 + own_quad];
                [[unroll]] for (uint t = 0; t < OWN; ++t) {
                    const float c = c_tile[k * WIDTH + own_place + 16 * t];
                    precise vec4 product = c * w;
                    precise vec4 sum = sums[t] + product;
                    sums[t] = c == 0 ? sums[t] : sum;  // w may be infinite
                }
            }
        }
        uint level = 0;
        for (; (leaf >> level & 1) != 0; ++level)
            [[unroll]] for (uint t = 0; t < OWN; ++t) {
                precise vec4 sum = levels[level][t] + sums[t];
                sums[t] = sum;
            }
        [[unroll]] for (uint t = 0; t < OWN; ++t) levels[level][t] = sums[t];
    }
    uint level = findLSB(count);
    [[unroll]] for (uint t = 0; t < OWN; ++t) sums[t] = levels[level][t];
    for (++level; count >> level != 0; ++level)
        if ((count >> level & 1) != 0)
            [[unroll]] for (uint t = 0; t < OWN; ++t) {
                precise vec4 sum = levels[level][t] + sums[t];
                sums[t] = sum;
            }
    const uint d = 4 * (gl_WorkGroupID.x * 16 + own_quad);
    [[unroll]] for (uint t = 0; t < OWN; ++t) {  // unrolled, or an array of sums would not be in registers
        if (own_place + 16 * t >= tile.count) continue;
        const uint to = (choice_of(tile, own_place + 16 * t) * room + gl_WorkGroupID.y) * dim + d;
        for (uint i = 0; i < 4 && d + i < dim; ++i) partial[to + i] = sums[t][i];
    }
}
