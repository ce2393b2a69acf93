// Defines CHUNK_DOTS, which adds the dot products of one chunk of a row of WEIGHTS; WEIGHTS4 is the same
// matrix as uvec4. See dot.glsl.
void CHUNK_DOTS(Layout m, uint columns, uint row, uint chunk, inout float sums[T]) {
    const uint blocks = chunk_blocks(m, chunk);
    if (is_quantised(TYPE)) {
        for (uint first = 0; first < blocks; first += BLOCKS_AHEAD) {
            Block w[BLOCKS_AHEAD];
            [[unroll]] for (uint k = 0; k < BLOCKS_AHEAD; ++k) {
                const Place at = place_in_chunk(m, chunk, min(first + k, blocks - 1));
                LOAD_BLOCK(w[k], WEIGHTS, TYPE, m, row, at)
            }
            [[unroll]] for (uint k = 0; k < BLOCKS_AHEAD; ++k) {
                const Codes codes = codes_of(TYPE, w[k]);
                const vec2 f = factors(TYPE, w[k]);
                [[unroll]] for (uint t = 0; t < T; ++t) {
                    if (t >= INPUTS) break;
                    const uint from = input_row(t) * m.blocks + w[k].number;
                    const uvec2 x = x_factors[4 * INPUT_ROWS * m.blocks + from];
                    const ivec2 dots = dot_halves(codes, x4[2 * from], x4[2 * from + 1]);
                    precise const float sum =
                        sums[t] + block_dot(TYPE, w[k], f, dots, uintBitsToFloat(x.x), x.y);
                    // No branch: compilers would move loads into it.
                    sums[t] = BLOCKS_AHEAD == 1 || first + k < blocks ? sum : sums[t];
                }
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
                    const uvec4 unit = WEIGHTS4[unit_at(TYPE, m, row, at, u)];
                    [[unroll]] for (uint q = 0; q < quads; ++q)
                        add_quad(unit_values(TYPE, unit, q), u * quads + q, first, columns, sums);
                }
                continue;
            }
            for (uint q = 0; 4 * q < end; ++q) {
                const uvec4 unit = WEIGHTS4[unit_at(TYPE, m, row, at, unit_of(TYPE, q))];
                add_quad(unit_values(TYPE, unit, q), q, first, columns, sums);
            }
        } else {  // rows of x are not whole vec4s
            for (uint k = 0; k < end; ++k) {
                const uint q = k / 4;
                const vec4 w = unit_values(TYPE, WEIGHTS4[unit_at(TYPE, m, row, at, unit_of(TYPE, q))], q);
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
