#version 450
#extension GL_GOOGLE_include_directive : require
// A few rows of input times all rows of a matrix: out[t] (+)= w x[t] + bias; for some logits, then capped.
//
// A workgroup has ROWS rows of weights; for each row LANES invocations take a chunk: 8 rows and 32 lanes, or
// 32 and 8 for short rows. Neighbouring invocations take neighbouring rows: 8 of them read the same input,
// which comes from the cache once. 4 times 16 bytes of a row are adjacent: two whole sectors of 32 bytes;
// other invocations of the workgroup read the rest of the row's line at the same time. One row per subgroup
// would read whole lines, but 8 times as much input, which exceeds the weights from 4 rows of input on.
layout(local_size_x = 256) in;
#include "batch.glsl"
#include "counts.glsl"
#include "activation.glsl"

layout(constant_id = 0) const uint TYPE = 2;
layout(constant_id = 1) const uint T = 1;
layout(constant_id = 2) const uint LANES = 32;  // at least a row's chunks
layout(constant_id = 3) const uint HEADS = 1;   // each has its rows of the matrix and its row of each x[t]
layout(constant_id = 4) const bool CAPPED = false;
const uint ROWS = 256 / LANES;

layout(std430, binding = 1) readonly buffer Weights { uint weights[]; };
layout(std430, binding = 1) readonly buffer Weights4 { uvec4 weights4[]; };
layout(std430, binding = 2) readonly buffer X4 { uvec4 x4[]; };
layout(std430, binding = 2) readonly buffer XFactors { uvec2 x_factors[]; };
layout(std430, binding = 2) readonly buffer XValues { float x_values[]; };
layout(std430, binding = 2) readonly buffer XValues4 { vec4 x_values4[]; };
layout(std430, binding = 3) readonly buffer Bias { float bias[]; };
layout(std430, binding = 4) buffer Out { float result[]; };

layout(push_constant) uniform Push {
    uint rows, columns;           // of the matrix that is bound
    uint input_rows;              // of x: capacity
    uint count;                   // number of the batch with the row count (counts.glsl)
    uint out_columns, out_first;  // position of the matrix's row 0
    uint flags;                   // 1: add the bias, 2: accumulate, 4: clamp to 0 from below
    float cap;                    // if CAPPED
};

#define INPUT_ROWS (HEADS * input_rows)
uint first_input = 0, head = 0;
uint input_row(uint t) { return HEADS * min(first_input + t, input_rows - 1) + head; }
#include "dot.glsl"

void main() {
    const uint i = gl_LocalInvocationID.x, first = gl_WorkGroupID.x * ROWS;
    const uint row = first + i % ROWS, chunk = i / ROWS;
    const uint inputs = min(count_of(count), input_rows);
    if (HEADS > 1) head = min((out_first + row) / (out_columns / HEADS), HEADS - 1);
    const Layout m = layout_of(rows, columns);
    fill_code_pairs(TYPE, i, 256);
    for (; first_input < inputs; first_input += T) {  // once, except with many rows of logits
        float sums[T];
        [[unroll]] for (uint t = 0; t < T; ++t) sums[t] = 0;
        if (row < rows && chunk < m.chunks) chunk_dots(m, columns, row, chunk, sums);
        if (first_input > 0) barrier();
        [[unroll]] for (uint t = 0; t < T; ++t) partial[t * 256 + i] = sums[t];
        barrier();
        for (uint k = i; k < T * ROWS; k += 256) {
            const uint t = k / ROWS, token = first_input + t, o = first + k % ROWS;
            if (o >= rows || token >= inputs) continue;
            precise float total = chunks_sum(m, k % ROWS, t);
            if ((flags & 1) != 0) total = total + bias[out_first + o];
            if ((flags & 4) != 0 && total < 0) total = 0;
            const uint at = token * out_columns + out_first + o;
            if ((flags & 2) != 0) total = result[at] + total;
            result[at] = CAPPED ? capped(total, cap) : total;
        }
    }
}
