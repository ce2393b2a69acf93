// Rows times tokens: out[t][r] (+)= row[r] . x[t] + bias[r].
#pragma once
#include "../block_dot.h"

namespace hc {
namespace {

inline void prefetch_bytes(const uint8_t* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) Vec::prefetch(p + i);
}

inline int64_t row_bytes(const Rows& rows) {
    switch (rows.type) {
        case F32: return rows.cols * 4;
        case F16:
        case BF16: return rows.cols * 2;
        case Q8_0: return rows.cols / kBlock * 34;
        case Q4_0: return rows.cols / kBlock * 18;
    }
    return 0;
}

// Tokens outside, rows inside: a piece's rows stay in L2 while a tile of tokens stays in L1. `store(row,
// token, dot)`.
template <class B, class Store> inline void dot_rows(const Rows& rows, const Input& in, int64_t first,
                                                     int64_t count, int t0, int t1, Store&& store) {
    constexpr int RT = Vec::row_tile, TT = Vec::token_tile;
    int t = t0;
    for (; t + TT <= t1; t += TT) {
        int64_t r = first;
        for (; r + RT <= first + count; r += RT) {
            const uint8_t* w[RT];
            for (int i = 0; i < RT; ++i) w[i] = rows.row(r + i);
            float d[RT][TT];
            dot_tile<B, RT, TT>(w, in, t, d);
            for (int i = 0; i < RT; ++i)
                for (int j = 0; j < TT; ++j) store(r + i, t + j, d[i][j]);
        }
        for (; r < first + count; ++r) {
            const uint8_t* w[1] = {rows.row(r)};
            float d[1][TT];
            dot_tile<B, 1, TT>(w, in, t, d);
            for (int j = 0; j < TT; ++j) store(r, t + j, d[0][j]);
        }
    }
    for (; t < t1; ++t)
        for (int64_t r = first; r < first + count; ++r) {
            const uint8_t* w[1] = {rows.row(r)};
            float d[1][1];
            dot_tile<B, 1, 1>(w, in, t, d);
            store(r, t, d[0][0]);
        }
}

void product(const Product& p, const Input& in, int64_t first, int64_t count, int t0, int t1) {
    with_type(p.rows.type, [&](auto type) {
        dot_rows<decltype(type)>(p.rows, in, first, count, t0, t1, [&](int64_t r, int t, float d) {
            float* out = p.out + t * p.stride + r;
            const float v = p.bias ? d + p.bias[r] : d;
            *out = p.accumulate ? *out + v : v;
        });
    });
}

// out[k * tokens + t] = rows[list[k]] . x[t]: rows named by a list, each fetched four rows ahead of its use.
template <class B> inline void dot_list(const Rows& rows, const Input& in, const int32_t* list, int64_t count,
                                        int tokens, float* out) {
    const int64_t bytes = row_bytes(rows);
    for (int64_t k = 0; k < count; ++k) {
        if (k + 4 < count) prefetch_bytes(rows.row(list[k + 4]), bytes);
        dot_rows<B>(rows, in, list[k], 1, 0, tokens,
                    [&](int64_t, int t, float d) { out[k * tokens + t] = d; });
    }
}

void predict(const Rows& rows, const Input& in, const float* threshold, int64_t word, int tokens,
             uint64_t* mask) {
    const int64_t words = (rows.count + 63) / 64, first = word * 64;
    const int64_t count = smaller<int64_t>(64, rows.count - first);
    for (int t = 0; t < tokens; ++t) mask[t * words + word] = 0;
    with_type(rows.type, [&](auto type) {
        dot_rows<decltype(type)>(rows, in, first, count, 0, tokens, [&](int64_t r, int t, float score) {
            if (score >= threshold[r]) mask[t * words + word] |= uint64_t(1) << (r - first);
        });
    });
}

}  // namespace
}  // namespace hc
