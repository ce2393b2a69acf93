// Tiles of a product of a matrix with many rows of input, the same bits as dot.glsl: 64 outputs by
// TILE_INPUTS (32 or 64; float types: 32) rows of input, in workgroups of 256. The including shader defines
// before, besides TYPE, weights[], weights4[], x4[], x_factors[], x_values[], x_values4[] and INPUT_ROWS as
// in dot.glsl:
//   TILE_INPUTS                            a specialisation constant, or a number
//   uint weight_row(uint o)                the row of the matrix of output o
//   uint input_row(uint j)                 the j-th row of x
//   void store(uint o, uint j, float v)    takes a result, without bias
//
// A step of the loop loads one block of each row of two neighbouring chunks into shared memory. The two
// blocks are adjacent in 32 bytes, a sector, which single chunks would load twice. An invocation has outputs
// i, i + 16, i + 32 and i + 48, so that neighbours read neighbouring 16 bytes of shared memory, and
// TILE_INPUTS / 16 inputs, which 16 neighbours share. For each pair it keeps the sums of both chunks and the
// total of the earlier chunks.
#include "blocks.glsl"

const uint TILE_OUTPUTS = 64;
const uint OWN_INPUTS = TILE_INPUTS / 16;
const uint OWN = 4 * OWN_INPUTS;
const bool FLOATS = TYPE == 0 || TYPE == 1 || TYPE == 30;  // F32, F16, BF16
const uint WIDTH = FLOATS ? 8 : 2;                         // vectors of four words that hold a block

// By chunk, then by vector, then by row.
shared uvec4 w_tile[2 * WIDTH * TILE_OUTPUTS];
shared uvec4 x_tile[2 * WIDTH * TILE_INPUTS];
shared vec2 w_factors[2 * TILE_OUTPUTS];  // from factors()
shared uint w_small[2 * TILE_OUTPUTS];    // the small scales of Q6_K and Q2_K
shared uvec2 x_scales[2 * TILE_INPUTS];

void load_weights(Layout m, uint row, Place at, uint stream, uint o) {
    if (FLOATS) {
        [[unroll]] for (uint u = 0; u < units_of(TYPE); ++u) {
            const uvec4 unit = weights4[unit_at(TYPE, m, row, at, u)];
            const uint to = (stream * WIDTH + (TYPE == F32 ? u : 2 * u)) * TILE_OUTPUTS + o;
            w_tile[to] = floatBitsToUint(unit_values(TYPE, unit, 0));
            if (TYPE != F32) w_tile[to + TILE_OUTPUTS] = floatBitsToUint(unit_values(TYPE, unit, 1));
        }
        return;
    }
    Block w;
    LOAD_BLOCK(w, weights, TYPE, m, row, at)
    const Codes codes = codes_of(TYPE, w);
    w_tile[stream * 2 * TILE_OUTPUTS + o] = codes.low;
    w_tile[(stream * 2 + 1) * TILE_OUTPUTS + o] = codes.high;
    w_factors[stream * TILE_OUTPUTS + o] = factors(TYPE, w);
    if (has_small_scales(TYPE)) w_small[stream * TILE_OUTPUTS + o] = w.scale.y;
}

void load_inputs(Layout m, uint columns, uint row, Place at, uint stream, uint j) {
    if (FLOATS) {
        for (uint q = 0; q < 8; ++q) {
            const uint column = 32 * at.block + 4 * q, from = row * columns + column;
            vec4 x = vec4(0);
            if ((columns & 3) == 0) {
                if (column < columns) x = x_values4[from / 4];
            } else {
                for (uint k = 0; k < 4 && column + k < columns; ++k) x[k] = x_values[from + k];
            }
            x_tile[(stream * WIDTH + q) * TILE_INPUTS + j] = floatBitsToUint(x);
        }
        return;
    }
    const uint from = row * m.blocks + at.block;
    x_tile[stream * 2 * TILE_INPUTS + j] = x4[2 * from];
    x_tile[(stream * 2 + 1) * TILE_INPUTS + j] = x4[2 * from + 1];
    x_scales[stream * TILE_INPUTS + j] = x_factors[4 * INPUT_ROWS * m.blocks + from];
}

// Adds a block in shared memory to the sums of its chunk.
void add_block(uint stream, uint o, uint j, inout float sums[OWN]) {
    if (FLOATS) {
        for (uint q = 0; q < 8; ++q) {
            vec4 w[4];
            [[unroll]] for (uint a = 0; a < 4; ++a) {
                w[a] = uintBitsToFloat(w_tile[(stream * WIDTH + q) * TILE_OUTPUTS + o + 16 * a]);
            }
            [[unroll]] for (uint b = 0; b < OWN_INPUTS; ++b) {
                const vec4 x = uintBitsToFloat(x_tile[(stream * WIDTH + q) * TILE_INPUTS + j + 16 * b]);
                [[unroll]] for (uint a = 0; a < 4; ++a) {
                    precise float sum = sums[4 * b + a] + w[a].x * x.x;
                    sum = sum + w[a].y * x.y;
                    sum = sum + w[a].z * x.z;
                    sum = sum + w[a].w * x.w;
                    sums[4 * b + a] = sum;
                }
            }
        }
        return;
    }
    Codes w[4];
    [[unroll]] for (uint a = 0; a < 4; ++a) {
        w[a].low = w_tile[stream * 2 * TILE_OUTPUTS + o + 16 * a];
        w[a].high = w_tile[(stream * 2 + 1) * TILE_OUTPUTS + o + 16 * a];
    }
    [[unroll]] for (uint b = 0; b < OWN_INPUTS; ++b) {
        const uvec4 low = x_tile[stream * 2 * TILE_INPUTS + j + 16 * b];
        const uvec4 high = x_tile[(stream * 2 + 1) * TILE_INPUTS + j + 16 * b];
        const uvec2 scale = x_scales[stream * TILE_INPUTS + j + 16 * b];
        [[unroll]] for (uint a = 0; a < 4; ++a) {
            const uint at = stream * TILE_OUTPUTS + o + 16 * a;
            Block block;
            if (has_small_scales(TYPE)) block.scale.y = w_small[at];
            const ivec2 dots = dot_halves(w[a], low, high);
            const float v = block_dot(TYPE, block, w_factors[at], dots, uintBitsToFloat(scale.x), scale.y);
            precise const float sum = sums[4 * b + a] + v;
            sums[4 * b + a] = sum;
        }
    }
}

// Outputs from `first_output` on, below `outputs`, by rows of input from `first_input` on, below `inputs`.
// All 256 invocations must call it with the same arguments.
void gemm_tile(Layout m, uint columns, uint first_output, uint outputs, uint first_input, uint inputs) {
    const uint i = gl_LocalInvocationID.x, o = i % 16, j = i / 16;
    fill_code_pairs(TYPE, i, 256);
    // The first half of the invocations loads weights, the second half inputs.
    const uint stream = i % 2, loaded = i % 128 / 2;
    const uint w_row = weight_row(min(first_output + loaded, outputs - 1));
    const uint x_row = input_row(min(first_input + loaded, inputs - 1));
    const bool computes = first_input + j < inputs;
    float totals[OWN], sums[OWN], next[OWN];
    [[unroll]] for (uint k = 0; k < OWN; ++k) totals[k] = sums[k] = next[k] = 0;
    for (uint chunk = 0; chunk < m.chunks; chunk += 2) {
        for (uint n = 0; n < m.chunk; ++n) {
            barrier();
            const Place at = place_in_chunk(m, chunk + stream, n);
            if (n < chunk_blocks(m, chunk + stream)) {
                if (i < 128) load_weights(m, w_row, at, stream, loaded);
                else if (loaded < TILE_INPUTS) load_inputs(m, columns, x_row, at, stream, loaded);
            }
            barrier();
            // A loop, because drivers compile code that is called twice slowly; unrolled, the swap costs
            // nothing.
            [[unroll]] for (uint s = 0; s < 2; ++s) {
                if (computes && n < chunk_blocks(m, chunk + s)) add_block(s, o, j, sums);
                [[unroll]] for (uint k = 0; k < OWN; ++k) {
                    const float swapped = sums[k];
                    sums[k] = next[k];
                    next[k] = swapped;
                }
            }
        }
        [[unroll]] for (uint k = 0; k < OWN; ++k) {
            precise const float total = (totals[k] + sums[k]) + next[k];  // +0 without a second chunk
            totals[k] = total;
            sums[k] = next[k] = 0;
        }
    }
    [[unroll]] for (uint b = 0; b < OWN_INPUTS; ++b) {
        [[unroll]] for (uint a = 0; a < 4; ++a) {
            const uint output_ = first_output + o + 16 * a, input_ = first_input + j + 16 * b;
            if (output_ < outputs && input_ < inputs) store(output_, input_, totals[4 * b + a]);
        }
    }
}
