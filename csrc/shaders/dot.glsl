// Dot products of one chunk of a row of weights with T rows of input. The including shader defines before:
//   T, TYPE                     specialisation constants
//   weights[], weights4[]       the matrix, as uint and uvec4 (blocks.glsl)
//   x4[], x_factors[]           quantise.comp's result, as uvec4 and uvec2: codes of all rows, then factors
//   x_values[], x_values4[]     input of a float type, as float and vec4; at the same binding
//   INPUT_ROWS                  of x: the rows of quantise.comp
//   uint input_row(uint t)      the t-th row of x
//   INPUTS                      optional: actual number of the T rows
//   ROWS                        of weights in a workgroup: 256 divided by a multiple of 8
#include "blocks.glsl"
#ifndef INPUTS
#define INPUTS T
#endif

shared float partial[T * 256];  // by input, then chunk, then row; 0 for chunks that a row does not have

// Adds the chunks of a row for the t-th input, in order, and reads eight before it adds the first.
float chunks_sum(Layout m, uint row, uint t) {
    precise float total = 0;
    for (uint chunk = 0; chunk < m.chunks; chunk += 8) {
        float sums[8];
        [[unroll]] for (uint k = 0; k < 8; ++k) sums[k] = partial[t * 256 + (chunk + k) * ROWS + row];
        [[unroll]] for (uint k = 0; k < 8; ++k) total = total + sums[k];
    }
    return total;
}

// Blocks that are loaded before the first is added: one input leaves registers for two.
const uint BLOCKS_AHEAD = T == 1 ? 2 : 1;

// Adds the products of four weights, number q in the block that begins with column `first`.
void add_quad(vec4 w, uint q, uint first, uint columns, inout float sums[T]) {
    [[unroll]] for (uint t = 0; t < T; ++t) {
        if (t >= INPUTS) break;
        const vec4 x = x_values4[(input_row(t) * columns + first) / 4 + q];
        precise float sum = sums[t] + w.x * x.x;
        sum = sum + w.y * x.y;
        sum = sum + w.z * x.z;
        sum = sum + w.w * x.w;
        sums[t] = sum;
    }
}

#define CHUNK_DOTS chunk_dots
#define WEIGHTS weights
#define WEIGHTS4 weights4
#include "chunk_dots.glsl"
#undef CHUNK_DOTS
#undef WEIGHTS
#undef WEIGHTS4
