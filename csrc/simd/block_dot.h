// Dot products and sums of packed rows, for every block type.
#pragma once
#include "simd/open_groups.h"

namespace hc {
namespace {

// Calls fn(lanes, l, n) for the vectors of a group of fewer than kLanes blocks: lanes [l, l + n). `Short`
// rows have no other group, so full vectors are worth a separate copy of the code.
template <bool Short, class Fn> HC_INLINE void for_last_lanes(int lanes, Fn&& fn) {
    int l = 0;
    if constexpr (Short && Vec::width < kLanes)
        for (; l + Vec::width <= lanes; l += Vec::width) fn(lanes, l, Vec::width);
    for (; l < lanes; l += Vec::width) fn(lanes, l, smaller(Vec::width, lanes - l));
}

// Calls fn(lanes, l, n) for the vectors of the group that starts at `block`. Full groups get constants.
template <class Fn> HC_INLINE void for_lanes(int64_t blocks, int64_t block, Fn&& fn) {
    if (blocks - block < kLanes) return for_last_lanes<false>(int(blocks - block), fn);
    for (int l = 0; l < kLanes; l += Vec::width) fn(kLanes, l, Vec::width);
}

// Calls fn(block, lanes, l, n) for all groups of a row. Full groups have a separate loop, in which nothing
// depends on their number.
template <bool Short = false, class Fn> HC_INLINE void for_groups(int64_t blocks, Fn&& fn) {
    int64_t block = 0;
    for (; block + kLanes <= blocks; block += kLanes)
        for (int l = 0; l < kLanes; l += Vec::width) fn(block, kLanes, l, Vec::width);
    if (block < blocks)
        for_last_lanes<Short>(int(blocks - block),
                              [&](int lanes, int l, int n) HC_INLINE_LAMBDA { fn(block, lanes, l, n); });
}

// How a dot product reads its input: a vector of lanes, or half a vector twice if a vector holds two rows.
struct EachLane {
    static HC_INLINE F load(const float* p) { return Vec::load(p); }
    static HC_INLINE I load_i(const void* p) { return Vec::load_i(p); }
};
template <class V> struct HalfTwice {
    static HC_INLINE F load(const float* p) { return V::load_twice(p); }
    static HC_INLINE I load_i(const void* p) { return V::load_twice_i(p); }
};

// log2 of a power of two.
constexpr int log2_of(int n) { return n > 1 ? 1 + log2_of(n / 2) : 0; }

// s + the minima times the sums of x of their blocks.
template <class B, class X = EachLane>
HC_INLINE F add_minima(F s, const Head& head, F dx, const Input& in, int t, int64_t at) {
    const I total = X::load_i(in.sums(t) + at);
    if constexpr (!B::halves) return Vec::fma(head.minimum, Vec::mul(dx, Vec::to_float(total)), s);
    const I low = X::load_i(in.low_sums(t) + at);
    s = Vec::fma(head.minimum, Vec::mul(dx, Vec::to_float(low)), s);
    return Vec::fma(head.high_minimum, Vec::mul(dx, Vec::to_float(Vec::sub_i(total, low))), s);
}

// Start value of a dot product with biased codes: minus the offset times the sum of x.
template <class B, class X = EachLane> HC_INLINE I start_of(const Input& in, int t, int64_t at, bool high) {
    constexpr int offset = B::signed_codes ? Vec::signed_offset : B::offset;
    if constexpr (offset == 0) return Vec::zero_i();
    I sum = X::load_i(in.sums(t) + at);
    if constexpr (B::halves) {
        const I low = X::load_i(in.low_sums(t) + at);
        sum = high ? Vec::sub_i(sum, low) : low;
    }
    return Vec::sub_i(Vec::zero_i(), Vec::template shl<log2_of(offset)>(sum));
}

// acc + four byte products in each lane of M words of codes; the words of x are a group's words apart.
template <bool Signed, class X = EachLane, int M>
HC_INLINE I dot_words(I acc, const I (&w)[M], const int8_t* x) {
    auto sum = Vec::dot_begin(acc);
    for (int i = 0; i < M; ++i)
        sum = Vec::template dot_add<Signed>(sum, Vec::template dot_code<Signed>(w[i]),
                                            X::load_i(x + i * 4 * kLanes));
    return Vec::dot_end(acc, sum);
}

// One group of R rows and T tokens, which starts at `block`: lanes [l, l + n).
template <class B, int R, int T, class X = EachLane, class G>
HC_INLINE void dot_group(const G (&group)[R], const Input& in, int t0, int64_t block, int l, int n,
                         F (&sum)[R][T]) {
    constexpr int H = B::halves ? 2 : 1, M = smaller(Vec::words_at_once(B::code_bits), B::parts);
    I acc[R][T][H], unit[R][B::units];
    for (int t = 0; t < T; ++t)
        for (int h = 0; h < H; ++h) {
            const I start = start_of<B, X>(in, t0 + t, block + l, h == 1);
            for (int r = 0; r < R; ++r) acc[r][t][h] = start;
        }
    for (int r = 0; r < R; ++r) group[r].load(l, n, unit[r]);
    unroll<0, B::parts / M * B::words_per_part>([&](auto k) HC_INLINE_LAMBDA {
        constexpr int W = decltype(k)::value / (B::parts / M),
                      first = decltype(k)::value % (B::parts / M) * M;
        I codes[R][M];
        unroll<0, M>([&](auto m) HC_INLINE_LAMBDA {
            for (int r = 0; r < R; ++r)
                codes[r][decltype(m)::value] = B::template word<first + decltype(m)::value, W>(unit[r]);
        });
        for (int t = 0; t < T; ++t) {
            const int8_t* x = in.codes(t0 + t) + block * kBlock + (first + W * B::parts) * 4 * kLanes + 4 * l;
            for (int r = 0; r < R; ++r) {
                I& a = acc[r][t][W * (H - 1)];
                a = dot_words<B::signed_codes, X>(a, codes[r], x);
            }
        }
    });
    for (int r = 0; r < R; ++r) {
        const Head head = group[r].head(l, n);
        for (int t = 0; t < T; ++t) {
            const F dx = X::load(in.scales(t0 + t) + block + l);
            F& s = sum[r][t];
            s = Vec::fma(Vec::to_float(acc[r][t][0]), Vec::mul(head.scale, dx), s);
            if constexpr (B::halves)
                s = Vec::fma(Vec::to_float(acc[r][t][1]), Vec::mul(head.high_scale, dx), s);
            if constexpr (B::has_minimum)
                if (group[r].has_minimum()) s = add_minima<B, X>(s, head, dx, in, t0 + t, block + l);
        }
    }
}

// Dot products of R rows with T tokens. Each (row, token) sums its blocks in one fixed order, for all R and
// T.
template <class B, int R, int T> HC_INLINE void dot_quantised(const RowOf<B>* rows, const Input& in, int t0,
                                                              float (&out)[R][T], Stream& stream) {
    F sum[R][T];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) sum[r][t] = Vec::zero();
    const int64_t blocks = in.cols / kBlock;
    GroupScratch<B, R> scratch;
    for_groups<true>(blocks, [&](int64_t block, int lanes, int l, int n) HC_INLINE_LAMBDA {
        Group<B> group[R];
        for (int r = 0; r < R; ++r) group[r] = group_of<B>(rows[r], blocks, block, lanes, l, scratch, r);
        dot_group<B, R, T>(group, in, t0, block, l, n, sum);
        if (l + n == lanes) fetch(stream, R * bytes_of<B>(rows[0], lanes));
    });
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) out[r][t] = Vec::sum(sum[r][t]);
}

// True if rows are taken two at a time when their last blocks fill at most half a vector: this saves half of
// those vectors and of the lane sums. Only for some types. T: one token or a whole tile. Q5_1 and MXFP4,
// which no small model uses, would add 4 KB of code each and more.
template <class B> constexpr bool takes_two(int T) {
    if (T != 1 && T != Vec::token_tile) return false;
    if constexpr (std::is_same_v<B, BlockQ5_1> || std::is_same_v<B, BlockMXFP4>)
        return false;
    else if constexpr (B::quantised)
        return Vec::loads_first && !B::opened && !B::super && !B::halves;
    else
        return false;
}
HC_INLINE bool ends_in_half(int64_t cols) {
    const int64_t last = cols / kBlock % Vec::width;
    return last > 0 && 2 * last <= Vec::width;
}

// The dot products of two such rows with T tokens: the same bits as of one row.
template <class B, class V, int T>
HC_INLINE void dot_two(const RowOf<B>* rows, const Input& in, int t0, float (&out)[2][T], Stream& stream) {
    const int64_t blocks = in.cols / kBlock, last = blocks / kLanes * kLanes;
    const int lanes = int(blocks - last), l = lanes / V::width * V::width;
    F sum[2][T];
    for (int r = 0; r < 2; ++r) {
        F own[1][T];
        for (F& s : own[0]) s = V::zero();
        // One copy of the code for all vectors, because it is long.
        for (int64_t full = 0; full + V::width <= blocks; full += V::width) {
            const int64_t block = full / kLanes * kLanes;
            const int of = int(smaller<int64_t>(kLanes, blocks - block)), at = int(full - block);
            const Group<B> group[1] = {{rows[r], blocks, block, of}};
            dot_group<B, 1, T>(group, in, t0, block, at, V::width, own);
            if (at + V::width == of) fetch(stream, bytes_of<B>(rows[r], of));
        }
        for (int t = 0; t < T; ++t) sum[r][t] = own[0][t];
    }
    const GroupOfTwo<B, V> group[1] = {{{rows[0], blocks, last, lanes}, {rows[1], blocks, last, lanes}}};
    F low[1][T];
    for (int t = 0; t < T; ++t) low[0][t] = V::low_halves(sum[0][t], sum[1][t]);
    dot_group<B, 1, T, HalfTwice<V>>(group, in, t0, last, l, lanes - l, low);
    for (int t = 0; t < T; ++t) {
        // One row's last vector adds 0 to the high lanes.
        const F high = V::add(V::high_halves(sum[0][t], sum[1][t]), V::zero());
        V::sum_halves(low[0][t], high, out[0][t], out[1][t]);
    }
    fetch(stream, 2 * bytes_of<B>(rows[0], lanes));
}

// Bytes [begin, end) of each of some rows, which are read next.
struct Ahead {
    const uint8_t* const* rows;
    int64_t begin, end;
};

// Products of columns [i, end) of R rows and T tokens, a multiple of `step`. sum[a] gets every A-th vector
// from the a-th on, in order. With several rows, one a after another, so that a tile of sums fits in
// registers; the columns are few enough to stay in L1. Prefetches `ahead` meanwhile.
template <class P, int R, int T>
HC_INLINE void add_columns(const uint8_t* const* rows, const float* x, int64_t stride, int64_t i, int64_t end,
                           F (&sum)[Vec::accumulators][R][T], const Ahead& ahead = {nullptr, 0, 0}) {
    constexpr int A = Vec::accumulators, step = A * Vec::width;
    const auto add = [&](int64_t at, F(&s)[R][T]) HC_INLINE_LAMBDA {
        F w[R];
        for (int r = 0; r < R; ++r) w[r] = P::load(rows[r], at);
        for (int t = 0; t < T; ++t) {
            const F v = Vec::load(x + t * stride + at);
            for (int r = 0; r < R; ++r) s[r][t] = Vec::fma(w[r], v, s[r][t]);
        }
    };
    if constexpr (R == 1) {
        for (; i < end; i += step)
            for (int a = 0; a < A; ++a) add(i + a * Vec::width, sum[a]);
        return;
    }
    for (int a = 0; a < A; ++a) {
        for (int64_t b = ahead.begin + 64 * a; b < ahead.end; b += 64 * A)
            for (int r = 0; r < R; ++r) Vec::prefetch(ahead.rows[r] + b);
        F own[R][T];
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) own[r][t] = sum[a][r][t];
        for (int64_t at = i + a * Vec::width; at < end; at += step) add(at, own);
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) sum[a][r][t] = own[r][t];
    }
}

// clear(): a tile of sums before any column. finish_plain(): the columns after the last whole step, and the
// dot products.
template <int R, int T> using PlainSums = F[Vec::accumulators][R][T];
template <int R, int T> HC_INLINE void clear(PlainSums<R, T>& sum) {
    for (auto& part : sum)
        for (auto& of_row : part)
            for (F& each : of_row) each = Vec::zero();
}
template <class P, int R, int T> HC_INLINE void finish_plain(const uint8_t* const* rows, const Input& in,
                                                             int t0, PlainSums<R, T>& sum,
                                                             float (&out)[R][T]) {
    constexpr int A = Vec::accumulators, step = A * Vec::width;
    const float* x = in.x + t0 * in.stride;
    for (int64_t i = in.cols / step * step; i < in.cols; i += Vec::width) {
        const int n = int(smaller<int64_t>(Vec::width, in.cols - i));
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t)
                sum[0][r][t] =
                    Vec::fma(P::load(rows[r], i, n), Vec::load(x + t * in.stride + i, n), sum[0][r][t]);
    }
    for (int r = 0; r < R; ++r) {
        F total[T];
        for (int t = 0; t < T; ++t) {
            total[t] = sum[0][r][t];
            for (int a = 1; a < A; ++a) total[t] = Vec::add(total[t], sum[a][r][t]);
        }
        if constexpr (T == 4)
            Vec::sum4(total, out[r]);
        else
            for (int t = 0; t < T; ++t) out[r][t] = Vec::sum(total[t]);
    }
}

// Dot products of one plain row with T tokens, with the sums in registers: at most two tokens.
template <class P, int T>
inline void dot_plain(const uint8_t* row, const Input& in, int t0, float (&out)[1][T], Stream& stream) {
    constexpr int step = Vec::accumulators * Vec::width, together = 2 * step;
    PlainSums<1, T> sum;
    clear<1, T>(sum);
    const float* x = in.x + t0 * in.stride;
    int64_t i = 0;
    for (; i + together <= in.cols; i += together) {
        add_columns<P>(&row, x, in.stride, i, i + together, sum);
        fetch(stream, together * P::bytes);
    }
    const int64_t whole = in.cols / step * step;
    add_columns<P>(&row, x, in.stride, i, whole, sum);
    fetch(stream, (whole - i) * P::bytes);
    finish_plain<P, 1, T>(&row, in, t0, sum, out);
}

// The same for either kind of type; plain rows come one by one.
template <class B, int R, int T>
HC_INLINE void dot_tile(const RowOf<B>* rows, const Input& in, int t0, float (&out)[R][T], Stream& stream) {
    if constexpr (B::opened && R == 1 && T == 1)
        if (rows->opening->dot && rows->factor == 1)
            return rows->opening->dot(rows->at, in, t0, out[0][0], stream);
    if constexpr (R == 2 && takes_two<B>(T))
        dot_two<B, Vec, T>(rows, in, t0, out, stream);
    else if constexpr (B::quantised)
        dot_quantised<B, R, T>(rows, in, t0, out, stream);
    else
        dot_plain<B, T>(rows[0], in, t0, out, stream);
}

// True if a weight is one code times one scale, so that scale and coefficient can be multiplied first.
template <class B> constexpr bool one_scale = !B::halves && !B::has_minimum;

// True if sums of rows also need the sums of their factors.
template <class B> constexpr bool sums_factors() {
    if constexpr (B::quantised)
        return one_scale<B> && B::offset > 0;
    else
        return false;
}

// The code of one element, biased by its offset or corrected (PutRight).
template <class B, int P, int W, int Byte, bool PutRight> HC_INLINE F code(const I* unit) {
    constexpr int times = B::template times<W, Byte>();
    const F value = B::template value<P, W, Byte>(unit);
    if constexpr (PutRight && B::offset > 0)
        return Vec::fma(value, Vec::set1(1.0f / times), Vec::set1(-B::offset));
    return times == 1 ? value : Vec::mul(value, Vec::set1(1.0f / times));
}

// The weight of one element: its code times the scale, plus the minimum.
template <class B, int P, int W, int Byte> HC_INLINE F weight(const I* unit, const Head& head) {
    const F value = code<B, P, W, Byte, true>(unit), scale = B::halves && W ? head.high_scale : head.scale;
    if constexpr (!B::has_minimum) return Vec::mul(value, scale);
    return Vec::add(Vec::mul(value, scale), B::halves && W ? head.high_minimum : head.minimum);
}

// y += c[0] w[0] + ... + c[K-1] w[K-1], added in this order. For quantised types y is in packed order:
// element e of the block in lane l of group g is y[g * kSums + e * kLanes + l], so y holds whole groups. For
// biased codes, element kBlock accumulates the factors.
template <class B, int K>
inline void axpy_quantised(const RowOf<B>* rows, const float* c, int64_t cols, float* y, Stream& stream) {
    constexpr int words = B::words_per_part;
    const int64_t blocks = cols / kBlock;
    GroupScratch<B, K> scratch;
    for_groups(blocks, [&](int64_t block, int lanes, int l, int n) HC_INLINE_LAMBDA {
        F factor[K];
        Head head[K];
        I unit[K][B::units];
        Group<B> from[K];
        const auto load = [&](auto u) HC_INLINE_LAMBDA {
            constexpr int U = decltype(u)::value;
            for (int k = 0; k < K; ++k) unit[k][U] = from[k].unit(U, l, n);
        };
        for (int k = 0; k < K; ++k) {
            from[k] = group_of<B>(rows[k], blocks, block, lanes, l, scratch, k);
            head[k] = from[k].head(l, n);
            factor[k] = one_scale<B> ? Vec::mul(head[k].scale, Vec::set1(c[k])) : Vec::set1(c[k]);
        }
        unroll<B::parts, B::units>(load);
        float* group = y + block / kLanes * kSums + l;
        if constexpr (sums_factors<B>()) {
            F sum = Vec::load(group + kGroup);
            for (int k = 0; k < K; ++k) sum = Vec::add(sum, factor[k]);
            Vec::store(group + kGroup, sum);
        }
        unroll<0, B::parts>([&](auto part) HC_INLINE_LAMBDA {
            constexpr int P = decltype(part)::value;
            load(part);
            // A word's four elements are four independent chains of additions.
            unroll<0, words>([&](auto word) HC_INLINE_LAMBDA {
                constexpr int W = decltype(word)::value;
                float* to = group + 4 * (P + W * B::parts) * kLanes;
                F sum[4];
                for (int i = 0; i < 4; ++i) sum[i] = Vec::load(to + i * kLanes);
                for (int k = 0; k < K; ++k)
                    unroll<0, 4>([&](auto byte) HC_INLINE_LAMBDA {
                        constexpr int Byte = decltype(byte)::value;
                        F& s = sum[Byte];
                        if constexpr (one_scale<B>)
                            s = Vec::fma(B::template value<P, W, Byte>(unit[k]), factor[k], s);
                        else
                            s = Vec::fma(weight<B, P, W, Byte>(unit[k], head[k]), factor[k], s);
                    });
                for (int i = 0; i < 4; ++i) Vec::store(to + i * kLanes, sum[i]);
            });
            fetch(stream, K * bytes_of<B>(rows[0], n) / B::parts);
        });
    });
}

// The neurons of one run of a panel: `scales` is the panel, y as in axpy.
struct PanelRun {
    const uint8_t* scales;
    int run;
    const uint8_t* const* rows;
    const float* c;
    int count;
    int64_t blocks;  // of 32 outputs
};

// y + the sum of a run for one output: sum of c[k] value[k], here `times` as large, corrected and scaled.
// Adds the minimum for each c[k]; their sum is `total`.
template <class B> HC_INLINE F add_run(F sum, int times, F total, const Head& head, F y) {
    if constexpr (B::offset > 0)
        sum = Vec::fma(sum, Vec::set1(1.0f / times), Vec::mul(total, Vec::set1(-B::offset)));
    else if (times > 1)
        sum = Vec::mul(sum, Vec::set1(1.0f / times));
    y = Vec::fma(sum, head.scale, y);
    if constexpr (B::has_minimum) y = Vec::fma(head.minimum, total, y);
    return y;
}

// Parts [first, first + parts) of some lanes' codes: y += (sum of c[k] code[k]) * scale + (sum of c[k]) *
// minimum.
template <class B, int first, int parts>
HC_INLINE void panel_parts(const PanelRun& p, int64_t block, int lanes, int l, int n, F total, float* y) {
    constexpr int words = B::words_per_part;
    F sum[parts * words * 4];
    for (F& s : sum) s = Vec::zero();
    for (int k = 0; k < p.count; ++k) {
        I unit[B::units];
        load_units<B::units>(p.rows[k] + block * 4 * B::units + 4 * l, lanes, n, unit);
        const F factor = Vec::set1(p.c[k]);
        unroll<0, parts * words * 4>([&](auto j) HC_INLINE_LAMBDA {
            constexpr int J = decltype(j)::value, P = first + J / 4 / words, W = J / 4 % words;
            sum[J] = Vec::fma(B::template value<P, W, J % 4>(unit), factor, sum[J]);
        });
    }
    unroll<0, parts * words * 4>([&](auto j) HC_INLINE_LAMBDA {
        constexpr int J = decltype(j)::value, P = first + J / 4 / words, W = J / 4 % words;
        constexpr int e = 4 * (P + W * B::parts) + J % 4;
        const int64_t at = block * kBlock + e * lanes + l;
        const Head head = panel_head<B>({p.scales, p.blocks * kBlock, at, n}, p.run);
        float* to = y + block / kLanes * kSums + e * kLanes + l;
        Vec::store(to, add_run<B>(sum[J], B::template times<W, J % 4>(), total, head, Vec::load(to)));
    });
}

// Adds the neurons of one run to y. Their sum stays in registers, a few parts of the codes at a time, and is
// added to y once.
template <class B> inline void panel_axpy(const PanelRun& p, float* y, Stream& stream) {
    constexpr int parts = Vec::panel_vectors / 4 / B::words_per_part;
    constexpr int scales = kBlock * B::header_quarters / (B::halves ? 8 : 4);  // bytes, of a run's 32 outputs
    F total = Vec::zero();
    for (int k = 0; k < p.count; ++k) total = Vec::add(total, Vec::set1(p.c[k]));
    for_groups(p.blocks, [&](int64_t block, int lanes, int l, int n) HC_INLINE_LAMBDA {
        unroll<0, B::parts / parts>([&](auto chunk) HC_INLINE_LAMBDA {
            panel_parts<B, decltype(chunk)::value * parts, parts>(p, block, lanes, l, n, total, y);
            fetch(stream, n * (p.count * 4 * B::units + scales) * parts / B::parts);
        });
    });
}

template <class P, int K>
inline void axpy_plain(const uint8_t* const* rows, const float* c, int64_t cols, float* y, Stream& stream) {
    constexpr int A = 4;  // vectors between two fetches of the stream
    int64_t i = 0;
    for (; i + A * Vec::width <= cols; i += A * Vec::width) {
        for (int a = 0; a < A; ++a) {
            const int64_t at = i + a * Vec::width;
            F sum = Vec::load(y + at);
            for (int k = 0; k < K; ++k) sum = Vec::fma(P::load(rows[k], at), Vec::set1(c[k]), sum);
            Vec::store(y + at, sum);
        }
        fetch(stream, K * A * Vec::width * P::bytes);
    }
    for (; i < cols; i += Vec::width) {
        const int n = int(smaller<int64_t>(Vec::width, cols - i));
        F sum = Vec::load(y + i, n);
        for (int k = 0; k < K; ++k) sum = Vec::fma(P::load(rows[k], i, n), Vec::set1(c[k]), sum);
        Vec::store(y + i, sum, n);
    }
}

template <class B, int K>
inline void axpy(const RowOf<B>* rows, const float* c, int64_t cols, float* y, Stream& stream) {
    if constexpr (B::quantised)
        axpy_quantised<B, K>(rows, c, cols, y, stream);
    else
        axpy_plain<B, K>(rows, c, cols, y, stream);
}

// Writes some lanes' sums, in axpy's layout, in plain order: each times `unit`, minus `offset` times the sum
// of the factors.
HC_NOINLINE inline void unpack_lanes(const float* packed, const float (&unit)[kBlock], float offset,
                                     int64_t lanes, float* out) {
    for (int64_t l = 0; l < lanes; l += 4)
        for (int e = 0; e < kBlock; e += Vec::width) {
            F sum[4];  // of lanes l to l + 3
            Vec::transpose4(packed + e * kLanes + l, kLanes, sum);
            for (int i = 0; i < 4 && l + i < lanes; ++i) {
                const F excess = Vec::set1(offset * packed[kGroup + l + i]);
                Vec::store(out + (l + i) * kBlock + e,
                           Vec::sub(Vec::mul(sum[i], Vec::load(unit + e)), excess));
            }
        }
}

// Writes one group of sums, in axpy's layout, in plain order.
template <class B> inline void unpack_group(const float* packed, float* out, int64_t cols, int64_t group) {
    float unit[kBlock];
    unroll<0, kBlock>([&](auto element) {
        constexpr int e = decltype(element)::value;
        unit[e] = one_scale<B> ? 1.0f / B::template times<e / 4 / B::parts, e % 4>() : 1;
    });
    unpack_lanes(packed, unit, sums_factors<B>() ? B::offset : 0,
                 smaller<int64_t>(kLanes, cols / kBlock - group * kLanes), out);
}

}  // namespace
}  // namespace hc
