// Products of rows and tokens: out[t][r] (+)= row[r] . x[t] + bias[r].
#pragma once
#include <cstring>

#include "ops/linear_rows.h"
#include "ops/scratch.h"
#include "simd/block_types.h"
#include "simd/stream.h"
#ifdef HC_TILES
#include "ops/tile_dots.h"
#endif

namespace hc {

// Dot products of rows of types with blocks of 32 weights, and of other types. `local` is kDotScratch bytes;
// without it arranged tokens are not used.
void HC_OWN(block_dots)(const SomeRows&, const Input&, int t0, int t1, Stream&, const Sink&, uint8_t* local);
void HC_OWN(other_dots)(const SomeRows&, const Input&, int t0, int t1, Stream&, const Sink&, uint8_t* local);

namespace {

inline void dots(const Rows& rows, const int32_t* list, int64_t first, int64_t count, const Input& in, int t0,
                 int t1, Stream& stream, const Sink& sink, uint8_t* local = nullptr) {
#ifdef HC_TILES
    if (tile_dots({rows, list, first, count}, in, t0, t1, sink, local))
        return pass(stream, count * row_bytes(rows));
#endif
    const auto of_type = has_small_blocks(rows.type) ? HC_OWN(block_dots) : HC_OWN(other_dots);
    of_type({rows, list, first, count}, in, t0, t1, stream, sink, local);
}

// The stream of rows [first, first + count), already fetched as far ahead as suits the processor. It extends
// as far beyond them: the next rows are most likely the same thread's next piece.
inline Stream stream_of(const Rows& rows, int64_t first, int64_t count) {
    const int64_t bytes = row_bytes(rows), left = (rows.count - first) * bytes;
    Stream s(rows.stride == bytes ? Segment{rows.row(first), smaller(count * bytes + fetching.ahead, left)}
                                  : Segment{rows.row(first), bytes, rows.stride, count});
    fetch(s, fetching.ahead);
    return s;
}

// The same for decode rows with `where`. Reads a row if any of them wants it.
void wanted_product(const Product& p, const Input& in, int64_t first, int64_t count, int t0, int t1,
                    uint8_t* local) {
    int32_t list[kMaxPieceRows];
    // Without a constructor, which would be a weak symbol of this instruction set.
    alignas(Segment) uint8_t segments[kMaxPieceRows * sizeof(Segment)];
    Stream ahead((Segment*)segments);
    int64_t n = 0;
    for (int64_t r = first; r < first + count; ++r) {
        bool any = false;
        for (int t = t0; t < t1; ++t) any |= p.wanted(t, r);
        list[n] = int32_t(r);
        n += any;
    }
    for (int64_t i = 0; i < n; ++i) expect(ahead, p.rows.row(list[i]), row_bytes(p.rows));
    fetch(ahead, fetching.ahead);
    float* wanted_dots = (float*)local;
    uint8_t* rest =
        in.bf16 && p.rows.type == BF16 ? local + kWantedBytes : nullptr;  // only BF16 weights need it
    dots(p.rows, list, 0, n, in, t0, t1, ahead, {wanted_dots, 1, kMaxPieceRows, p.bias}, rest);
    for (int t = t0; t < t1; ++t, wanted_dots += kMaxPieceRows) {
        float* out = p.out + t * p.stride;
        std::memset(out + first, 0, size_t(count) * 4);
        for (int64_t i = 0; i < n; ++i)
            if (p.wanted(t, list[i])) out[list[i]] = wanted_dots[i];
    }
}

void product(const Product& p, const Input& in, int64_t first, int64_t count, int t0, int t1,
             uint8_t* local) {
    if (p.where) return wanted_product(p, in, first, count, t0, t1, local);
    Stream ahead = stream_of(p.rows, first, count);
    const Sink sink{p.out + t0 * p.stride + first, 1, p.stride, p.bias, p.accumulate};
    dots(p.rows, nullptr, first, count, in, t0, t1, ahead, sink, local);
}

// Words [word, end) of the masks.
void predict(const Rows& rows, const Input& in, const float* threshold, int64_t word, int64_t end, int tokens,
             const Masks& mask) {
    Stream ahead = stream_of(rows, word * 64, smaller(end * 64, rows.count) - word * 64);
    for (; word < end; ++word) {
        const int64_t first = word * 64, count = smaller<int64_t>(64, rows.count - first);
        float score[64 * kMaxDecodeRows];
        dots(rows, nullptr, first, count, in, 0, tokens, ahead, {score, 1, 64});
        for (int t = 0; t < tokens; ++t) {
            uint64_t bits = 0;
            for (int64_t r = 0; r < count; ++r)
                bits |= uint64_t(score[t * 64 + r] >= threshold[first + r]) << r;
            mask.row(t)[word] = bits;
        }
    }
}

}  // namespace
}  // namespace hc
