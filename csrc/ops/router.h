// The experts of a token and their factors, from the router's logits.
#pragma once
#include "ops/attention.h"

namespace hc {
namespace {

inline void router_scores(const Router& r, const float* logits, float* scores) {
    const F one = Vec::set1(1.0f);
    const int n = r.experts;
    if (!r.softmax) {
        for (int e = 0; e < n; e += Vec::width) {
            const int m = smaller(Vec::width, n - e);
            const F x = Vec::sub(Vec::zero(), Vec::load(logits + e, m));
            Vec::store(scores + e, Vec::div(one, Vec::add(one, exponential(x))), m);
        }
        return;
    }
    float end[2];
    for (int e = 0; e < n; ++e) scores[e] = logits[e];
    softmax_terms(scores, n, end);
    for (int e = 0; e < n; ++e) scores[e] /= end[1];
}

// NaN ranks below all numbers, as in top_k.
inline bool ranks_above(float a, float b) { return a > b || (b != b && a == a); }

// The r.chosen largest of `ranks`, ties by lower id; ids ascending.
inline void choose_experts(const Router& r, const float* ranks, int32_t* ids) {
    float best[kMaxChosen];  // descending, of ids[0, count)
    int count = 0;
    for (int32_t e = 0; e < r.experts; ++e) {
        if (count == r.chosen && !ranks_above(ranks[e], best[count - 1])) continue;
        int at = count < r.chosen ? count++ : count - 1;
        for (; at > 0 && ranks_above(ranks[e], best[at - 1]); --at) {
            best[at] = best[at - 1];
            ids[at] = ids[at - 1];
        }
        best[at] = ranks[e];
        ids[at] = e;
    }
    for (int i = 1; i < count; ++i) {
        const int32_t id = ids[i];
        int at = i;
        for (; at > 0 && ids[at - 1] > id; --at) ids[at] = ids[at - 1];
        ids[at] = id;
    }
}

// One token.
void router(const Router& r, const float* logits, int32_t* ids, float* factors) {
    float scores[kMaxExperts], ranks[kMaxExperts];
    router_scores(r, logits, scores);
    for (int e = 0; e < r.experts; ++e)
        ranks[e] = r.selection_bias ? scores[e] + r.selection_bias[e] : logits[e];
    choose_experts(r, ranks, ids);
    float sum = 0;
    for (int i = 0; i < r.chosen; ++i) sum += factors[i] = scores[ids[i]];
    if (!r.normalise) sum = 1;
    if (sum < kLeastScores) sum = kLeastScores;  // NaN stays NaN
    for (int i = 0; i < r.chosen; ++i) factors[i] = factors[i] / sum * r.scale;
}

}  // namespace
}  // namespace hc
