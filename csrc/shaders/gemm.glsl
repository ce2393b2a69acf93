// Tiles of a product of a matrix with many rows of input, the same bits as dot.glsl: TILE_OUTPUTS outputs by
// TILE_INPUTS rows of input, in workgroups of 256. The including shader defines before, besides TYPE,
// weights[], weights4[], x4[], x_factors[], x_values[], x_values4[] and INPUT_ROWS as in dot.glsl:
//   TILE_INPUTS                            32 or 64: a specialisation constant, or a number
//   uint weight_row(uint o)                the row of the matrix of output o
//   uint input_row(uint j)                 the j-th row of x
//   void store(uint o, uint j, float v)    takes a result, without bias
//
// A step of the loop loads AHEAD blocks of a chunk of each row into shared memory. An invocation has one of
// each 16 outputs, so that neighbours read neighbouring 16 bytes of shared memory, and one of each 16 inputs,
// which 16 neighbours share. For each pair it keeps the sum of the chunk and the total of the earlier chunks.
#include "blocks.glsl"

const uint TILE_OUTPUTS = 2 * TILE_INPUTS;
const uint OWN_OUTPUTS = TILE_OUTPUTS / 16, OWN_INPUTS = TILE_INPUTS / 16;
const uint OWN = OWN_OUTPUTS * OWN_INPUTS;
const bool FLOATS = TYPE == 0 || TYPE == 1 || TYPE == 30;  // F32, F16, BF16
const uint WIDTH = FLOATS ? 8 : 2;                         // vectors of four words that hold a block
const uint AHEAD = FLOATS && TILE_INPUTS > 32 ? 1 : 2;     // two blocks of floats would exceed 32 KiB
// Parts of a block that one invocation loads: units of weights, vectors of input.
const uint W_PARTS = TYPE == 0 ? 8 : FLOATS ? 4 : 1;
const uint X_PARTS = FLOATS ? 8 : 1;

// By block, then by vector, then by row.
shared uvec4 w_tile[AHEAD * WIDTH * TILE_OUTPUTS];
shared uvec4 x_tile[AHEAD * WIDTH * TILE_INPUTS];
shared vec2 w_factors[AHEAD * TILE_OUTPUTS];  // from factors()
shared uint w_small[AHEAD * TILE_OUTPUTS];    // the small scales of Q6_K and Q2_K
shared uvec2 x_scales[AHEAD * TILE_INPUTS];
shared uint tile_rows[TILE_INPUTS];  // of x

// Loads part `u` of a block, number `n` of the step, as output `o` of the tile.
void load_weights(Layout m, uint row, Place at, uint n, uint o, uint u) {
    if (FLOATS) {
        const uvec4 unit = weights4[unit_at(TYPE, m, row, at, u)];
        const uint to = (n * WIDTH + (TYPE == F32 ? u : 2 * u)) * TILE_OUTPUTS + o;
        w_tile[to] = floatBitsToUint(unit_values(TYPE, unit, 0));
        if (TYPE != F32) w_tile[to + TILE_OUTPUTS] = floatBitsToUint(unit_values(TYPE, unit, 1));
        return;
    }
    Block w;
    LOAD_BLOCK(w, weights, TYPE, m, row, at)
    const Codes codes = codes_of(TYPE, w);
    w_tile[n * 2 * TILE_OUTPUTS + o] = codes.low;
    w_tile[(n * 2 + 1) * TILE_OUTPUTS + o] = codes.high;
    w_factors[n * TILE_OUTPUTS + o] = factors(TYPE, w);
    if (has_small_scales(TYPE)) w_small[n * TILE_OUTPUTS + o] = w.scale.y;
}

void load_inputs(Layout m, uint columns, uint row, Place at, uint n, uint j, uint q) {
    if (FLOATS) {
        const uint column = 32 * at.block + 4 * q, from = row * columns + column;
        vec4 x = vec4(0);
        if ((columns & 3) == 0) {
            if (column < columns) x = x_values4[from / 4];
        } else {
            for (uint k = 0; k < 4 && column + k < columns; ++k) x[k] = x_values[from + k];
        }
        x_tile[(n * WIDTH + q) * TILE_INPUTS + j] = floatBitsToUint(x);
        return;
    }
    const uint from = row * m.blocks + at.block;
    x_tile[n * 2 * TILE_INPUTS + j] = x4[2 * from];
    x_tile[(n * 2 + 1) * TILE_INPUTS + j] = x4[2 * from + 1];
    x_scales[n * TILE_INPUTS + j] = x_factors[4 * INPUT_ROWS * m.blocks + from];
}

// Adds block `n` of the step, in shared memory, to the sums of its chunk.
void add_block(uint n, uint o, uint j, inout float sums[OWN]) {
    if (FLOATS) {
        for (uint q = 0; q < 8; ++q) {
            vec4 w[OWN_OUTPUTS];
            [[unroll]] for (uint a = 0; a < OWN_OUTPUTS; ++a) {
                w[a] = uintBitsToFloat(w_tile[(n * WIDTH + q) * TILE_OUTPUTS + o + 16 * a]);
            }
            [[unroll]] for (uint b = 0; b < OWN_INPUTS; ++b) {
                const vec4 x = uintBitsToFloat(x_tile[(n * WIDTH + q) * TILE_INPUTS + j + 16 * b]);
                [[unroll]] for (uint a = 0; a < OWN_OUTPUTS; ++a) {
                    precise float sum = sums[OWN_OUTPUTS * b + a] + w[a].x * x.x;
                    sum = sum + w[a].y * x.y;
                    sum = sum + w[a].z * x.z;
                    sum = sum + w[a].w * x.w;
                    sums[OWN_OUTPUTS * b + a] = sum;
                }
            }
        }
        return;
    }
    Codes x[OWN_INPUTS];
    uvec2 scale[OWN_INPUTS];
    [[unroll]] for (uint b = 0; b < OWN_INPUTS; ++b) {
        x[b].low = x_tile[n * 2 * TILE_INPUTS + j + 16 * b];
        x[b].high = x_tile[(n * 2 + 1) * TILE_INPUTS + j + 16 * b];
        scale[b] = x_scales[n * TILE_INPUTS + j + 16 * b];
    }
    [[unroll]] for (uint a = 0; a < OWN_OUTPUTS; ++a) {
        const uint at = o + 16 * a;
        const Codes w = Codes(w_tile[n * 2 * TILE_OUTPUTS + at], w_tile[(n * 2 + 1) * TILE_OUTPUTS + at]);
        const vec2 w_factor = w_factors[n * TILE_OUTPUTS + at];
        Block block;
        if (has_small_scales(TYPE)) block.scale.y = w_small[n * TILE_OUTPUTS + at];
        [[unroll]] for (uint b = 0; b < OWN_INPUTS; ++b) {
            const ivec2 dots = dot_halves(w, x[b].low, x[b].high);
            const float v = block_dot(TYPE, block, w_factor, dots, uintBitsToFloat(scale[b].x), scale[b].y);
            precise const float sum = sums[OWN_OUTPUTS * b + a] + v;
            sums[OWN_OUTPUTS * b + a] = sum;
        }
    }
}

// Outputs from `first_output` on, below `outputs`, by rows of input from `first_input` on, below `inputs`.
// All 256 invocations must call it with the same arguments.
void gemm_tile(Layout m, uint columns, uint first_output, uint outputs, uint first_input, uint inputs) {
    const uint i = gl_LocalInvocationID.x, o = i % 16, j = i / 16;
    fill_code_pairs(TYPE, i, 256);
    if (i < TILE_INPUTS) tile_rows[i] = input_row(min(first_input + i, inputs - 1));
    const bool computes = first_input + j < inputs;
    float totals[OWN], sums[OWN];
    [[unroll]] for (uint k = 0; k < OWN; ++k) totals[k] = 0;
    for (uint chunk = 0; chunk < m.chunks; ++chunk) {
        const uint blocks = chunk_blocks(m, chunk);
        [[unroll]] for (uint k = 0; k < OWN; ++k) sums[k] = 0;
        for (uint first = 0; first < blocks; first += AHEAD) {
            const uint count = min(AHEAD, blocks - first);
            barrier();
            // Weights from the first invocation on, inputs from the last one on: some have neither or one.
            for (uint item = i; item < count * W_PARTS * TILE_OUTPUTS; item += 256) {
                const uint part = item / TILE_OUTPUTS, n = part / W_PARTS, own = item % TILE_OUTPUTS;
                const uint row = weight_row(min(first_output + own, outputs - 1));
                load_weights(m, row, place_in_chunk(m, chunk, first + n), n, own, part % W_PARTS);
            }
            for (uint item = 255 - i; item < count * X_PARTS * TILE_INPUTS; item += 256) {
                const uint part = item % (X_PARTS * TILE_INPUTS), n = item / (X_PARTS * TILE_INPUTS);
                const uint own = part / X_PARTS;
                const Place at = place_in_chunk(m, chunk, first + n);
                load_inputs(m, columns, tile_rows[own], at, n, own, part % X_PARTS);
            }
            barrier();
            for (uint n = 0; computes && n < count; ++n) add_block(n, o, j, sums);
        }
        [[unroll]] for (uint k = 0; k < OWN; ++k) {
            precise const float total = totals[k] + sums[k];
            totals[k] = total;
        }
    }
    [[unroll]] for (uint b = 0; b < OWN_INPUTS; ++b) {
        [[unroll]] for (uint a = 0; a < OWN_OUTPUTS; ++a) {
            const uint output_ = first_output + o + 16 * a, input_ = first_input + j + 16 * b;
            if (output_ < outputs && input_ < inputs) store(output_, input_, totals[OWN_OUTPUTS * b + a]);
        }
    }
}
