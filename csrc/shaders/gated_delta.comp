// The gated delta rule (arXiv 2412.06464), token by token: S = e^g S, then S += k (beta (v - S^T k))^T, out =
// S^T q, with k and q normalised. A workgroup handles 64 columns of S of one head and one sequence, which
// need only these columns of v. S stays in registers, a quarter of a column in each invocation. Tokens come
// in tiles, whose k and q are read and normalised together.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "activation.glsl"
#include "batch.glsl"
#include "recurrence.glsl"

const uint COLUMNS = 64, PARTS = 4, TILE = 4, LANES = 16;

layout(local_size_x = 256) in;
layout(constant_id = 0) const uint KEY_DIM = 1;
layout(constant_id = 1) const uint BY_CHANNEL = 0;
layout(constant_id = 2) const uint TILED = 0;
layout(std430, binding = 1) readonly buffer Mixed { float mixed[]; };
layout(std430, binding = 2) readonly buffer Decay { float decay[]; };
layout(std430, binding = 3) readonly buffer Beta { float beta[]; };
layout(std430, binding = 4) buffer State { float state[]; };
layout(std430, binding = 5) writeonly buffer Out { float y[]; };
layout(push_constant) uniform Push {
    uint heads, key_heads, value_dim;
    uint by_row;  // of span_of
    float eps, scale;
};

const uint ROWS = (KEY_DIM + PARTS - 1) / PARTS;  // of S in an invocation
const uint PADDED = ROWS * PARTS, CHANNELS = BY_CHANNEL == 1 ? PADDED : 1;

shared float keys[TILE * PADDED];
shared float queries[TILE * PADDED];
shared float decays[TILE * CHANNELS];
shared float betas[TILE];
shared float squares[2 * TILE * LANES];
shared float scales[2 * TILE];           // of a token's k, of its q
shared float sums[2 * COLUMNS * PARTS];  // of S^T k, of S^T q

// Rows `row` to row + n - 1 of the step.
void take(uint row, uint n, uint head, uint key_head) {
    const uint i = gl_LocalInvocationIndex, width = 2 * key_heads * KEY_DIM + heads * value_dim;
    for (uint at = i; at < n * PADDED; at += 256) {
        const uint u = at / PADDED, d = at % PADDED;
        const uint from = (row + u) * width + key_head * KEY_DIM + d;
        queries[at] = d < KEY_DIM ? mixed[from] : 0.0;
        keys[at] = d < KEY_DIM ? mixed[from + key_heads * KEY_DIM] : 0.0;
        if (BY_CHANNEL == 1)
            decays[at] = d < KEY_DIM ? shrink(decay[((row + u) * heads + head) * KEY_DIM + d]) : 0.0;
    }
    if (i < n) {
        betas[i] = sigmoid(beta[(row + i) * heads + head]);
        if (BY_CHANNEL == 0) decays[i] = shrink(decay[(row + i) * heads + head]);
    }
    barrier();
    const uint u = i / (2 * LANES);
    if (u < n) {
        const bool of_query = i / LANES % 2 == 1;
        precise float sum = 0.0;
        for (uint d = i % LANES; d < KEY_DIM; d += LANES) {
            precise float square = of_query ? queries[u * PADDED + d] : keys[u * PADDED + d];
            square = square * square;
            sum = sum + square;
        }
        squares[i] = sum;
    }
    barrier();
    if (i < 2 * n) {
        precise float sum = squares[i * LANES];
        for (uint lane = 1; lane < LANES; ++lane) sum = sum + squares[i * LANES + lane];
        sum = sum + eps;
        sum = sqrt(sum);
        sum = (i % 2 == 1 ? scale : 1.0) / sum;
        scales[i] = sum;
    }
    barrier();
}

float total(uint begin) {
    precise float sum = sums[begin];
    for (uint part = 1; part < PARTS; ++part) sum = sum + sums[begin + part * COLUMNS];
    return sum;
}

void main() {
    const uint i = gl_LocalInvocationIndex, part = i / COLUMNS, head = gl_WorkGroupID.y;
    const uint column = gl_WorkGroupID.x * COLUMNS + i % COLUMNS;
    const uint key_head = TILED == 1 ? head % key_heads : head / (heads / key_heads);
    const uint width = 2 * key_heads * KEY_DIM + heads * value_dim;
    const Span span = span_of(gl_WorkGroupID.z, by_row == 1);
    if (span.count == 0) return;
    float s[ROWS];
    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
        const uint row = part * ROWS + r,
                   at = ((span.from * heads + head) * KEY_DIM + row) * value_dim + column;
        s[r] = span.from >= 0 && row < KEY_DIM && column < value_dim ? state[at] : 0.0;
    }
    for (uint t = 0; t < span.count; t += TILE) {
        const uint n = min(TILE, span.count - t);
        take(span.first + t, n, head, key_head);
        for (uint u = 0; u < n; ++u) {
            const uint row = span.first + t + u, value = 2 * key_heads * KEY_DIM + head * value_dim + column;
            const uint begin = u * PADDED + part * ROWS;
            precise float sum = 0.0;
            [[unroll]] for (uint r = 0; r < ROWS; ++r) {
                precise float left = s[r] * decays[BY_CHANNEL == 1 ? begin + r : u];
                s[r] = left;
                precise float product = left * keys[begin + r];
                sum = sum + product;
            }
            sums[i] = sum;
            barrier();
            precise float delta = total(i % COLUMNS) * scales[2 * u];
            delta = (column < value_dim ? mixed[row * width + value] : 0.0) - delta;
            delta = delta * betas[u];
            delta = delta * scales[2 * u];
            sum = 0.0;
            [[unroll]] for (uint r = 0; r < ROWS; ++r) {
                precise float product = keys[begin + r] * delta;
                precise float grown = s[r] + product;
                s[r] = grown;
                product = grown * queries[begin + r];
                sum = sum + product;
            }
            sums[COLUMNS * PARTS + i] = sum;
            const int to = slot_after(row);
            if (to >= 0 && column < value_dim) {
                [[unroll]] for (uint r = 0; r < ROWS; ++r) {
                    const uint own = part * ROWS + r,
                               at = ((to * heads + head) * KEY_DIM + own) * value_dim + column;
                    if (own < KEY_DIM) state[at] = s[r];
                }
            }
            barrier();
            if (part > 0 || column >= value_dim) continue;
            precise float given = total(COLUMNS * PARTS + i) * scales[2 * u + 1];
            y[(row * heads + head) * value_dim + column] = given;
        }
    }
}
