// NEON of every ARMv8-A; also with the dot product instructions of ARMv8.2-A, and with I8MM of ARMv8.6-A,
// which multiplies byte matrices.
#pragma once
#include <arm_neon.h>

#include <cstring>

#if defined(HC_ISA_DOTPROD) || defined(HC_ISA_I8MM)
#define HC_HAS_DOTS
#endif

namespace hc {
namespace {

struct Vec {
#if defined(HC_ISA_I8MM)
    static constexpr const char* name = "i8mm";
#elif defined(HC_ISA_DOTPROD)
    static constexpr const char* name = "dotprod";
#else
    static constexpr const char* name = "neon";
#endif
    static constexpr int width = 4;
    static constexpr int accumulators = 4;
    static constexpr int row_tile = 1, token_tile = 4, plain_rows = 4, plain_tile = 4, down_tile = 8;
    static constexpr int decoded_rows = 4, decoded_tokens = 4;  // a tile of row_tiles.h
    // In a slice of columns of plain rows from memory.
    static constexpr int cold_steps(int) { return 4; }
    static constexpr int panel_vectors = 16;  // sums that panel_axpy keeps in registers
    static constexpr int attend_rows = 6, attend_keys = 4, attend_values = 4;  // tiles of attention_block
    static constexpr bool loads_first = false;  // masks are slow: see vec_avx2.h
    static constexpr int signed_offset = 0;
    using F = float32x4_t;
    using I = int32x4_t;

    template <class T> struct Four {
        T v[4] = {};
    };
    // The first n values, then zeros.
    template <class T, class From> static Four<T> extended(const From* from, int n) {
        Four<T> to;
        for (int i = 0; i < n; ++i) to.v[i] = T(from[i]);
        return to;
    }
    template <class T> static void copy(T* to, const T* from, int n) {
        for (int i = 0; i < n; ++i) to[i] = from[i];
    }
    static F zero() { return vdupq_n_f32(0); }
    static F set1(float v) { return vdupq_n_f32(v); }
    static F load(const float* p) { return vld1q_f32(p); }
    static F load(const float* p, int n) { return vld1q_f32(extended<float>(p, n).v); }
    static void store(float* p, F v) { vst1q_f32(p, v); }
    static void store(float* p, F v, int n) {
        float t[4];
        vst1q_f32(t, v);
        copy(p, t, n);
    }
    static F load_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
    static F load_f16(const uint16_t* p, int n) { return load_f16(extended<uint16_t>(p, n).v); }
    static F set1_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(*p))); }
    static F load_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
    static F load_bf16(const uint16_t* p, int n) { return load_bf16(extended<uint16_t>(p, n).v); }
    static void store_f16(uint16_t* p, F v, int n) {
        uint16_t t[4];
        vst1_u16(t, vreinterpret_u16_f16(vcvt_f16_f32(v)));
        copy(p, t, n);
    }
    static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    static F add(F a, F b) { return vaddq_f32(a, b); }
    static F sub(F a, F b) { return vsubq_f32(a, b); }
    static F mul(F a, F b) { return vmulq_f32(a, b); }
    static F div(F a, F b) { return vdivq_f32(a, b); }
    static F max(F a, F b) { return vmaxq_f32(a, b); }
    static F min(F a, F b) { return vminq_f32(a, b); }
    static F abs(F a) { return vabsq_f32(a); }
    static F greater(F a, F b, F value) {
        return vreinterpretq_f32_u32(vandq_u32(vcgtq_f32(a, b), vreinterpretq_u32_f32(value)));
    }
    static float sum(F v) { return vaddvq_f32(v); }
    // sum() of each of four vectors.
    static HC_INLINE void sum4(const F (&v)[4], float* to) {
        vst1q_f32(to, vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3])));
    }
    static float max_of(F v) { return vmaxvq_f32(v); }
    // The lane that is leaf k of sum()'s tree: neighbours are added first.
    static constexpr int sum_order(int k) { return k; }
    // Lane i of to[j]: from[i * stride + j].
    static HC_INLINE void transpose4(const float* from, int64_t stride, F (&to)[4]) {
        const float32x4x2_t a = vtrnq_f32(vld1q_f32(from), vld1q_f32(from + stride));
        const float32x4x2_t b = vtrnq_f32(vld1q_f32(from + 2 * stride), vld1q_f32(from + 3 * stride));
        for (int i = 0; i < 2; ++i) {
            to[i] = vcombine_f32(vget_low_f32(a.val[i]), vget_low_f32(b.val[i]));
            to[2 + i] = vcombine_f32(vget_high_f32(a.val[i]), vget_high_f32(b.val[i]));
        }
    }

    static I zero_i() { return vdupq_n_s32(0); }
    static I set1_i(int v) { return vdupq_n_s32(v); }
    static I load_i(const void* p) { return vreinterpretq_s32_u8(vld1q_u8((const uint8_t*)p)); }
    static I load_i(const void* p, int n) {
        uint8_t v[16] = {};
        copy(v, (const uint8_t*)p, 4 * n);
        return load_i(v);
    }
    static I load_u8(const uint8_t* p, int n) { return vld1q_s32(extended<int32_t>(p, n).v); }
    static I load_i8(const uint8_t* p, int n) { return vld1q_s32(extended<int32_t>((const int8_t*)p, n).v); }
    // Lane i: the half, or nibble (at + i) % 8 of the 32-bit word, of super-block at / 8; at is a multiple of
    // 4.
    static F spread_f16(const uint16_t* p, int64_t at, int) {
        return vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(p[at / 8])));
    }
    static I spread_nibbles(const uint8_t* p, int64_t at, int) {
        uint32_t word;
        std::memcpy(&word, p + at / 8 * 4, 4);
        word >>= at % 8 * 4;
        const int32_t v[4] = {int32_t(word & 15), int32_t(word >> 4 & 15), int32_t(word >> 8 & 15),
                              int32_t(word >> 12 & 15)};
        return vld1q_s32(v);
    }
    static I lookup(I nibbles, const int8_t* table) {
        return vreinterpretq_s32_s8(vqtbl1q_s8(vld1q_s8(table), vreinterpretq_u8_s32(nibbles)));
    }
    // Lane i: fn(i).
    template <class Fn> static HC_INLINE I each_word(Fn&& fn) {
        I v = vdupq_n_s32(int32_t(fn(0)));
        v = vsetq_lane_s32(int32_t(fn(1)), v, 1);
        v = vsetq_lane_s32(int32_t(fn(2)), v, 2);
        return vsetq_lane_s32(int32_t(fn(3)), v, 3);
    }
    // The low and the high word of the 64 bits of fn(lane).
    template <class Fn> static HC_INLINE void each_pair(Fn&& fn, I& low, I& high) {
        const I a = vreinterpretq_s32_u64(vcombine_u64(vcreate_u64(fn(0)), vcreate_u64(fn(1))));
        const I b = vreinterpretq_s32_u64(vcombine_u64(vcreate_u64(fn(2)), vcreate_u64(fn(3))));
        low = vuzp1q_s32(a, b);
        high = vuzp2q_s32(a, b);
    }
    // The even words and the odd ones.
    static HC_INLINE void load_pairs(const uint8_t* p, I& even, I& odd) {
        const I a = load_i(p), b = load_i(p + 16);
        even = vuzp1q_s32(a, b);
        odd = vuzp2q_s32(a, b);
    }
    // Byte N of each lane, four times.
    template <int N> static I spread_byte(I v) {
        constexpr uint8_t from[16] = {N,     N,     N,     N,     N + 4,  N + 4,  N + 4,  N + 4,
                                      N + 8, N + 8, N + 8, N + 8, N + 12, N + 12, N + 12, N + 12};
        return vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(v), vld1q_u8(from)));
    }
    // Bytes of x, negated if the byte of `v` has the bit of the byte of `bits`.
    static I negative_where(I x, I v, I bits) {
        const uint8x16_t mask = vtstq_u8(vreinterpretq_u8_s32(v), vreinterpretq_u8_s32(bits));
        const uint8x16_t flipped = veorq_u8(vreinterpretq_u8_s32(x), mask);
        return vreinterpretq_s32_u8(vsubq_u8(flipped, mask));
    }
    static void store_i8(int8_t* p, I v) {
        const int8x8_t bytes = vmovn_s16(vcombine_s16(vmovn_s32(v), vmovn_s32(v)));
        const uint32_t word = vget_lane_u32(vreinterpret_u32_s8(bytes), 0);
        std::memcpy(p, &word, 4);
    }
    static I bit_and(I a, I b) { return vandq_s32(a, b); }
    static I bit_or(I a, I b) { return vorrq_s32(a, b); }
    static I bit_xor(I a, I b) { return veorq_s32(a, b); }
    static I add_i(I a, I b) { return vaddq_s32(a, b); }
    static I sub_i(I a, I b) { return vsubq_s32(a, b); }
    template <int N> static I shl(I a) { return vshlq_s32(a, vdupq_n_s32(N)); }
    template <int N> static I shr(I a) {
        return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a), vdupq_n_s32(-N)));
    }
    template <int N> static I sar(I a) { return vshlq_s32(a, vdupq_n_s32(-N)); }
    static F to_float(I a) { return vcvtq_f32_s32(a); }
    static I to_int(F a) { return vcvtnq_s32_f32(a); }
    static F as_float(I a) { return vreinterpretq_f32_s32(a); }

    // Byte dot products, four in each lane: acc + the products of at most words_at_once words of codes,
    // prepared by dot_code, with as many words of x. dot_begin makes the first sum.
    template <bool Signed> static I dot_code(I w) { return w; }
#ifdef HC_HAS_DOTS
    using Dots = I;
    static constexpr int words_at_once(int) { return 8; }
    static I dot_begin(I acc) { return acc; }
    template <bool Signed> static I dot_add(I sum, I code, I x) {
        return vdotq_s32(sum, vreinterpretq_s8_s32(code), vreinterpretq_s8_s32(x));
    }
    static I dot_end(I, I sum) { return sum; }
#else
    struct Dots {
        int16x8_t low, high;
    };
    // Products are added in 16 bits while they fit: each is at most 127 * 2^bits.
    static constexpr int words_at_once(int bits) { return bits < 5 ? 8 : 1 << (8 - bits); }
    static Dots dot_begin(I) { return {vdupq_n_s16(0), vdupq_n_s16(0)}; }
    template <bool Signed> static HC_INLINE Dots dot_add(Dots sum, I code, I x) {
        const int8x16_t a = vreinterpretq_s8_s32(code), b = vreinterpretq_s8_s32(x);
        return {vmlal_s8(sum.low, vget_low_s8(a), vget_low_s8(b)), vmlal_high_s8(sum.high, a, b)};
    }
    static HC_INLINE I dot_end(I acc, Dots sum) {
        return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(sum.low), vpaddlq_s16(sum.high)));
    }
#endif
#ifdef HC_ISA_I8MM
    // Dot products of eight bytes of two rows, in the halves of `rows`, with eight bytes of two tokens: row 0
    // with both, then row 1.
    static I multiply_pairs(I sum, I rows, I tokens) {
        return vmmlaq_s32(sum, vreinterpretq_s8_s32(rows), vreinterpretq_s8_s32(tokens));
    }
    // Lane i of to[j]: lane j of the i-th argument.
    static HC_INLINE void transpose4(I a, I b, I c, I d, I (&to)[4]) {
        const int32x4x2_t first = vtrnq_s32(a, b), second = vtrnq_s32(c, d);
        for (int i = 0; i < 2; ++i) {
            to[i] = vcombine_s32(vget_low_s32(first.val[i]), vget_low_s32(second.val[i]));
            to[2 + i] = vcombine_s32(vget_high_s32(first.val[i]), vget_high_s32(second.val[i]));
        }
    }
    static HC_INLINE void transpose4(F a, F b, F c, F d, F (&to)[4]) {
        I bits[4];
        transpose4(vreinterpretq_s32_f32(a), vreinterpretq_s32_f32(b), vreinterpretq_s32_f32(c),
                   vreinterpretq_s32_f32(d), bits);
        for (int i = 0; i < 4; ++i) to[i] = as_float(bits[i]);
    }
#endif
    static HC_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }  // into L1
    static HC_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }
};

}  // namespace
}  // namespace hc
