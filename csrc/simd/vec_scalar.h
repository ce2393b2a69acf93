// Plain C++: four lanes in an array, for any processor. HC_ISA_FALLBACK compiles fewer tiles with the same
// bits: faster to compile, for builds that need these kernels only on other processors than their target.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

// Lane i of the result.
#define HC_EACH(Type, lane) each<Type>([&](int i) { return lane; })

namespace hc {
namespace {

struct Vec {
    static constexpr const char* name = "scalar";
    static constexpr int width = 4;
    static constexpr int accumulators = 1;
#ifdef HC_ISA_FALLBACK
    static constexpr int token_tile = 1, plain_tile = 1;
#else
    static constexpr int token_tile = 2, plain_tile = 2;
#endif
    static constexpr int row_tile = 1, plain_rows = 1, down_tile = 4;
    static constexpr int decoded_rows = 2, decoded_tokens = 2;  // a tile of row_tiles.h
    // In a slice of columns of plain rows from memory.
    static constexpr int cold_steps(int) { return 4; }
    static constexpr int panel_vectors = 8;  // sums that panel_axpy keeps in registers
    static constexpr int attend_rows = 2, attend_keys = 1, attend_values = 2;  // tiles of attention_block
    static constexpr bool loads_first = false;  // masks are slow: see vec_avx2.h
    static constexpr int signed_offset = 0;
    struct F {
        float v[4];
    };
    struct I {
        int32_t v[4];
    };

    template <class A, class Fn> static A each(Fn fn) {
        A r;
        for (int i = 0; i < 4; ++i) r.v[i] = fn(i);
        return r;
    }
    template <class A, class Fn> static A zip(A a, A b, Fn fn) {
        return each<A>([&](int i) { return fn(a.v[i], b.v[i]); });
    }
    template <class To, class From> static To bits_of(From from) {
        static_assert(sizeof(To) == sizeof(From), "the same bits");
        To to;
        std::memcpy(&to, &from, sizeof to);
        return to;
    }
    static float half(uint16_t h) {  // IEEE 754 binary16 -> binary32
        const uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7fff;
        if (magnitude < 0x400) return bits_of<float>(bits_of<uint32_t>(float(magnitude) * 0x1p-24f) | sign);
        const uint32_t exponents = magnitude < 0x7c00 ? 0x1c000 : 0x38000;  // infinity, NaN: all ones
        return bits_of<float>(sign | (magnitude + exponents) << 13);
    }
    static uint16_t to_half(float f) {  // to nearest, ties to even
        const uint32_t bits = bits_of<uint32_t>(f), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
        if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
        if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);
        if (magnitude < 0x38800000)  // subnormal: adding 0.5 leaves the rounded 2^-24ths in the low bits
            return uint16_t(sign | (bits_of<uint32_t>(bits_of<float>(magnitude) + 0.5f) - 0x3f000000));
        return uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
    }
    static float brain(uint16_t h) { return bits_of<float>(uint32_t(h) << 16); }
    static int8_t byte(int32_t v, int k) { return int8_t(uint32_t(v) >> (8 * k)); }

    static F zero() { return {}; }
    static F set1(float v) { return {{v, v, v, v}}; }
    static F load(const float* p, int n = 4) { return HC_EACH(F, i < n ? p[i] : 0.0f); }
    static void store(float* p, F v, int n = 4) {
        for (int i = 0; i < n; ++i) p[i] = v.v[i];
    }
    static F load_f16(const uint16_t* p, int n = 4) { return HC_EACH(F, i < n ? half(p[i]) : 0.0f); }
    static F set1_f16(const uint16_t* p) { return set1(half(*p)); }
    static F load_bf16(const uint16_t* p, int n = 4) { return HC_EACH(F, i < n ? brain(p[i]) : 0.0f); }
    static void store_f16(uint16_t* p, F v, int n) {
        for (int i = 0; i < n; ++i) p[i] = to_half(v.v[i]);
    }
    static F fma(F a, F b, F c) { return HC_EACH(F, a.v[i] * b.v[i] + c.v[i]); }
    static F add(F a, F b) { return zip(a, b, std::plus<>()); }
    static F sub(F a, F b) { return zip(a, b, std::minus<>()); }
    static F mul(F a, F b) { return zip(a, b, std::multiplies<>()); }
    static F div(F a, F b) { return zip(a, b, std::divides<>()); }
    static F max(F a, F b) { return HC_EACH(F, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
    static F min(F a, F b) { return HC_EACH(F, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
    static F abs(F a) { return HC_EACH(F, a.v[i] < 0 ? -a.v[i] : a.v[i]); }
    static F greater(F a, F b, F value) { return HC_EACH(F, a.v[i] > b.v[i] ? value.v[i] : 0.0f); }
    static float sum(F v) { return (v.v[0] + v.v[2]) + (v.v[1] + v.v[3]); }
    static void sum4(const F (&v)[4], float* to) {
        for (int i = 0; i < 4; ++i) to[i] = sum(v[i]);
    }
    static float max_of(F v) {
        float m = v.v[0];
        for (int i = 1; i < 4; ++i) m = v.v[i] > m ? v.v[i] : m;
        return m;
    }
    // The lane that is leaf k of sum()'s tree, and the leaf of lane k: k's two bits reversed.
    static constexpr int sum_order(int k) { return k % 2 * 2 + k / 2; }
    // Lane i of to[j]: from[i * stride + j].
    static void transpose4(const float* from, int64_t stride, F (&to)[4]) {
        for (int j = 0; j < 4; ++j) to[j] = HC_EACH(F, from[i * stride + j]);
    }

    static I zero_i() { return {}; }
    static I set1_i(int v) { return {{v, v, v, v}}; }
    static I load_i(const void* p, int n = 4) {
        I r = {};
        std::memcpy(r.v, p, size_t(4 * n));
        return r;
    }
    static I load_u8(const uint8_t* p, int n) { return HC_EACH(I, i < n ? int32_t(p[i]) : 0); }
    static I load_i8(const uint8_t* p, int n) { return HC_EACH(I, i < n ? int32_t(int8_t(p[i])) : 0); }
    // Lane i: the half, or nibble (at + i) % 8 of the 32-bit word, of super-block at / 8; at is a multiple of
    // 4.
    static F spread_f16(const uint16_t* p, int64_t at, int) { return set1(half(p[at / 8])); }
    static I spread_nibbles(const uint8_t* p, int64_t at, int) {
        uint32_t word;
        std::memcpy(&word, p + at / 8 * 4, 4);
        return each<I>([&](int i) { return int32_t(word >> ((at + i) % 8 * 4) & 15); });
    }
    static I lookup(I nibbles, const int8_t* table) {
        return each<I>([&](int i) {
            uint32_t v = 0;
            for (int k = 0; k < 4; ++k) v |= uint32_t(uint8_t(table[byte(nibbles.v[i], k) & 15])) << (8 * k);
            return int32_t(v);
        });
    }
    // Lane i: fn(i).
    template <class Fn> static I each_word(Fn&& fn) { return HC_EACH(I, int32_t(fn(i))); }
    // The low and the high word of the 64 bits of fn(lane).
    template <class Fn> static void each_pair(Fn&& fn, I& low, I& high) {
        low = HC_EACH(I, int32_t(uint32_t(fn(i))));
        high = HC_EACH(I, int32_t(uint32_t(fn(i) >> 32)));
    }
    // The even words and the odd ones.
    static void load_pairs(const uint8_t* p, I& even, I& odd) {
        const I a = load_i(p), b = load_i(p + 4 * width);
        const auto word = [&](int i) { return i < width ? a.v[i] : b.v[i - width]; };
        even = each<I>([&](int i) { return word(2 * i); });
        odd = each<I>([&](int i) { return word(2 * i + 1); });
    }
    // Byte N of each lane, four times.
    template <int N> static I spread_byte(I v) {
        return HC_EACH(I, int32_t(0x01010101u * uint8_t(byte(v.v[i], N))));
    }
    // Bytes of x, negated if the byte of `v` has the bit of the byte of `bits`.
    static I negative_where(I x, I v, I bits) {
        return each<I>([&](int i) {
            uint32_t word = 0;
            for (int k = 0; k < 4; ++k) {
                const bool negative = byte(v.v[i], k) & byte(bits.v[i], k);
                word |= uint32_t(uint8_t(negative ? -byte(x.v[i], k) : byte(x.v[i], k))) << 8 * k;
            }
            return int32_t(word);
        });
    }
    static void store_i8(int8_t* p, I v) {
        for (int i = 0; i < 4; ++i) p[i] = int8_t(v.v[i]);
    }
    static I bit_and(I a, I b) { return zip(a, b, std::bit_and<>()); }
    static I bit_or(I a, I b) { return zip(a, b, std::bit_or<>()); }
    static I bit_xor(I a, I b) { return zip(a, b, std::bit_xor<>()); }
    static I add_i(I a, I b) { return zip(a, b, std::plus<>()); }
    static I sub_i(I a, I b) { return zip(a, b, std::minus<>()); }
    template <int N> static I shl(I a) { return HC_EACH(I, int32_t(uint32_t(a.v[i]) << N)); }
    template <int N> static I shr(I a) { return HC_EACH(I, int32_t(uint32_t(a.v[i]) >> N)); }
    template <int N> static I sar(I a) { return HC_EACH(I, a.v[i] >> N); }
    static F to_float(I a) { return HC_EACH(F, float(a.v[i])); }
    static I to_int(F a) { return HC_EACH(I, int32_t(std::lrintf(a.v[i]))); }
    static F as_float(I a) { return bits_of<F>(a); }

    // Byte dot products, four in each lane: acc + the products of words of codes with as many words of x.
    using Dots = I;
    static constexpr int words_at_once(int) { return 8; }
    template <bool Signed> static I dot_code(I w) { return w; }
    static I dot_begin(I acc) { return acc; }
    template <bool Signed> static HC_INLINE I dot_add(I sum, I code, I x) {
        for (int i = 0; i < 16; ++i)
            sum.v[i / 4] += int32_t(byte(code.v[i / 4], i % 4)) * byte(x.v[i / 4], i % 4);
        return sum;
    }
    static I dot_end(I, I sum) { return sum; }
    static HC_INLINE void prefetch(const void*) {}
    static HC_INLINE void prefetch_l2(const void*) {}
};

}  // namespace
}  // namespace hc

#undef HC_EACH
