// Dot products of one chunk of a row of weights with T rows of input. The including shader defines before:
//   T, TYPE                     specialisation constants
//   weights[], weights4[]       the matrix, as uint and uvec4 (blocks.glsl)
//   x4[], x_factors[]           quantise.comp's result, as uvec4 and uvec2: codes of all rows, then factors
//   x_values[], x_values4[]     input of a float type, as float and vec4; at the same binding
//   INPUT_ROWS                  of x: the rows of quantise.comp
//   uint input_row(uint t)      the t-th row of x
//   INPUTS                      optional: actual number of the T rows
#include "blocks.glsl"
#ifndef INPUTS
#define INPUTS T
#endif

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
