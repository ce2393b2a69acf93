// Down by neuron for decode rows: the sum of a few leaves, over the neurons whose coefficient is not zero.
//
// A workgroup has 64 invocations; each takes 4 QUADS outputs of up to AT_ONCE choices of a tile. Rows of
// blocks are read in storage order, so that neighbours read neighbouring bytes.
#include "ffn.glsl"
layout(constant_id = 3) const uint AT_ONCE = 1;  // divides TILE
layout(constant_id = 4) const uint QUADS = 1;
#include "ffn_weights.glsl"
layout(local_size_x = 64) in;
layout(std430, binding = 4) readonly buffer ValueBuffer { float values[]; };
layout(std430, binding = 5) readonly buffer BitBuffer { uint bits[]; };
layout(std430, binding = 6) writeonly buffer PartialBuffer { float partial[]; };

const uint SPAN = 256;   // neurons of a leaf that are listed at a time
const uint LEVELS = 3;   // of the tree, for 4 leaves
const bool ONE_LEAF = AT_ONCE <= 2;  // rows of so few choices sum each leaf apart: no tree is in registers
const uint UNROLLED = 4;  // rows that are read before any is added

// SwiftShader never finishes with this loop of panels if it is asked to unroll it.
#ifdef PANELS
#define READ_AT_ONCE
#else
#define READ_AT_ONCE [[unroll]]
#endif

shared uint words[SPAN / 32];
shared uint listed[SPAN];                      // ascending
shared float coefficients[SPAN * AT_ONCE];

uint choices[AT_ONCE];
vec4 sums[AT_ONCE * QUADS];

// Lists the neurons of [begin, end) whose coefficient is not zero for any choice; returns their number.
uint list_neurons(uint begin, uint end, uint tokens) {
    const uint own = gl_LocalInvocationID.x;
    barrier();
    if (own < SPAN / 32) {
        uint any = 0;
        if (begin + 32 * own < end)
            for (uint t = 0; t < tokens; ++t) any |= bits[choices[t] * bit_words + begin / 32 + own];
        words[own] = any;
    }
    barrier();
    uint count = 0, before = 0;
    const uint four = own % 8 * 4;  // bits of a word that this invocation lists
    for (uint w = 0; w < SPAN / 32; ++w) {
        if (w == own / 8) before = count + bitCount(words[w] & (1u << four) - 1);
        count += bitCount(words[w]);
    }
    for (uint i = four; i < four + 4; ++i)
        if ((words[own / 8] >> i & 1) != 0) listed[before++] = begin + own / 8 * 32 + i;
    barrier();
    const uint filled = (count + UNROLLED - 1) / UNROLLED * UNROLLED;
    for (uint i = own; i < filled * AT_ONCE; i += 64) {
        const uint neuron = listed[min(i / AT_ONCE, count - 1)], t = i % AT_ONCE;
        float c = 0;
        const bool own_bit = (bits[choices[t] * bit_words + neuron / 32] >> neuron % 32 & 1) != 0;
        if (i < count * AT_ONCE && t < tokens && own_bit) c = values[choices[t] * most + neuron];
        coefficients[i] = c;
    }
    barrier();
    return count;
}

// Adds the products of a neuron. If its coefficient is 0, its weights do not count: they may be infinite. For
// one choice, read_if() has made them finite, without a branch, into which compilers would move loads.
void add(uint k, vec4 w[QUADS]) {
    [[unroll]] for (uint t = 0; t < AT_ONCE; ++t) {
        const float c = coefficients[k * AT_ONCE + t];
        if (AT_ONCE > 1 && c == 0) continue;
        [[unroll]] for (uint q = 0; q < QUADS; ++q) {
            precise vec4 product = c * w[q];
            precise vec4 sum = sums[t * QUADS + q] + product;
            sums[t * QUADS + q] = sum;
        }
    }
}

void main() {
    const uint shares = TILE / AT_ONCE, share = gl_WorkGroupID.z % shares * AT_ONCE;
    const Tile tile = tile_of(gl_WorkGroupID.z / shares);
    if (share >= tile.count) return;
    const Expert e = expert_of(tile.expert);
    const uint leaf_count = leaves_of(e), first_leaf = gl_WorkGroupID.y * together;
    if (first_leaf >= leaf_count || e.end == e.begin) return;
    if (e.begin + leaf_begin(e, first_leaf) - first >= rows) return;  // of another part
    const uint tokens = min(AT_ONCE, tile.count - share);
    for (uint t = 0; t < AT_ONCE; ++t) choices[t] = choice_of(tile, share + min(t, tokens - 1));

    const Layout rows_layout = layout_of(rows, dim);
    const uint quad = first_quad(rows_layout, gl_GlobalInvocationID.x);
    const Place at = place_of(rows_layout, quad / 8);
    vec4 levels[LEVELS][AT_ONCE * QUADS];
    const uint last_leaf = ONE_LEAF ? first_leaf + 1 : min(first_leaf + together, leaf_count);
    for (uint leaf = first_leaf; leaf < last_leaf; ++leaf) {
        [[unroll]] for (uint i = 0; i < AT_ONCE * QUADS; ++i) sums[i] = vec4(0);
        const uint end = leaf_begin(e, leaf + 1);
        for (uint begin = leaf_begin(e, leaf); begin < end; begin += SPAN) {
            const uint count = list_neurons(begin, end, tokens);
            // No invocation leaves the loop's body early, because all must reach the barriers of the next
            // span.
            const uint added = 4 * quad < dim ? count : 0;
            for (uint k = 0; k < added; k += UNROLLED) {
                Quads read[UNROLLED];
                vec4 w[UNROLLED][QUADS];
                READ_AT_ONCE for (uint i = 0; i < UNROLLED; ++i)
                    read[i] = load_down(rows_layout, at, e.begin + listed[min(k + i, count - 1)], quad);
                [[unroll]] for (uint i = 0; i < UNROLLED; ++i) {
                    if (AT_ONCE == 1) read[i] = read_if(read[i], coefficients[k + i] != 0);
                    [[unroll]] for (uint q = 0; q < QUADS; ++q) w[i][q] = down_values(read[i], quad, q);
                }
                [[unroll]] for (uint i = 0; i < UNROLLED; ++i) add(k + i, w[i]);
            }
        }
        // The tree over these leaves: like the carries of a binary counter of leaves.
        const uint number = ONE_LEAF ? 0 : leaf - first_leaf, level = (number & 3) == 3 ? 2 : number & 1;
        [[unroll]] for (uint i = 0; i < AT_ONCE * QUADS; ++i) {
            precise vec4 sum = sums[i];
            if ((number & 1) == 1) sum = levels[0][i] + sum;
            if ((number & 3) == 3) sum = levels[1][i] + sum;
            levels[level][i] = sum;
        }
    }
    const uint count = ONE_LEAF ? 1 : last_leaf - first_leaf, top = count == 1 ? 0 : count == 4 ? 2 : 1;
    [[unroll]] for (uint t = 0; t < AT_ONCE; ++t) {
        if (t >= tokens) break;
        const uint to = (choices[t] * room + gl_WorkGroupID.y) * dim;
        [[unroll]] for (uint q = 0; q < QUADS; ++q) {
            precise vec4 sum = levels[top][t * QUADS + q];
            if (count == 3) sum = sum + levels[0][t * QUADS + q];
            const uint d = 4 * (quad + further_quad(q));
            for (uint i = 0; i < 4 && d + i < dim; ++i) partial[to + d + i] = sum[i];
        }
    }
}
