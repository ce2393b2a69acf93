// AVX2 with FMA and F16C; also with byte dot products in one instruction: AVX-VNNI, or for tests its
// AVX-512VL twin.
#pragma once
#include <immintrin.h>

#include <cstring>

namespace hc {
namespace {

#if defined(HC_ISA_AVXVNNI)
#define HC_DPBUSD _mm256_dpbusd_avx_epi32
#elif defined(HC_ISA_AVXVNNI_EVEX)
#define HC_DPBUSD _mm256_dpbusd_epi32
#endif

struct Vec {
#if defined(HC_ISA_AVXVNNI)
    static constexpr const char* name = "avxvnni";
#elif defined(HC_ISA_AVXVNNI_EVEX)
    static constexpr const char* name = "avxvnni_evex";
#else
    static constexpr const char* name = "avx2";
#endif
    static constexpr int width = 8;
    static constexpr int accumulators = 4;
    static constexpr int row_tile = 1, token_tile = 4, plain_rows = 3, plain_tile = 4, down_tile = 8;
    static constexpr int decoded_rows = 2, decoded_tokens = 4;  // a tile of row_tiles.h
    // In a slice of columns of plain rows from memory.
    static constexpr int cold_steps(int bytes) { return bytes > 2 ? 4 : 16; }
    static constexpr int panel_vectors = 8;  // sums that panel_axpy keeps in registers
    static constexpr int attend_rows = 6, attend_keys = 2, attend_values = 2;  // tiles of attention_block
#ifdef HC_DPBUSD
    static constexpr int signed_offset = 128;  // bias that dot_code adds to signed codes
#else
    static constexpr int signed_offset = 0;
#endif
    using F = __m256;
    using I = __m256i;

    static I mask(int n) {
        return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    }
    // Builds the vector in registers. 16-bit stores followed by one wide load would wait for store
    // forwarding, as long as a dot product of the row's last blocks. Only rows that do not fill whole vectors
    // need this load.
    static __m128i load_u16(const uint16_t* p, int n) {
        if (n == 4) return _mm_loadl_epi64((const __m128i*)p);
        if (n == 2) {
            int pair;
            std::memcpy(&pair, p, 4);
            return _mm_cvtsi32_si128(pair);
        }
        const __m128i even = _mm_cmpgt_epi32(_mm_set1_epi32(n / 2), _mm_setr_epi32(0, 1, 2, 3));
        const __m128i pairs = _mm_maskload_epi32((const int*)p, even);
        if (n % 2 == 0) return pairs;
        const __m128i last =
            _mm_cmpeq_epi16(_mm_set1_epi16(short(n - 1)), _mm_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7));
        return _mm_or_si128(pairs, _mm_and_si128(last, _mm_set1_epi16(short(p[n - 1]))));
    }
    static F zero() { return _mm256_setzero_ps(); }
    static F set1(float v) { return _mm256_set1_ps(v); }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static F load(const float* p, int n) { return _mm256_maskload_ps(p, mask(n)); }
    static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
    static void store(float* p, F v, int n) {  // masked stores are slow on AMD: tens of cycles
        if (n == width) return store(p, v);
        _mm256_maskstore_ps(p, mask(n), v);
    }
    static F load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
    static F load_f16(const uint16_t* p, int n) { return _mm256_cvtph_ps(load_u16(p, n)); }
    static F set1_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_set1_epi16(short(*p))); }
    static F from_bf16(__m128i v) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
    }
    static F load_bf16(const uint16_t* p) { return from_bf16(_mm_loadu_si128((const __m128i*)p)); }
    static F load_bf16(const uint16_t* p, int n) { return from_bf16(load_u16(p, n)); }
    static void store_f16(uint16_t* p, F v, int n) {
        const __m128i half = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
        if (n == width) return _mm_storeu_si128((__m128i*)p, half);
        alignas(16) uint16_t h[8];
        _mm_store_si128((__m128i*)h, half);
        for (int i = 0; i < n; ++i) p[i] = h[i];
    }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }
    static F min(F a, F b) { return _mm256_min_ps(a, b); }
    static F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
    static F greater(F a, F b, F value) { return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ), value); }
    static float sum(F v) {
        const __m128 b = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
        return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
    }
    // sum() of each of four vectors.
    static HC_INLINE void sum4(const F (&v)[4], float* to) {
        const F a =
            _mm256_add_ps(_mm256_permute2f128_ps(v[0], v[1], 0x20), _mm256_permute2f128_ps(v[0], v[1], 0x31));
        const F b =
            _mm256_add_ps(_mm256_permute2f128_ps(v[2], v[3], 0x20), _mm256_permute2f128_ps(v[2], v[3], 0x31));
        const F two = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
        const F one = _mm256_add_ps(_mm256_shuffle_ps(two, two, 0x88), _mm256_shuffle_ps(two, two, 0xdd));
        _mm_storeu_ps(to, _mm_unpacklo_ps(_mm256_castps256_ps128(one), _mm256_extractf128_ps(one, 1)));
    }
    static float max_of(F v) {
        const __m128 b = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
        return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
    }
    // The lane that is leaf k of sum()'s tree, and the leaf of lane k: k's three bits reversed.
    static constexpr int sum_order(int k) { return k % 2 * 4 + k / 2 % 2 * 2 + k / 4; }
    // Lane i of to[j]: from[i * stride + j].
    static HC_INLINE void transpose4(const float* from, int64_t stride, F (&to)[4]) {
        F row[4];  // row r of each group of four
        for (int r = 0; r < 4; ++r) {
            const F v = _mm256_castps128_ps256(_mm_loadu_ps(from + r * stride));
            row[r] = _mm256_insertf128_ps(v, _mm_loadu_ps(from + (r + 4) * stride), 1);
        }
        const F a = _mm256_unpacklo_ps(row[0], row[1]), b = _mm256_unpackhi_ps(row[0], row[1]);
        const F c = _mm256_unpacklo_ps(row[2], row[3]), d = _mm256_unpackhi_ps(row[2], row[3]);
        to[0] = _mm256_shuffle_ps(a, c, 0x44);
        to[1] = _mm256_shuffle_ps(a, c, 0xee);
        to[2] = _mm256_shuffle_ps(b, d, 0x44);
        to[3] = _mm256_shuffle_ps(b, d, 0xee);
    }

    static I zero_i() { return _mm256_setzero_si256(); }
    static I set1_i(int v) { return _mm256_set1_epi32(v); }
    static I load_i(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
    static I load_i(const void* p, int n) { return _mm256_maskload_epi32((const int*)p, mask(n)); }
    // The same for a constant number: a masked load is several times slower on AMD's processors.
    static constexpr bool loads_first = true;
    template <int N> static HC_INLINE I load_first(const void* p) {
        static_assert(N == 2 || N == 4 || N == 6, "whole loads");
        if constexpr (N == 2) return _mm256_zextsi128_si256(_mm_loadl_epi64((const __m128i*)p));
        const I low = _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i*)p));
        if constexpr (N == 4) return low;
        return _mm256_inserti128_si256(low, _mm_loadl_epi64((const __m128i*)p + 1), 1);
    }
    // Half a vector twice; the low halves of two vectors; the high halves of two.
    static F load_twice(const float* p) { return _mm256_broadcast_ps((const __m128*)p); }
    static I load_twice_i(const void* p) {
        return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
    }
    static F low_halves(F a, F b) { return _mm256_insertf128_ps(a, _mm256_castps256_ps128(b), 1); }
    static I low_halves(I a, I b) { return _mm256_inserti128_si256(a, _mm256_castsi256_si128(b), 1); }
    static F high_halves(F a, F b) { return _mm256_permute2f128_ps(a, b, 0x31); }
    // sum() of two vectors, given by their low and high halves.
    static HC_INLINE void sum_halves(F low, F high, float& a, float& b) {
        const F two = _mm256_add_ps(low, high);
        const F one = _mm256_add_ps(two, _mm256_permute_ps(two, 0xee));
        const F all = _mm256_add_ps(one, _mm256_permute_ps(one, 0x55));
        a = _mm256_cvtss_f32(all);
        b = _mm_cvtss_f32(_mm256_extractf128_ps(all, 1));
    }
    static HC_INLINE __m128i load_bytes(const uint8_t* p, int n) {
        uint64_t v = 0;
        std::memcpy(&v, p, size_t(n));
        return _mm_cvtsi64_si128((long long)v);
    }
    static HC_INLINE I load_u8(const uint8_t* p, int n) { return _mm256_cvtepu8_epi32(load_bytes(p, n)); }
    static HC_INLINE I load_i8(const uint8_t* p, int n) { return _mm256_cvtepi8_epi32(load_bytes(p, n)); }
    // Lane i: the half, or nibble i of the 32-bit word, of super-block at / 8; at is a multiple of 8.
    static F spread_f16(const uint16_t* p, int64_t at, int) {
        return _mm256_cvtph_ps(_mm_set1_epi16(short(p[at / 8])));
    }
    static I spread_nibbles(const uint8_t* p, int64_t at, int) {
        int word;
        std::memcpy(&word, p + at / 8 * 4, 4);
        const I shifted =
            _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
        return _mm256_and_si256(shifted, _mm256_set1_epi32(15));
    }
    static I lookup(I nibbles, const int8_t* table) {
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)),
                                   nibbles);
    }
    // Lane i: fn(i). Blends of broadcasts: an insertion needs one of the few units that shuffle.
    template <class Fn> static HC_INLINE I each_word(Fn&& fn) {
        const auto at = [&](int lane) HC_INLINE_LAMBDA { return _mm_set1_epi32(int(fn(lane))); };
        const auto four = [&](int lane) HC_INLINE_LAMBDA {
            return _mm_blend_epi32(_mm_blend_epi32(at(lane), at(lane + 1), 2),
                                   _mm_blend_epi32(at(lane + 2), at(lane + 3), 8), 12);
        };
        return _mm256_set_m128i(four(4), four(0));
    }
    // The low and the high word of the 64 bits of fn(lane).
    template <class Fn> static HC_INLINE void each_pair(Fn&& fn, I& low, I& high) {
        const auto at = [&](int lane) HC_INLINE_LAMBDA { return (long long)fn(lane); };
        const F a = _mm256_castsi256_ps(_mm256_setr_epi64x(at(0), at(1), at(4), at(5)));
        const F b = _mm256_castsi256_ps(_mm256_setr_epi64x(at(2), at(3), at(6), at(7)));
        low = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88));
        high = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd));
    }
    // The even words and the odd ones.
    static HC_INLINE void load_pairs(const uint8_t* p, I& even, I& odd) {
        const I a = load_i(p), b = load_i(p + 32);
        const F low = _mm256_castsi256_ps(_mm256_permute2x128_si256(a, b, 0x20));
        const F high = _mm256_castsi256_ps(_mm256_permute2x128_si256(a, b, 0x31));
        even = _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0x88));
        odd = _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xdd));
    }
    // Byte N of each lane, four times.
    template <int N> static I spread_byte(I v) {
        return _mm256_shuffle_epi8(
            v, _mm256_add_epi8(_mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404,
                                                 0x08080808, 0x0c0c0c0c),
                               _mm256_set1_epi8(N)));
    }
    // Bytes of x, negated if the byte of `v` has the bit of the byte of `bits`.
    static I negative_where(I x, I v, I bits) {
        const I mask = _mm256_cmpeq_epi8(_mm256_and_si256(v, bits), bits);
        return _mm256_sub_epi8(_mm256_xor_si256(x, mask), mask);
    }
    static void store_i8(int8_t* p, I v) {
        const I low = _mm256_shuffle_epi8(v, _mm256_set1_epi32(0x0c080400));
        const int words[2] = {_mm256_extract_epi32(low, 0), _mm256_extract_epi32(low, 4)};
        std::memcpy(p, words, 8);
    }
    static I bit_and(I a, I b) { return _mm256_and_si256(a, b); }
    static I bit_or(I a, I b) { return _mm256_or_si256(a, b); }
    static I bit_xor(I a, I b) { return _mm256_xor_si256(a, b); }
    static I add_i(I a, I b) { return _mm256_add_epi32(a, b); }
    static I sub_i(I a, I b) { return _mm256_sub_epi32(a, b); }
    template <int N> static I shl(I a) { return _mm256_slli_epi32(a, N); }
    template <int N> static I shr(I a) { return _mm256_srli_epi32(a, N); }
    template <int N> static I sar(I a) { return _mm256_srai_epi32(a, N); }
    static F to_float(I a) { return _mm256_cvtepi32_ps(a); }
    static I to_int(F a) { return _mm256_cvtps_epi32(a); }
    static F as_float(I a) { return _mm256_castsi256_ps(a); }

    // Byte dot products, four in each lane: acc + the products of at most words_at_once words of codes,
    // prepared by dot_code, with as many words of x. dot_begin makes the first sum.
    using Dots = I;
#ifdef HC_DPBUSD
    static constexpr int words_at_once(int) { return 8; }
    template <bool Signed> static I dot_code(I w) {
        return Signed ? _mm256_xor_si256(w, _mm256_set1_epi8(char(0x80))) : w;
    }
    static I dot_begin(I acc) { return acc; }
    template <bool Signed> static I dot_add(I sum, I code, I x) { return HC_DPBUSD(sum, code, x); }
    static I dot_end(I, I sum) { return sum; }
#else
    // Sums of pairs stay in 16 bits while they fit: a pair is below 2 * 127 * 2^bits.
    static constexpr int words_at_once(int bits) { return bits <= 7 ? 1 << (7 - bits) : 1; }
    template <bool Signed> static I dot_code(I w) { return w; }
    static I dot_begin(I) { return _mm256_setzero_si256(); }
    template <bool Signed> static I dot_add(I sum, I code, I x) {
        return _mm256_add_epi16(
            sum, Signed ? _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(x, code))
                        : _mm256_maddubs_epi16(code, x));
    }
    static I dot_end(I acc, I sum) {
        return _mm256_add_epi32(acc, _mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
    }
#endif
    static HC_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }  // into L1
    static HC_INLINE void prefetch_l2(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
};

}  // namespace
}  // namespace hc
