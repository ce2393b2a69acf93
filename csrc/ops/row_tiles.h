// Rows of a quantised type times many tokens: the codes of some rows are decoded once for all tokens, a group
// of columns at a time. The group stays in L1 for all tokens.
#pragma once
#include "ops/arguments.h"
#include "ops/linear_rows.h"
#ifdef HC_ISA_I8MM
#include "ops/decoded_pairs.h"
#else
#include "ops/decoded_vectors.h"
#endif

namespace hc {
namespace {

static_assert(kDecodedRows % kRowTile == 0 && kMostDecoded % kTokenTile == 0, "whole tiles");

// Bytes [from, to) of rows [next, end), which are read soon; brought into L2 a share at a time.
struct Coming {
    const SomeRows& rows;
    int64_t next, end, from = 0, to = row_bytes(rows.rows.type, rows.rows.cols), at = from;
    // Bytes to fetch in each of `steps` steps, in whole lines.
    int64_t share(int64_t steps) const {
        return next < end ? ((end - next) * (to - from) / larger<int64_t>(steps, 1) + 63) / 64 * 64 : 0;
    }
    HC_INLINE void fetch(int64_t share) {
        while (share > 0 && next < end) {
            const uint8_t* row = rows.row(next);
            const int64_t stop = smaller(at + share, to);
            share -= stop - at;
            for (; at < stop; at += 64) Vec::prefetch_l2(row + at);
            if (at < to) return;
            at = from;
            ++next;
        }
    }
};

// Minimum number of tokens for which decoding pays. It is least if products are fast and decoding is slow,
// and if rows are not faster two at a time.
template <class B> HC_INLINE int least_decoded(int64_t cols) {
    if (takes_two<B>(kTokenTile) && ends_in_half(cols)) return 16;
    return B::opened ? 2 : B::code_bits <= 4 ? 8 : B::parts == 4 ? 12 : 16;
}

// Calls put(row, token, dot) for `count` rows, some tiles of them, at most kDecodedRows, and at most
// kMostDecoded tokens from t0 on.
template <class B, class Put> HC_NOINLINE void dots_decoded(const RowOf<B>* rows, int count, const Input& in,
                                                            int t0, int tokens, Coming coming, Put&& put) {
    const int64_t blocks = in.cols / kBlock;
    const int64_t steps = (blocks + kLanes - 1) / kLanes * larger(tokens / kTokenTile, 1);
    const int64_t share = coming.share(steps);
    DecodedRows<B> decoded;
    DecodedSums<B> sums;
    sums.clear(tokens);
    for (int64_t block = 0; block < blocks; block += kLanes) {
        decoded.decode(rows, count, blocks, block);
        const int vectors = int(smaller<int64_t>(kLanes, blocks - block) + Vec::width - 1) / Vec::width;
        for (int t = 0; t < tokens; t += kTokenTile) {
            const int n = smaller(kTokenTile, tokens - t);
            if (n == kTokenTile) coming.fetch(share);
            sums.add(decoded, count / kRowTile, in, t0, t, n, block, vectors);
        }
    }
    sums.put(count, tokens, put);
}

}  // namespace
}  // namespace hc
