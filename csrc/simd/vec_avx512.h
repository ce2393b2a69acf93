// AVX-512 (F, BW, VL, DQ, VNNI).
#pragma once
#include <immintrin.h>

namespace hc {
namespace {

struct Vec {
    static constexpr const char* name = "avx512";
    static constexpr int width = 16;
    static constexpr int accumulators = 4;  // independent sums of one float dot product
    static constexpr int row_tile = 2, token_tile = 4, plain_rows = 6, plain_tile = 4, down_tile = 8;
    static constexpr int decoded_rows = 4, decoded_tokens = 4;  // a tile of row_tiles.h
    // In a slice of columns of plain rows from memory.
    static constexpr int cold_steps(int) { return 4; }
    static constexpr int panel_vectors = 16;  // sums that panel_axpy keeps in registers
    static constexpr int attend_rows = 6, attend_keys = 2, attend_values = 4;  // tiles of attention_block
    static constexpr bool loads_first = false;  // masks are slow: see vec_avx2.h
    static constexpr int signed_offset = 128;   // bias that dot_code adds to signed codes
    using F = __m512;
    using I = __m512i;

    static __mmask16 mask(int n) { return __mmask16((1u << n) - 1); }
    static F zero() { return _mm512_setzero_ps(); }
    static F set1(float v) { return _mm512_set1_ps(v); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static F load(const float* p, int n) { return _mm512_maskz_loadu_ps(mask(n), p); }
    static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
    static void store(float* p, F v, int n) { _mm512_mask_storeu_ps(p, mask(n), v); }
    static F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
    static F load_f16(const uint16_t* p, int n) {
        return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask(n), p));
    }
    static F set1_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_set1_epi16(short(*p))); }
    static F from_bf16(__m256i v) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
    }
    static F load_bf16(const uint16_t* p) { return from_bf16(_mm256_loadu_si256((const __m256i*)p)); }
    static F load_bf16(const uint16_t* p, int n) { return from_bf16(_mm256_maskz_loadu_epi16(mask(n), p)); }
    static void store_f16(uint16_t* p, F v, int n) {
        _mm256_mask_storeu_epi16(p, mask(n), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static F min(F a, F b) { return _mm512_min_ps(a, b); }
    static F abs(F a) { return _mm512_abs_ps(a); }
    static F greater(F a, F b, F value) {
        return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), value);
    }
    static float sum(F v) {
        const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
        const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
        return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
    }
    // sum() of each of four vectors.
    static HC_INLINE void sum4(const F (&v)[4], float* to) {
        const F a =
            _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x44), _mm512_shuffle_f32x4(v[0], v[1], 0xee));
        const F b =
            _mm512_add_ps(_mm512_shuffle_f32x4(v[2], v[3], 0x44), _mm512_shuffle_f32x4(v[2], v[3], 0xee));
        const F four = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
        const F two = _mm512_add_ps(four, _mm512_permute_ps(four, 0x4e));
        const F one = _mm512_add_ps(two, _mm512_permute_ps(two, 0xb1));
        const I lanes = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
        _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_permutexvar_ps(lanes, one)));
    }
    static float max_of(F v) { return _mm512_reduce_max_ps(v); }
    // The lane that is leaf k of sum()'s tree, and the leaf of lane k: k's four bits reversed.
    static constexpr int sum_order(int k) { return k % 2 * 8 + k / 2 % 2 * 4 + k / 4 % 2 * 2 + k / 8; }
    // Lane i of to[j]: from[i * stride + j].
    static HC_INLINE void transpose4(const float* from, int64_t stride, F (&to)[4]) {
        F row[4];  // row r of each group of four
        for (int r = 0; r < 4; ++r) {
            const float* p = from + r * stride;
            F v = _mm512_castps128_ps512(_mm_loadu_ps(p));
            v = _mm512_insertf32x4(v, _mm_loadu_ps(p + 4 * stride), 1);
            v = _mm512_insertf32x4(v, _mm_loadu_ps(p + 8 * stride), 2);
            row[r] = _mm512_insertf32x4(v, _mm_loadu_ps(p + 12 * stride), 3);
        }
        const F a = _mm512_unpacklo_ps(row[0], row[1]), b = _mm512_unpackhi_ps(row[0], row[1]);
        const F c = _mm512_unpacklo_ps(row[2], row[3]), d = _mm512_unpackhi_ps(row[2], row[3]);
        to[0] = _mm512_shuffle_ps(a, c, 0x44);
        to[1] = _mm512_shuffle_ps(a, c, 0xee);
        to[2] = _mm512_shuffle_ps(b, d, 0x44);
        to[3] = _mm512_shuffle_ps(b, d, 0xee);
    }

    static I zero_i() { return _mm512_setzero_si512(); }
    static I set1_i(int v) { return _mm512_set1_epi32(v); }
    static I load_i(const void* p) { return _mm512_loadu_si512(p); }
    static I load_i(const void* p, int n) { return _mm512_maskz_loadu_epi32(mask(n), p); }
    static HC_INLINE I load_u8(const uint8_t* p, int n) {
        return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask(n), p));
    }
    static HC_INLINE I load_i8(const uint8_t* p, int n) {
        return _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask(n), p));
    }
    // Lane i: the half, or nibble i % 8 of the 32-bit word, of super-block (at + i) / 8; at is a multiple of
    // 16.
    static F spread_f16(const uint16_t* p, int64_t at, int n) {
        const __m512i lane =
            _mm512_srli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 3);
        const F two = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask(n / 8), p + at / 8));
        return _mm512_maskz_permutexvar_ps(mask(n), lane, two);
    }
    static I spread_nibbles(const uint8_t* p, int64_t at, int n) {
        const __m512i super = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        const I two = _mm512_maskz_loadu_epi32(mask(n / 8), p + at / 8 * 4);
        return _mm512_maskz_mov_epi32(mask(n), nibbles_of(_mm512_permutexvar_epi32(super, two)));
    }
    // Nibble i % 8 of lane i.
    static HC_INLINE I nibbles_of(I word) {
        const I first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
        return _mm512_and_si512(_mm512_srlv_epi32(word, first), _mm512_set1_epi32(15));
    }
    static I lookup(I nibbles, const int8_t* table) {
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), nibbles);
    }
    // Lane i: fn(i). Blends of broadcasts: an insertion needs one of the few units that shuffle.
    template <class Fn> static HC_INLINE I each_word(Fn&& fn) {
        const auto at = [&](int lane) HC_INLINE_LAMBDA { return _mm_set1_epi32(int(fn(lane))); };
        const auto four = [&](int lane) HC_INLINE_LAMBDA {
            return _mm_blend_epi32(_mm_blend_epi32(at(lane), at(lane + 1), 2),
                                   _mm_blend_epi32(at(lane + 2), at(lane + 3), 8), 12);
        };
        return halves(_mm256_set_m128i(four(4), four(0)), _mm256_set_m128i(four(12), four(8)));
    }
    // The low and the high word of the 64 bits of fn(lane).
    template <class Fn> static HC_INLINE void each_pair(Fn&& fn, I& low, I& high) {
        const auto two = [&](int lane) HC_INLINE_LAMBDA {
            return _mm_set_epi64x((long long)fn(lane + 1), (long long)fn(lane));
        };
        const auto eight = [&](int lane) HC_INLINE_LAMBDA {
            return _mm512_castsi512_ps(halves(_mm256_set_m128i(two(lane + 4), two(lane)),
                                              _mm256_set_m128i(two(lane + 12), two(lane + 8))));
        };
        const F a = eight(0), b = eight(2);
        low = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88));
        high = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd));
    }
    // Eight lanes from one half, eight from another, without memory between: a load that spans two stores
    // waits until both are in the cache.
    static HC_INLINE I halves(__m256i low, __m256i high) {
        return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
    static HC_INLINE I load_halves(const uint8_t* low, const uint8_t* high) {
        return halves(_mm256_loadu_si256((const __m256i*)low), _mm256_loadu_si256((const __m256i*)high));
    }
    static HC_INLINE I load_u8_halves(const uint8_t* low, const uint8_t* high) {
        return _mm512_cvtepu8_epi32(
            _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i*)low), _mm_loadl_epi64((const __m128i*)high)));
    }
    static HC_INLINE F f16_halves(uint16_t low, uint16_t high, int n) {
        const __m256i both = _mm256_set_m128i(_mm_set1_epi16(short(high)), _mm_set1_epi16(short(low)));
        return _mm512_maskz_mov_ps(mask(n), _mm512_cvtph_ps(both));
    }
    static HC_INLINE I nibble_halves(uint32_t low, uint32_t high) {
        return nibbles_of(halves(_mm256_set1_epi32(int(low)), _mm256_set1_epi32(int(high))));
    }
    // The even words and the odd ones, eight of each from `low`, then from `high`.
    static HC_INLINE void load_pair_halves(const uint8_t* low, const uint8_t* high, I& even, I& odd) {
        const I a = load_i(low), b = load_i(high);
        const I each = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        even = _mm512_permutex2var_epi32(a, each, b);
        odd = _mm512_permutex2var_epi32(a, _mm512_add_epi32(each, _mm512_set1_epi32(1)), b);
    }
    // Byte N of each lane, four times.
    template <int N> static I spread_byte(I v) {
        const __m128i first = _mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c);
        return _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(_mm_add_epi8(first, _mm_set1_epi8(N))));
    }
    // Bytes of x, negated if the byte of `v` has the bit of the byte of `bits`.
    static I negative_where(I x, I v, I bits) {
        return _mm512_mask_sub_epi8(x, _mm512_test_epi8_mask(v, bits), _mm512_setzero_si512(), x);
    }
    static void store_i8(int8_t* p, I v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(v)); }
    static I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
    static I bit_or(I a, I b) { return _mm512_or_si512(a, b); }
    static I bit_xor(I a, I b) { return _mm512_xor_si512(a, b); }
    static I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
    static I sub_i(I a, I b) { return _mm512_sub_epi32(a, b); }
    template <int N> static I shl(I a) { return _mm512_slli_epi32(a, N); }
    template <int N> static I shr(I a) { return _mm512_srli_epi32(a, N); }
    template <int N> static I sar(I a) { return _mm512_srai_epi32(a, N); }
    static F to_float(I a) { return _mm512_cvtepi32_ps(a); }
    static I to_int(F a) { return _mm512_cvtps_epi32(a); }
    static F as_float(I a) { return _mm512_castsi512_ps(a); }

    // Byte dot products, four in each lane: acc + the products of at most words_at_once words of codes,
    // prepared by dot_code, with as many words of x. dot_begin makes the first sum.
    using Dots = I;
    static constexpr int words_at_once(int) { return 8; }
    template <bool Signed> static I dot_code(I w) {
        return Signed ? _mm512_xor_si512(w, _mm512_set1_epi8(char(0x80))) : w;
    }
    static I dot_begin(I acc) { return acc; }
    template <bool Signed> static I dot_add(I sum, I code, I x) { return _mm512_dpbusd_epi32(sum, code, x); }
    static I dot_end(I, I sum) { return sum; }
    static HC_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }  // into L1
    static HC_INLINE void prefetch_l2(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
};

}  // namespace
}  // namespace hc
