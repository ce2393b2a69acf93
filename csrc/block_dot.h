// The block types: how packed codes become words for an integer dot and values for a sum of rows. A new type
// is one struct here and one line in `with_type`.
#pragma once
#include "kernels.h"
#include "vec.h"

// Everything below is compiled once per ISA, in an unnamed namespace: a function compiled for AVX-512 must
// never be the one that the linker keeps for all.
namespace hc {
namespace {

using F = Vec::F;
using I = Vec::I;

template <int N> struct Index {
    static constexpr int value = N;
};
template <int Begin, int End, class Fn> inline void unroll(Fn&& fn) {
    if constexpr (Begin < End) {
        fn(Index<Begin>{});
        unroll<Begin + 1, End>(fn);
    }
}
template <class T> inline T smaller(T a, T b) { return a < b ? a : b; }
template <class T> inline T larger(T a, T b) { return a > b ? a : b; }

// A quantised type has `parts` 32-bit units per block in a lane; part k holds the words k, k + parts, ...
// (a word is four codes, elements 4w..4w+3 of the block).
struct BlockQ8_0 {
    static constexpr bool quantised = true;
    static constexpr int code_bytes = 32, parts = 8, words_per_part = 1;
    static constexpr bool signed_codes = true;
    static constexpr int offset_shift =
        Vec::signed_shift;  // the dot's start value is -(sum(x) << offset_shift)
    template <int W> static I word(I part) { return part; }
    // Element `byte` of word W, less the type's offset.
    template <int W, int Byte> static F value(I part) {
        return Vec::to_float(Vec::sar<24>(Vec::shl<24 - 8 * Byte>(part)));
    }
};

struct BlockQ4_0 {
    static constexpr bool quantised = true;
    static constexpr int code_bytes = 16, parts = 4, words_per_part = 2;
    static constexpr bool signed_codes = false;
    static constexpr int offset_shift = 3;
    template <int W> static I word(I part) {
        return Vec::bit_and(W ? Vec::shr<4>(part) : part, Vec::set1_i(0x0f0f0f0f));
    }
    template <int W, int Byte> static F value(I part) { return Vec::nibble<2 * Byte + W>(part); }
};

struct FloatF32 {
    static constexpr bool quantised = false;
    static constexpr int bytes = 4;
    static F load(const uint8_t* row, int64_t i) { return Vec::load((const float*)row + i); }
    static F load(const uint8_t* row, int64_t i, int n) { return Vec::load((const float*)row + i, n); }
};
struct FloatF16 {
    static constexpr bool quantised = false;
    static constexpr int bytes = 2;
    static F load(const uint8_t* row, int64_t i) { return Vec::load_f16((const uint16_t*)row + i); }
    static F load(const uint8_t* row, int64_t i, int n) { return Vec::load_f16((const uint16_t*)row + i, n); }
};
struct FloatBF16 {
    static constexpr bool quantised = false;
    static constexpr int bytes = 2;
    static F load(const uint8_t* row, int64_t i) { return Vec::load_bf16((const uint16_t*)row + i); }
    static F load(const uint8_t* row, int64_t i, int n) {
        return Vec::load_bf16((const uint16_t*)row + i, n);
    }
};

// Calls fn with the type's struct.
template <class Fn> inline void with_type(Type type, Fn&& fn) {
    switch (type) {
        case Q8_0: return fn(BlockQ8_0{});
        case Q4_0: return fn(BlockQ4_0{});
        case F32: return fn(FloatF32{});
        case F16: return fn(FloatF16{});
        case BF16: return fn(FloatBF16{});
    }
}

// What to bring into L2 ahead of its use. A stream walks the rows that will be read, in their order; whoever
// reads `bytes` now fetches as many ahead, so that memory stays busy while the vector units work.
struct NoStream {
    void fetch(int64_t) {}
};
class Stream {
  public:
    // Rows list[0..count) (or first, first + 1, ... without a list), `bytes` of each.
    Stream(const Rows& rows, const int32_t* list, int64_t first, int64_t count, int64_t bytes)
        : rows_(rows), list_(list), next_(first), end_(first + count), bytes_(bytes) {}
    void fetch(int64_t bytes) {
        for (; bytes > 0; bytes -= 64) {
            if (left_ <= 0) {
                if (next_ == end_) return;
                at_ = rows_.row(list_ ? list_[next_] : next_);
                left_ = bytes_ + 63, ++next_;
            }
            Vec::prefetch(at_);
            at_ += 64, left_ -= 64;
        }
    }

  private:
    const Rows rows_;
    const int32_t* list_;
    int64_t next_, end_, bytes_, left_ = 0;
    const uint8_t* at_ = nullptr;
};

// One group of R rows and T tokens: lanes [l, l + n) of a group of `lanes` blocks that starts at `block`.
template <class B, int R, int T, bool Full> inline void dot_group(const uint8_t* const* rows, const Input& in,
                                                                  int t0, int64_t blocks, int64_t block,
                                                                  int lanes, int l, int n, F (&sum)[R][T]) {
    I acc[R][T];
    for (int t = 0; t < T; ++t) {
        I start = Vec::zero_i();
        if constexpr (B::offset_shift > 0)
            start = Vec::sub_i(start,
                               Vec::template shl<B::offset_shift>(Vec::load_i(in.sums(t0 + t) + block + l)));
        for (int r = 0; r < R; ++r) acc[r][t] = start;
    }
    const int64_t code = blocks * 2 + block * B::code_bytes + 4 * l;
    unroll<0, B::parts>([&](auto k) {
        constexpr int K = decltype(k)::value;
        I part[R];
        for (int r = 0; r < R; ++r) {
            const uint8_t* p = rows[r] + code + K * 4 * lanes;
            part[r] = Full ? Vec::load_i(p) : Vec::load_i(p, n);
        }
        unroll<0, B::words_per_part>([&](auto w) {
            constexpr int W = decltype(w)::value;
            for (int t = 0; t < T; ++t) {
                const I x =
                    Vec::load_i(in.codes(t0 + t) + block * kBlock + (K + W * B::parts) * 4 * kLanes + 4 * l);
                for (int r = 0; r < R; ++r) {
                    const I codes = B::template word<W>(part[r]);
                    acc[r][t] = B::signed_codes ? Vec::dot4_signed(acc[r][t], codes, x)
                                                : Vec::dot4(acc[r][t], codes, x);
                }
            }
        });
    });
    for (int r = 0; r < R; ++r) {
        const uint16_t* scales = (const uint16_t*)rows[r] + block + l;
        const F d = Full ? Vec::load_f16(scales) : Vec::load_f16(scales, n);
        for (int t = 0; t < T; ++t) {
            const F scale = Vec::mul(d, Vec::load(in.scales(t0 + t) + block + l));
            sum[r][t] = Vec::fma(Vec::to_float(acc[r][t]), scale, sum[r][t]);
        }
    }
}

// Dots of R rows with T tokens. Every (row, token) sums its blocks in one fixed order, whatever R and T are.
template <class B, int R, int T, class S> inline void dot_quantised(const uint8_t* const* rows,
                                                                    const Input& in, int t0,
                                                                    float (&out)[R][T], S& stream) {
    F sum[R][T];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) sum[r][t] = Vec::zero();
    const int64_t blocks = in.cols / kBlock;
    for (int64_t block = 0; block < blocks; block += kLanes) {
        const int lanes = int(smaller<int64_t>(kLanes, blocks - block));
        int l = 0;
        for (; l + Vec::width <= lanes; l += Vec::width)
            dot_group<B, R, T, true>(rows, in, t0, blocks, block, lanes, l, Vec::width, sum);
        if (l < lanes) dot_group<B, R, T, false>(rows, in, t0, blocks, block, lanes, l, lanes - l, sum);
        stream.fetch(R * lanes * (2 + B::code_bytes));
    }
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) out[r][t] = Vec::sum(sum[r][t]);
}

template <class P, int R, int T, class S>
inline void dot_plain(const uint8_t* const* rows, const Input& in, int t0, float (&out)[R][T], S& stream) {
    constexpr int A = Vec::accumulators;
    F sum[R][T][A];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t)
            for (int a = 0; a < A; ++a) sum[r][t][a] = Vec::zero();
    const float* x = in.x + t0 * in.stride;
    int64_t i = 0;
    for (; i + A * Vec::width <= in.cols; i += A * Vec::width) {
        for (int a = 0; a < A; ++a)
            for (int r = 0; r < R; ++r) {
                const F w = P::load(rows[r], i + a * Vec::width);
                for (int t = 0; t < T; ++t)
                    sum[r][t][a] =
                        Vec::fma(w, Vec::load(x + t * in.stride + i + a * Vec::width), sum[r][t][a]);
            }
        stream.fetch(R * A * Vec::width * P::bytes);
    }
    for (; i < in.cols; i += Vec::width) {
        const int n = int(smaller<int64_t>(Vec::width, in.cols - i));
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t)
                sum[r][t][0] =
                    Vec::fma(P::load(rows[r], i, n), Vec::load(x + t * in.stride + i, n), sum[r][t][0]);
    }
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) {
            F s = sum[r][t][0];
            for (int a = 1; a < A; ++a) s = Vec::add(s, sum[r][t][a]);
            out[r][t] = Vec::sum(s);
        }
}

// The same for either kind of type.
template <class B, int R, int T, class S>
inline void dot_tile(const uint8_t* const* rows, const Input& in, int t0, float (&out)[R][T], S& stream) {
    if constexpr (B::quantised)
        dot_quantised<B, R, T>(rows, in, t0, out, stream);
    else
        dot_plain<B, R, T>(rows, in, t0, out, stream);
}

// y += c[0] w[0] + ... + c[K-1] w[K-1], added in that order. For quantised types y is in packed order:
// element e of the block in lane l of group g is y[g * kGroup + e * kLanes + l], so y holds whole groups.
template <class B, int K, class S>
inline void axpy_quantised(const uint8_t* const* rows, const float* c, int64_t cols, float* y, S& stream) {
    const int64_t blocks = cols / kBlock;
    for (int64_t block = 0; block < blocks; block += kLanes) {
        const int lanes = int(smaller<int64_t>(kLanes, blocks - block));
        for (int l = 0; l < lanes; l += Vec::width) {
            const int n = smaller(Vec::width, lanes - l);
            F scale[K];
            for (int k = 0; k < K; ++k)
                scale[k] = Vec::mul(Vec::load_f16((const uint16_t*)rows[k] + block + l, n), Vec::set1(c[k]));
            const int64_t code = blocks * 2 + block * B::code_bytes + 4 * l;
            float* group = y + block * kBlock + l;
            unroll<0, B::parts>([&](auto p) {
                constexpr int P = decltype(p)::value;
                I part[K];
                for (int k = 0; k < K; ++k) part[k] = Vec::load_i(rows[k] + code + P * 4 * lanes, n);
                unroll<0, B::words_per_part * 4>([&](auto j) {
                    constexpr int W = decltype(j)::value / 4, Byte = decltype(j)::value % 4;
                    float* to = group + (4 * (P + W * B::parts) + Byte) * kLanes;
                    F sum = Vec::load(to);
                    for (int k = 0; k < K; ++k)
                        sum = Vec::fma(B::template value<W, Byte>(part[k]), scale[k], sum);
                    Vec::store(to, sum);
                });
                stream.fetch(K * 4 * n);
            });
            stream.fetch(K * 2 * n);
        }
    }
}

template <class P, int K, class S>
inline void axpy_plain(const uint8_t* const* rows, const float* c, int64_t cols, float* y, S& stream) {
    for (int64_t i = 0; i < cols; i += Vec::width) {
        const int n = int(smaller<int64_t>(Vec::width, cols - i));
        F sum = Vec::load(y + i, n);
        for (int k = 0; k < K; ++k) sum = Vec::fma(P::load(rows[k], i, n), Vec::set1(c[k]), sum);
        Vec::store(y + i, sum, n);
        stream.fetch(K * Vec::width * P::bytes);
    }
}

template <class B, int K, class S>
inline void axpy(const uint8_t* const* rows, const float* c, int64_t cols, float* y, S& stream) {
    if constexpr (B::quantised)
        axpy_quantised<B, K>(rows, c, cols, y, stream);
    else
        axpy_plain<B, K>(rows, c, cols, y, stream);
}

// Element order of packed sums -> plain order, for one group.
inline void unpack_group(const float* packed, float* out, int64_t cols, int64_t group) {
    const int64_t lanes = smaller<int64_t>(kLanes, cols / kBlock - group * kLanes);
    for (int64_t l = 0; l < lanes; ++l)
        for (int e = 0; e < kBlock; ++e) out[l * kBlock + e] = packed[e * kLanes + l];
}

}  // namespace
}  // namespace hc
