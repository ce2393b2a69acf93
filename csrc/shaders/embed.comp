#version 450
#extension GL_GOOGLE_include_directive : require
// Rows of a table, exactly the values of its file: out[t] (+)= table[number of t]. An invocation writes four
// values.
layout(local_size_x = 64) in;
#include "batch.glsl"
#include "blocks.glsl"

layout(constant_id = 0) const uint TYPE = 2;

layout(std430, binding = 1) readonly buffer Weights { uint weights[]; };
layout(std430, binding = 1) readonly buffer Weights4 { uvec4 weights4[]; };
layout(std430, binding = 2) buffer Out { float result[]; };

layout(push_constant) uniform Push {
    uint rows, columns;  // of the part of the table that is bound
    uint first;          // the number of its first row
    uint numbers;        // TOKENS or POSITIONS (batch.glsl)
    uint accumulate;
};

void main() {
    const uint t = gl_WorkGroupID.y, column = gl_GlobalInvocationID.x * 4;
    if (t >= N_TOKENS || column >= columns) return;
    const uint row = of_row(numbers, t) - first;
    if (row >= rows) return;  // of another part
    const Layout m = layout_of(rows, columns);
    const Place at = place_of(m, column / 32);
    vec4 values;
    LOAD_VALUES(values, weights, TYPE, m, row, at, column / 4 % 8)
    for (uint i = 0; i < 4 && column + i < columns; ++i) {
        const uint to = t * columns + column + i;
        precise const float sum = result[to] + values[i];
        result[to] = accumulate != 0 ? sum : values[i];
    }
}
