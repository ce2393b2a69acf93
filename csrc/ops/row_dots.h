// Dot products of rows with tokens, for each block type: out[t][r] (+)= row[r] . x[t] + bias[r]. Two files of
// kernels compile them (isa/block_dots.cpp, isa/other_dots.cpp), because they take long to compile.
#pragma once
#include "ops/linear_rows.h"
#include "ops/plain_tiles.h"
#include "ops/row_tiles.h"

namespace hc {
namespace {

// Dot products of `tiles` times R plain rows with T tokens, a slice of columns at a time. The tokens' slice
// stays in L1 for all the rows; the rows' sums are kept in memory. Sums in dot_plain's order. `cold` rows are
// not in L2: their slices are at most 1 KB, so that a core can keep all their lines in flight. With the rows'
// bytes it fetches a share of 1 / `turns` of the next rows.
constexpr int kTiles = 8;
template <class P, int R, int T> HC_NOINLINE void dot_slices(const uint8_t* const* rows, int tiles,
                                                             const Input& in, int t0, bool cold,
                                                             Coming& coming, int turns, float (*out)[R][T]) {
    constexpr int step = Vec::accumulators * Vec::width;
    const int64_t whole = in.cols / step * step, slice = (cold ? Vec::cold_steps(P::bytes) : 16) * step;
    PlainSums<R, T> sum[kTiles];
    for (int i = 0; i < tiles; ++i) clear<R, T>(sum[i]);
    for (int64_t at = 0; at < whole; at += slice)
        for (int i = 0; i < tiles; ++i) {
            const int64_t end = smaller(at + slice, whole), next = i + 1 < tiles ? at : at + slice;
            const uint8_t* const* after = rows + (i + 1) % tiles * R;
            const Ahead ahead{after, next * P::bytes, cold ? smaller(next + slice, whole) * P::bytes : 0};
            coming.fetch(R * (end - at) * P::bytes / turns);
            add_columns<P>(rows + i * R, in.x + t0 * in.stride, in.stride, at, end, sum[i], ahead);
        }
    for (int i = 0; i < tiles; ++i) finish_plain<P, R, T>(rows + i * R, in, t0, sum[i], out[i]);
}

inline void skip_rows(SomeRows& rows, Sink& sink, int64_t n) {
    if (rows.list) rows.list += n;
    rows.first += n;
    sink.out += n * sink.row_step;
}

// Rows of a quantised type that stay in L1 for several tiles of tokens, and bytes of tokens that stay there
// too.
constexpr int64_t kRowsInL1 = 16, kTokensInL1 = 16 << 10;

// Dot products of all rows with tokens [t, t1), a multiple of T; a separate function for each T, because
// registers are few. Tokens outside, rows inside: a piece's rows stay in L2 while a tile of tokens stays in
// L1, or some of its rows in L1 if all tokens do. Only the first tokens, from t0 on, read the rows from
// memory, along with the stream. For plain rows, all `turns` of tiles of tokens prefetch the next rows.
template <class B, int T> HC_NOINLINE void dots_with(const SomeRows& some, const Input& input, int t0, int t,
                                                     int t1, Stream& stream, Coming& coming, int turns,
                                                     const Sink& to) {
    // Copies that no store can change, so that their fields stay in registers.
    const SomeRows rows = some;
    const Input in = input;
    const Sink sink = to;
    constexpr int RT = T == 1 ? 1 : B::quantised ? Vec::row_tile : Vec::plain_rows;
    Stream idle;
    const auto tile = [&](auto row_count, auto token_count, int64_t r, int token) HC_INLINE_LAMBDA {
        constexpr int R = decltype(row_count)::value, K = decltype(token_count)::value;
        RowOf<B> w[R];
        for (int i = 0; i < R; ++i) w[i] = row_of<B>(rows.rows, rows.number(r + i));
        float d[R][K];
        dot_tile<B, R, K>(w, in, token, d, token == t0 ? stream : idle);
        for (int i = 0; i < R; ++i)
            for (int j = 0; j < K; ++j) sink.put(r + i, token - t0 + j, rows.number(r + i), d[i][j]);
    };
    if constexpr (B::quantised) {
        const bool stay = (t1 - t) * Input::token_bytes(in.cols) <= kTokensInL1;
        for (int64_t begin = 0, end; begin < rows.count; begin = end) {
            end = stay ? smaller(begin + kRowsInL1, rows.count) : rows.count;
            for (int at = t; at < t1; at += T) {
                int64_t r = begin;
                // A tile begins with all its rows at once: the stream must have reached the last of them.
                const int64_t lead = at == t0 ? (RT - 1) * row_bytes(rows.rows) : 0;
                fetch(stream, lead);
                if constexpr (takes_two<B>(T))
                    if (ends_in_half(in.cols))
                        for (; r + 2 <= end; r += 2) tile(Constant<2>{}, Constant<T>{}, r, at);
                for (; r + RT <= end; r += RT) tile(Constant<RT>{}, Constant<T>{}, r, at);
                fetch(stream, -lead);
                for (; r < end; ++r) tile(Constant<1>{}, Constant<T>{}, r, at);
            }
        }
    } else {
        for (; t < t1; t += T) {
            const bool cold = t == t0;
            int64_t r = 0;
            // One or two tokens alone are computed row by row, which keeps memory busier.
            while ((T > 2 || (T == 2 && !cold)) && r + RT <= rows.count) {
                const int tiles = int(smaller<int64_t>(kTiles, (rows.count - r) / RT));
                const uint8_t* w[kTiles * RT];
                for (int i = 0; i < tiles * RT; ++i) w[i] = rows.row(r + i);
                float d[kTiles][RT][T];
                dot_slices<B, RT, T>(w, tiles, in, t, cold, coming, turns, d);
                if (cold) pass(stream, tiles * RT * row_bytes(rows.rows));
                for (int i = 0; i < tiles * RT; ++i)
                    for (int j = 0; j < T; ++j)
                        sink.put(r + i, t - t0 + j, rows.number(r + i), d[i / RT][i % RT][j]);
                r += tiles * RT;
            }
            for (; r < rows.count; ++r) {
                for (int k = 0; k + 2 <= T; k += 2) tile(Constant<1>{}, Constant<2>{}, r, t + k);
                if constexpr (T % 2 == 1) tile(Constant<1>{}, Constant<1>{}, r, t + T - 1);
            }
        }
    }
}

// The same for many tokens: for all rows except the last ones, fewer than a tile. Returns the number of rows.
template <class B>
int64_t decoded_dots(const SomeRows& some, const Input& in, int t0, int t1, const Sink& sink) {
    const int64_t whole = some.count / kRowTile * kRowTile, known = some.known(kDecodedRows);
    for (int t = t0; t < t1; t += kMostDecoded)
        for (int64_t first = 0; first < whole; first += kDecodedRows) {
            const int count = int(smaller<int64_t>(kDecodedRows, whole - first));
            RowOf<B> rows[kDecodedRows];
            for (int r = 0; r < count; ++r) rows[r] = row_of<B>(some.rows, some.number(first + r));
            const int64_t next = first + count;
            const Coming coming{some, next, t == t0 ? smaller(next + kDecodedRows, known) : next};
            dots_decoded<B>(rows, count, in, t, smaller(kMostDecoded, t1 - t), coming,
                            [&](int r, int token, float dot) HC_INLINE_LAMBDA {
                                sink.put(first + r, t - t0 + token, some.number(first + r), dot);
                            });
        }
    return whole;
}

// The same for plain rows.
template <class P> int64_t arranged_dots(const SomeRows& some, const Input& in, int t0, int t1,
                                         const Sink& sink, uint8_t* local) {
    constexpr int R = Vec::plain_rows;
    const int64_t whole = some.count / R * R;
    for (int64_t first = 0; first < whole; first += kArrangedRows)
        dots_arranged<P>(some, first, int(smaller<int64_t>(kArrangedRows, whole - first)), in, t0, t1, local,
                         [&](int r, int token, float dot) HC_INLINE_LAMBDA {
                             sink.put(first + r, token - t0, some.number(first + r), dot);
                         });
    return whole;
}

// Tokens [t0, t1), any number. Prefetches `ahead` rows after these, if any.
template <class B> void few_dots(const SomeRows& rows, const Input& in, int t0, int t1, Stream& stream,
                                 const Sink& sink, int64_t ahead = 0) {
    // For opened types, several tokens leave only the rows here that are no whole tile.
    constexpr int TT = B::opened ? 1 : B::quantised ? Vec::token_tile : Vec::plain_tile;
    const int tiled = t0 + (t1 - t0) / TT * TT, left = t1 - tiled, turns = (t1 - t0 + TT - 1) / TT;
    Coming coming{rows, rows.count,
                  rows.known(turns > 1 ? ahead : 0)};  // a single turn waits for its own rows
    if (t0 < tiled) dots_with<B, TT>(rows, in, t0, t0, tiled, stream, coming, turns, sink);
    if constexpr (TT > 3)
        if (left == 3) return dots_with<B, 3>(rows, in, t0, tiled, t1, stream, coming, turns, sink);
    if constexpr (TT > 2)
        if (left == 2) return dots_with<B, 2>(rows, in, t0, tiled, t1, stream, coming, turns, sink);
    if (left) dots_with<B, 1>(rows, in, t0, tiled, t1, stream, coming, turns, sink);
}

// Long rows are read some at a time, which stay in L2 for all tokens. With a few tiles of tokens the rows
// leave space in L2 for their successors, which are prefetched. Rows of four bytes a column keep memory busy
// without that.
constexpr int64_t kFewBytes = 64 << 10;
constexpr int kFewTokens = 15;
template <class P>
void few_dots_of_plain(SomeRows rows, const Input& in, int t0, int t1, Stream& stream, Sink sink) {
    constexpr int R = Vec::plain_rows;
    const bool few = t1 - t0 > Vec::plain_tile && t1 - t0 <= kFewTokens;
    const int64_t all = rows.count,
                  fit = (few ? kFewBytes : kPlainPiece) / larger<int64_t>(row_bytes(rows.rows), 1);
    const int64_t most = larger<int64_t>(fit / R, 2) * R;
    for (int64_t first = 0; first < all; first += most) {
        rows.count = smaller(most, all - first);
        few_dots<P>(rows, in, t0, t1, stream, sink, few && P::bytes == 2 ? rows.count : 0);
        skip_rows(rows, sink, most);
    }
}

template <class B>
void dots_of(SomeRows rows, const Input& in, int t0, int t1, Stream& stream, Sink sink, uint8_t* local) {
    int64_t done = 0;
    if constexpr (B::quantised) {
        if (t1 - t0 >= least_decoded<B>(in.cols)) done = decoded_dots<B>(rows, in, t0, t1, sink);
    } else {
        if (in.arranged && local && t1 - t0 >= kLeastArranged)
            done = arranged_dots<B>(rows, in, t0, t1, sink, local);
    }
    if (done == rows.count) return;
    pass(stream, done * row_bytes(rows.rows));
    skip_rows(rows, sink, done);
    rows.count -= done;
    if constexpr (B::quantised)
        few_dots<B>(rows, in, t0, t1, stream, sink);
    else
        few_dots_of_plain<B>(rows, in, t0, t1, stream, sink);
}

}  // namespace
}  // namespace hc
