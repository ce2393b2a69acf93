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

void chunk_dots(Layout m, uint columns, uint row, uint chunk, inout float sums[T]) {
    const uint blocks = chunk_blocks(m, chunk);
    if (is_quantised(TYPE)) {
        for (uint i = 0; i < blocks; ++i) {
            const Place at = place_in_chunk(m, chunk, i);
            Block w;
            LOAD_BLOCK(w, weights, TYPE, m, row, at)
            const Codes codes = codes_of(TYPE, w);
            const vec2 f = factors(TYPE, w);
            [[unroll]] for (uint t = 0; t < T; ++t) {
                if (t >= INPUTS) break;
                const uint from = input_row(t) * m.blocks + at.block;
                const uvec2 x = x_factors[4 * INPUT_ROWS * m.blocks + from];
                const ivec2 dots = dot_halves(codes, x4[2 * from], x4[2 * from + 1]);
                precise const float sum = sums[t] + block_dot(TYPE, w, f, dots, uintBitsToFloat(x.x), x.y);
                sums[t] = sum;
            }
        }
        return;
    }
    for (uint i = 0; i < blocks; ++i) {
        const Place at = place_in_chunk(m, chunk, i);
        const uint first = 32 * at.block, end = min(columns - first, 32);
        if ((columns & 3) == 0) {
            const uint quads = TYPE == F32 ? 1 : 2;  // of a unit
            if (end == 32) {  // a whole block: without an exit from the loops, compilers unroll them
                [[unroll]] for (uint u = 0; u < units_of(TYPE); ++u) {
                    const uvec4 unit = weights4[unit_at(TYPE, m, row, at, u)];
                    [[unroll]] for (uint q = 0; q < quads; ++q)
                        add_quad(unit_values(TYPE, unit, q), u * quads + q, first, columns, sums);
                }
                continue;
            }
            for (uint q = 0; 4 * q < end; ++q) {
                const uvec4 unit = weights4[unit_at(TYPE, m, row, at, unit_of(TYPE, q))];
                add_quad(unit_values(TYPE, unit, q), q, first, columns, sums);
            }
        } else {  // rows of x are not whole vec4s
            for (uint k = 0; k < end; ++k) {
                const uint q = k / 4;
                const vec4 w = unit_values(TYPE, weights4[unit_at(TYPE, m, row, at, unit_of(TYPE, q))], q);
                [[unroll]] for (uint t = 0; t < T; ++t) {
                    if (t >= INPUTS) break;
                    const float x = x_values[input_row(t) * columns + first + k];
                    precise const float sum = sums[t] + w[k % 4] * x;
                    sums[t] = sum;
                }
            }
        }
    }
}
