// Adds each row's sums of leaves of its experts in the tree; then biases, factors, and the output.
//
// A workgroup has 32 outputs of a row. An invocation adds up to 8 neighbouring sums of a choice, so that many
// are read at a time; one per output then adds these results.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "ffn.glsl"
layout(local_size_x = 32, local_size_y = 8) in;
layout(constant_id = 2) const bool FACTORS = false;
layout(constant_id = 3) const bool ACCUMULATE = false;
layout(std430, binding = 3) readonly buffer IdBuffer { int ids[]; };
layout(std430, binding = 4) readonly buffer FactorBuffer { float factors[]; };
layout(std430, binding = 5) readonly buffer PartialBuffer { float partial[]; };
layout(std430, binding = 6) buffer OutBuffer { float outs[]; };

const uint OUTPUTS = 32, NEIGHBOURS = 8;
const uint MOST_SHARES = 64 / NEIGHBOURS + 32;  // of k choices, with 64 / k leaves each, rounded up

shared float shares[MOST_SHARES * OUTPUTS];

Expert expert_of_choice(uint row, uint c) {
    return expert_of(EXPERTS ? min(uint(ids[row * chosen + c]), experts - 1) : 0);
}
uint sums_of(Expert e) { return e.end > e.begin ? (leaves_of(e) + together - 1) / together : 0; }

// Neighbours are added, then neighbouring pairs, and so on; a last one without a neighbour moves up.
float neighbours_sum(uint at, uint count) {
    float sums[NEIGHBOURS];
    [[unroll]] for (uint i = 0; i < NEIGHBOURS; ++i) sums[i] = i < count ? partial[at + i * dim] : 0;
    [[unroll]] for (uint step = 1; step < NEIGHBOURS; step *= 2) {
        [[unroll]] for (uint i = 0; i + step < NEIGHBOURS; i += 2 * step) {
            precise const float sum = sums[i] + sums[i + step];
            if (i + step < count) sums[i] = sum;
        }
    }
    return sums[0];
}

void main() {
    const uint row = gl_WorkGroupID.y, own = gl_LocalInvocationID.x, d = gl_GlobalInvocationID.x;
    if (row >= count_of_rows()) return;
    const uint at = begin_of_rows() + row, each = (room + NEIGHBOURS - 1) / NEIGHBOURS;  // shares of a choice
    for (uint i = gl_LocalInvocationID.y; i < chosen * each && d < dim; i += gl_WorkGroupSize.y) {
        const uint c = i / each, first_sum = i % each * NEIGHBOURS, count = sums_of(expert_of_choice(at, c));
        if (first_sum >= count) continue;
        const uint from = ((row * chosen + c) * room + first_sum) * dim + d;
        shares[i * OUTPUTS + own] = neighbours_sum(from, count - first_sum);
    }
    barrier();
    if (gl_LocalInvocationID.y > 0 || d >= dim) return;
    precise float y = 0;
    for (uint c = 0; c < chosen; ++c) {
        const Expert e = expert_of_choice(at, c);
        const uint count = (sums_of(e) + NEIGHBOURS - 1) / NEIGHBOURS, first_share = c * each;
        for (uint step = 1; step < count; step *= 2) {
            for (uint i = 0; i + step < count; i += 2 * step) {
                const uint to = (first_share + i) * OUTPUTS + own;
                precise const float pair = shares[to] + shares[to + step * OUTPUTS];
                shares[to] = pair;
            }
        }
        precise float sum = count > 0 ? shares[first_share * OUTPUTS + own] : 0;
        if (down_bias != 0) {
            const uint id = EXPERTS ? min(uint(ids[at * chosen + c]), experts - 1) : 0;
            sum = sum + table_float(down_bias + id * dim + d);
        }
        if (FACTORS) {
            sum = factors[at * chosen + c] * sum;
            sum = y + sum;
        }
        y = sum;
    }
    if (ACCUMULATE) y = outs[at * dim + d] + y;
    outs[at * dim + d] = y;
}
