// Rows times tokens: out[t][r] (+)= row[r] . x[t] + bias[r].
#pragma once
#include "../block_dot.h"

namespace hc {
namespace {

constexpr int64_t kAhead = 8 << 10;  // bytes between what is fetched and what is used

inline int64_t row_bytes(const Rows& rows) { return row_bytes(rows.type, rows.cols); }

// Dots of rows[r] (list[r] where there is a list) with tokens [t0, t1) for r in [first, first + count).
// Tokens outside, rows inside: a piece's rows stay in L2 while a tile of tokens stays in L1, so only the
// first tile fetches ahead.
template <class B, class S, class Store> inline void dot_rows(const Rows& rows, const int32_t* list,
                                                              const Input& in, int64_t first, int64_t count,
                                                              int t0, int t1, S& ahead, Store&& store) {
    constexpr int RT = Vec::row_tile, TT = Vec::token_tile;
    const auto row = [&](int64_t r) { return rows.row(list ? list[r] : r); };
    NoStream none;
    int t = t0;
    for (; t + TT <= t1; t += TT) {
        int64_t r = first;
        for (; r + RT <= first + count; r += RT) {
            const uint8_t* w[RT];
            for (int i = 0; i < RT; ++i) w[i] = row(r + i);
            float d[RT][TT];
            if (t == t0)
                dot_tile<B, RT, TT>(w, in, t, d, ahead);
            else
                dot_tile<B, RT, TT>(w, in, t, d, none);
            for (int i = 0; i < RT; ++i)
                for (int j = 0; j < TT; ++j) store(r + i, t + j, d[i][j]);
        }
        for (; r < first + count; ++r) {
            const uint8_t* w[1] = {row(r)};
            float d[1][TT];
            dot_tile<B, 1, TT>(w, in, t, d, none);
            for (int j = 0; j < TT; ++j) store(r, t + j, d[0][j]);
        }
    }
    for (; t < t1; ++t)
        for (int64_t r = first; r < first + count; ++r) {
            const uint8_t* w[1] = {row(r)};
            float d[1][1];
            if (t == t0)
                dot_tile<B, 1, 1>(w, in, t, d, ahead);
            else
                dot_tile<B, 1, 1>(w, in, t, d, none);
            store(r, t, d[0][0]);
        }
}

// The stream of whole rows, already kAhead bytes ahead.
inline Stream stream_of(const Rows& rows, const int32_t* list, int64_t first, int64_t count) {
    Stream s(rows, list, first, count, row_bytes(rows));
    s.fetch(kAhead);
    return s;
}

void product(const Product& p, const Input& in, int64_t first, int64_t count, int t0, int t1) {
    Stream ahead = stream_of(p.rows, nullptr, first, count);
    with_type(p.rows.type, [&](auto type) {
        dot_rows<decltype(type)>(p.rows, nullptr, in, first, count, t0, t1, ahead,
                                 [&](int64_t r, int t, float d) {
                                     float* out = p.out + t * p.stride + r;
                                     const float v = p.bias ? d + p.bias[r] : d;
                                     *out = p.accumulate ? *out + v : v;
                                 });
    });
}

void predict(const Rows& rows, const Input& in, const float* threshold, int64_t word, int tokens,
             uint64_t* mask) {
    const int64_t words = (rows.count + 63) / 64, first = word * 64;
    const int64_t count = smaller<int64_t>(64, rows.count - first);
    for (int t = 0; t < tokens; ++t) mask[t * words + word] = 0;
    Stream ahead = stream_of(rows, nullptr, first, count);
    with_type(rows.type, [&](auto type) {
        dot_rows<decltype(type)>(rows, nullptr, in, first, count, 0, tokens, ahead,
                                 [&](int64_t r, int t, float score) {
                                     if (score >= threshold[r])
                                         mask[t * words + word] |= uint64_t(1) << (r - first);
                                 });
    });
}

}  // namespace
}  // namespace hc
