// The experts of a row and their factors, from the router's logits [row, EXPERTS]; a workgroup per row.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "activation.glsl"
#include "batch.glsl"
#include "tree.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 0) const uint EXPERTS = 1;
layout(constant_id = 1) const uint CHOSEN = 1;
layout(constant_id = 2) const uint SOFTMAX = 0;
layout(constant_id = 3) const uint SELECTION_BIAS = 0;
layout(constant_id = 4) const uint NORMALISE = 0;
layout(constant_id = 5) const uint EXPERT_SCALE = 0;
layout(constant_id = 6) const uint GROUPS = 1;  // of neighbouring experts; USED are used
layout(constant_id = 7) const uint USED = 1;
layout(constant_id = 8) const uint BEST = 1;  // experts of a group, 1 or 2, whose sum ranks it
layout(std430, binding = 1) readonly buffer Logits { float logits[]; };
layout(std430, binding = 2) readonly buffer SelectionBias { float selection_bias[]; };
layout(std430, binding = 3) readonly buffer ExpertScale { float expert_scale[]; };
layout(std430, binding = 4) writeonly buffer Ids { uint ids[]; };
layout(std430, binding = 5) writeonly buffer Factors { float factors[]; };
layout(push_constant) uniform Push { float scale; };

const float LEAST_SCORES = 1e-20;  // csrc/ops/arguments.h kLeastScores

shared float scores[EXPERTS];
shared uint ranks[EXPERTS];
shared uint best[CHOSEN];
shared uint group_ranks[GROUPS];
shared float total;

// Integers with the order of floats, NaN last. None is -0: sums begin with +0.
uint rank_of(float x) {
    const uint bits = floatBitsToUint(x), magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0u;
    return bits == magnitude ? bits | 0x80000000u : ~bits;
}

void write_scores(uint begin) {
    const uint first = gl_LocalInvocationIndex;
    if (SOFTMAX == 0) {
        for (uint e = first; e < EXPERTS; e += 256) scores[e] = sigmoid(logits[begin + e]);
        barrier();
        return;
    }
    float most = uintBitsToFloat(0xff800000u);
    for (uint e = first; e < EXPERTS; e += 256) most = logits[begin + e] > most ? logits[begin + e] : most;
    most = group_max(most);
    for (uint e = first; e < EXPERTS; e += 256) {
        precise float above = logits[begin + e] - most;
        scores[e] = exponential(above);
    }
    barrier();
    if (first == 0) {
        precise float sum = 0.0;
        for (uint e = 0; e < EXPERTS; ++e) sum = sum + scores[e];
        total = sum;
    }
    barrier();
    for (uint e = first; e < EXPERTS; e += 256) {
        precise float score = scores[e] / total;
        scores[e] = score;
    }
    barrier();
}

float rank_value(uint e) {
    precise float rank = scores[e];
    if (SELECTION_BIAS == 1) rank = rank + selection_bias[e];
    return rank;
}

// Ranks experts of unused groups as NaN; groups rank as experts do.
void leave_groups_out() {
    const uint first = gl_LocalInvocationIndex, size = EXPERTS / GROUPS;
    for (uint g = first; g < GROUPS; g += 256) {
        float largest = rank_value(g * size), second = 0.0;
        for (uint k = 1; k < size; ++k) {
            const float value = rank_value(g * size + k);
            const bool above = rank_of(value) > rank_of(largest);
            if (k == 1 || above || rank_of(value) > rank_of(second)) second = above ? largest : value;
            if (above) largest = value;
        }
        precise float sum = largest + second;
        group_ranks[g] = rank_of(BEST == 2 && size > 1 ? sum : largest);
    }
    barrier();
    for (uint e = first; e < EXPERTS; e += 256) {
        const uint g = e / size;
        uint above = 0;
        for (uint other = 0; other < GROUPS; ++other)
            if (group_ranks[other] > group_ranks[g] || group_ranks[other] == group_ranks[g] && other < g) ++above;
        if (above >= USED) ranks[e] = 0;
    }
    barrier();
}

// Sets ranks to 1 for the chosen experts (fewer than CHOSEN others rank above, ties by lower id), else to 0.
void choose(uint begin) {
    const uint first = gl_LocalInvocationIndex;
    for (uint e = first; e < EXPERTS; e += 256) {
        const bool by_scores = SELECTION_BIAS == 1 || USED < GROUPS;
        ranks[e] = rank_of(by_scores ? rank_value(e) : logits[begin + e]);
    }
    barrier();
    if (USED < GROUPS) leave_groups_out();
    uint chosen = 0;  // a bit for each of this invocation's experts
    for (uint e = first; e < EXPERTS; e += 256) {
        uint above = 0;
        for (uint other = 0; other < EXPERTS; ++other)
            if (ranks[other] > ranks[e] || ranks[other] == ranks[e] && other < e) ++above;
        if (above < CHOSEN) chosen |= 1u << e / 256;
    }
    barrier();
    for (uint e = first; e < EXPERTS; e += 256) ranks[e] = chosen >> e / 256 & 1u;
    barrier();
}

void main() {
    const uint row = gl_WorkGroupID.x, first = gl_LocalInvocationIndex;
    if (row >= N_TOKENS) return;
    write_scores(row * EXPERTS);
    choose(row * EXPERTS);
    for (uint e = first; e < EXPERTS; e += 256) {
        if (ranks[e] == 0u) continue;
        uint lower = 0;
        for (uint other = 0; other < e; ++other) lower += ranks[other];
        best[lower] = e;
    }
    barrier();
    precise float sum = NORMALISE == 1 ? 0.0 : 1.0;
    for (uint i = 0; i < CHOSEN && NORMALISE == 1; ++i) sum = sum + scores[best[i]];
    if (sum < LEAST_SCORES) sum = LEAST_SCORES;  // NaN stays NaN
    for (uint i = first; i < CHOSEN; i += 256) {
        precise float factor = scores[best[i]] / sum;
        factor = factor * scale;
        if (EXPERT_SCALE == 1) factor = factor * expert_scale[best[i]];
        ids[row * CHOSEN + i] = best[i];
        factors[row * CHOSEN + i] = factor;
    }
}
