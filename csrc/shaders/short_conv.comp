// Causal convolution along a sequence, each column separately, with TAPS - 1 past columns as state. An
// invocation writes one value. The invocation of a sequence's first row writes all values that depend on the
// state, and the new states. One of these may replace the old state.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "activation.glsl"
#include "batch.glsl"
#include "recurrence.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 0) const uint TAPS = 2;
layout(constant_id = 1) const uint BIAS = 0;
layout(constant_id = 2) const uint ACTIVATED = 0;
layout(std430, binding = 1) readonly buffer X { float x[]; };
layout(std430, binding = 2) readonly buffer Weight { float weight[]; };
layout(std430, binding = 3) readonly buffer Bias { float bias[]; };
layout(std430, binding = 4) buffer State { float state[]; };
layout(std430, binding = 5) writeonly buffer Out { float y[]; };
layout(push_constant) uniform Push { uint width; };

const uint PAST = TAPS - 1;

void give(uint row, uint column, float seen[TAPS]) {
    precise float sum = BIAS == 1 ? bias[column] : 0.0;
    for (uint j = 0; j < TAPS; ++j) {
        precise float product = weight[column * TAPS + j] * seen[j];
        sum = sum + product;
    }
    y[row * width + column] = ACTIVATED == 1 ? activate(SILU, sum, 0.0) : sum;
}

// Writes the state after a row: the last columns it has read.
void keep(uint row, uint column, float seen[TAPS]) {
    const int to = slot_after(row);
    if (to < 0) return;
    for (uint j = 0; j < PAST; ++j) state[(to * PAST + j) * width + column] = seen[j + 1];
}

void main() {
    const uint row = gl_WorkGroupID.y, column = gl_GlobalInvocationID.x;
    if (row >= N_TOKENS || column >= width) return;
    const uint sequence = of_row(SEQUENCE, row), at = row - of_row(FIRST_ROWS, sequence);
    float seen[TAPS];
    if (at >= PAST) {
        for (uint j = 0; j < TAPS; ++j) seen[j] = x[(row - PAST + j) * width + column];
        give(row, column, seen);
        return;
    }
    if (at > 0) return;
    const Span span = span_of(sequence, false);
    seen[0] = 0.0;
    for (uint j = 0; j < PAST; ++j)
        seen[j + 1] = span.from < 0 ? 0.0 : state[(span.from * PAST + j) * width + column];
    for (uint i = 0; i < min(span.count, PAST); ++i) {
        for (uint j = 0; j < PAST; ++j) seen[j] = seen[j + 1];
        seen[PAST] = x[(row + i) * width + column];
        give(row + i, column, seen);
        keep(row + i, column, seen);
    }
    // For a prompt, only the last row keeps a state.
    for (uint i = row < N_DECODE ? PAST : max(PAST, span.count - 1); i < span.count; ++i) {
        for (uint j = 0; j < PAST; ++j) seen[j + 1] = x[(row + i + 1 - PAST + j) * width + column];
        keep(row + i, column, seen);
    }
}
