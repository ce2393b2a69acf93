// Mamba-2's scan (arXiv 2405.21060), token by token: S = e^(dt a) S + dt x B^T, out = S C + d x. A workgroup
// handles 32 rows of S of one head and one sequence; S stays in registers, every eighth value of a row in
// each invocation. Tokens come in tiles, whose B and C are read together and whose sums are made together.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "activation.glsl"
#include "batch.glsl"
#include "recurrence.glsl"

const uint ROWS = 32, PARTS = 8, TILE = 4;

layout(local_size_x = 256) in;
layout(constant_id = 0) const uint STATE_DIM = 1;  // n
layout(std430, binding = 1) readonly buffer Mixed { float mixed[]; };
layout(std430, binding = 2) readonly buffer Steps { float dt[]; };
layout(std430, binding = 3) readonly buffer StepBias { float dt_bias[]; };
layout(std430, binding = 4) readonly buffer A { float a[]; };
layout(std430, binding = 5) readonly buffer D { float d[]; };
layout(std430, binding = 6) buffer State { float state[]; };
layout(std430, binding = 7) writeonly buffer Out { float y[]; };
layout(push_constant) uniform Push {
    uint heads, head_dim, groups;
    uint by_row;  // of span_of
};

const uint HELD = (STATE_DIM + PARTS - 1) / PARTS, PADDED = HELD * PARTS;

shared float b[TILE * PADDED];
shared float c[TILE * PADDED];
shared float steps[TILE];
shared float shrinks[TILE];
shared float sums[TILE * ROWS * PARTS];

// Rows `row` to row + n - 1 of the step.
void take(uint row, uint n, uint head, uint width) {
    const uint i = gl_LocalInvocationIndex, begin = heads * head_dim + head / (heads / groups) * STATE_DIM;
    for (uint at = i; at < n * PADDED; at += 256) {
        const uint k = at % PADDED, from = (row + at / PADDED) * width + begin + k;
        b[at] = k < STATE_DIM ? mixed[from] : 0.0;
        c[at] = k < STATE_DIM ? mixed[from + groups * STATE_DIM] : 0.0;
    }
    if (i < n) {
        precise float step = dt[(row + i) * heads + head] + dt_bias[head];
        step = softplus(step);
        precise float change = step * a[head];
        steps[i] = step;
        shrinks[i] = shrink(change);
    }
    barrier();
}

void main() {
    const uint i = gl_LocalInvocationIndex, part = i % PARTS, head = gl_WorkGroupID.y;
    const uint own = gl_WorkGroupID.x * ROWS + i / PARTS, width = heads * head_dim + 2 * groups * STATE_DIM;
    const Span span = span_of(gl_WorkGroupID.z, by_row == 1);
    if (span.count == 0) return;
    float s[HELD];
    [[unroll]] for (uint r = 0; r < HELD; ++r) {
        const uint k = r * PARTS + part, at = ((span.from * heads + head) * head_dim + own) * STATE_DIM + k;
        s[r] = span.from >= 0 && k < STATE_DIM && own < head_dim ? state[at] : 0.0;
    }
    for (uint t = 0; t < span.count; t += TILE) {
        const uint first = span.first + t, n = min(TILE, span.count - t);
        take(first, n, head, width);
        for (uint u = 0; u < n; ++u) {
            precise float x = own < head_dim ? mixed[(first + u) * width + head * head_dim + own] : 0.0;
            x = steps[u] * x;
            precise float sum = 0.0;
            [[unroll]] for (uint r = 0; r < HELD; ++r) {
                precise float left = s[r] * shrinks[u], more = x * b[u * PADDED + r * PARTS + part];
                left = left + more;
                s[r] = left;
                precise float product = left * c[u * PADDED + r * PARTS + part];
                sum = sum + product;
            }
            sums[u * ROWS * PARTS + i] = sum;
            const int to = slot_after(first + u);
            if (to < 0 || own >= head_dim) continue;
            [[unroll]] for (uint r = 0; r < HELD; ++r) {
                const uint k = r * PARTS + part,
                           at = ((to * heads + head) * head_dim + own) * STATE_DIM + k;
                if (k < STATE_DIM) state[at] = s[r];
            }
        }
        barrier();
        const uint u = i / ROWS, row = gl_WorkGroupID.x * ROWS + i % ROWS;
        if (u >= n || row >= head_dim) continue;
        precise float sum = sums[i * PARTS];
        for (uint k = 1; k < PARTS; ++k) sum = sum + sums[i * PARTS + k];
        precise float own_part = d[head] * mixed[(first + u) * width + head * head_dim + row];
        sum = sum + own_part;
        y[((first + u) * heads + head) * head_dim + row] = sum;
    }
}
