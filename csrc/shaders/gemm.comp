#version 450
#extension GL_GOOGLE_include_directive : require
// Many rows of input times all rows of a matrix: out[t] (+)= w x[t] + bias, the same bits as gemv.comp.
layout(local_size_x = 256) in;
#include "batch.glsl"
#include "counts.glsl"

layout(constant_id = 0) const uint TYPE = 2;
layout(constant_id = 1) const uint TILE_INPUTS = 32;
layout(constant_id = 2) const uint HEADS = 1;  // as in gemv.comp

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
    uint start;                   // the first row of the matrix of this dispatch
};

#define INPUT_ROWS (HEADS * input_rows)
uint weight_row(uint o) { return o; }
uint input_row(uint j) { return HEADS * j + gl_WorkGroupID.z; }

void store(uint o, uint j, float v) {
    precise float total = v;
    if ((flags & 1) != 0) total = total + bias[out_first + o];
    if ((flags & 4) != 0 && total < 0) total = 0;
    const uint at = j * out_columns + out_first + o;
    if ((flags & 2) != 0) total = result[at] + total;
    result[at] = total;
}

#include "gemm.glsl"

void main() {
    // Workgroups with the same weights are neighbours: a matrix larger than the cache is read once.
    const uint inputs = min(count_of(count), input_rows), first_input = gl_WorkGroupID.x * TILE_INPUTS;
    if (first_input >= inputs) return;
    uint first = start + gl_WorkGroupID.y * TILE_OUTPUTS, end = rows;
    if (HEADS > 1) {  // the rows of the head that are bound
        const uint each = out_columns / HEADS, begin = gl_WorkGroupID.z * each;
        first += max(begin, out_first) - out_first;
        end = min(max(begin + each, out_first) - out_first, rows);
        if (first >= end) return;
    }
    gemm_tile(layout_of(rows, columns), columns, first, end, first_input, inputs);
}
