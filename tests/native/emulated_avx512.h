// AVX-512's intrinsics without such a processor, by SIMDe (Debian's libsimde-dev 0.7.4) and, where
// SIMDe lacks them, by loops. Included before everything where HOTCOLD_EMULATE_AVX512 is set: see
// CONTRIBUTING.md.
#pragma once
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include <cmath>
#include <cstdint>
#include <cstring>

// Emulated vectors fit in no register, which the compiler's order of sums is held by.
#define HC_IN_ORDER(vector)

namespace emulated {

template <class To, class From> inline To bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
template <class T, int N> struct Lanes {
    T at[N];
};

// Lanes of T that the mask names, the others 0.
template <class V, class T, int N> inline V load(uint32_t mask, const void* from) {
    Lanes<T, N> to{};
    for (int i = 0; i < N; ++i)
        if (mask >> i & 1) std::memcpy(to.at + i, static_cast<const T*>(from) + i, sizeof(T));
    return bits<V>(to);
}
template <class T, int N, class V> inline void store(void* to, uint32_t mask, V v) {
    const auto from = bits<Lanes<T, N>>(v);
    for (int i = 0; i < N; ++i)
        if (mask >> i & 1) std::memcpy(static_cast<T*>(to) + i, from.at + i, sizeof(T));
}
// Each of sixteen lanes as another type, by fn.
template <class To, class U, class T, class V, class Fn> inline To each(V v, Fn fn) {
    const auto from = bits<Lanes<T, 16>>(v);
    Lanes<U, 16> to;
    for (int i = 0; i < 16; ++i) to.at[i] = fn(from.at[i]);
    return bits<To>(to);
}
inline __m512 from_halves(__m256i v) {
    const auto half = bits<Lanes<__m128i, 2>>(v);
    return bits<__m512>(Lanes<__m256, 2>{{_mm256_cvtph_ps(half.at[0]), _mm256_cvtph_ps(half.at[1])}});
}
inline __m256i to_halves(__m512 v) {
    const auto part = bits<Lanes<__m256, 2>>(v);
    return bits<__m256i>(Lanes<__m128i, 2>{{_mm256_cvtps_ph(part.at[0], 0), _mm256_cvtps_ph(part.at[1], 0)}});
}
inline __m512 permute(__m512 v, int control) {
    const auto from = bits<Lanes<float, 16>>(v);
    Lanes<float, 16> to;
    for (int i = 0; i < 16; ++i) to.at[i] = from.at[i / 4 * 4 + (control >> 2 * (i % 4) & 3)];
    return bits<__m512>(to);
}
inline __m512 shuffle(__m512 a, __m512 b, int control) {
    const auto first = bits<Lanes<__m128, 4>>(a), second = bits<Lanes<__m128, 4>>(b);
    Lanes<__m128, 4> to;
    for (int i = 0; i < 4; ++i) to.at[i] = (i < 2 ? first : second).at[control >> 2 * i & 3];
    return bits<__m512>(to);
}
inline float most(__m512 v) {
    const auto from = bits<Lanes<float, 16>>(v);
    float found = from.at[0];
    for (float value : from.at) found = value > found ? value : found;
    return found;
}
inline __m256 part(__m512 v, int i) { return bits<Lanes<__m256, 2>>(v).at[i & 1]; }

}  // namespace emulated

#define _mm512_maskz_loadu_ps emulated::load<__m512, float, 16>
#define _mm512_maskz_loadu_epi32 emulated::load<__m512i, int32_t, 16>
#define _mm256_maskz_loadu_epi16 emulated::load<__m256i, int16_t, 16>
#define _mm_maskz_loadu_epi8 emulated::load<__m128i, int8_t, 16>
#define _mm512_mask_storeu_ps emulated::store<float, 16, __m512>
#define _mm256_mask_storeu_epi16 emulated::store<int16_t, 16, __m256i>
#define _mm512_cvtepi32_epi8(v) \
    emulated::each<__m128i, int8_t, int32_t>(v, [](int32_t x) { return int8_t(x); })
#define _mm512_cvtepi32_ps(v) emulated::each<__m512, float, int32_t>(v, [](int32_t x) { return float(x); })
#define _mm512_cvtps_epi32(v) \
    emulated::each<__m512i, int32_t, float>(v, [](float x) { return int32_t(std::nearbyint(x)); })
#define _mm512_cvtepi8_epi32(v) \
    emulated::each<__m512i, int32_t, int8_t>(v, [](int8_t x) { return int32_t(x); })
#define _mm512_cvtepu8_epi32(v) \
    emulated::each<__m512i, int32_t, uint8_t>(v, [](uint8_t x) { return int32_t(x); })
#define _mm512_cvtepu16_epi32(v) \
    emulated::each<__m512i, int32_t, uint16_t>(v, [](uint16_t x) { return int32_t(x); })
#define _mm512_srai_epi32(v, count) \
    emulated::each<__m512i, int32_t, int32_t>(v, [](int32_t x) { return x >> (count); })
#define _mm512_cvtph_ps emulated::from_halves
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(v, rounding) emulated::to_halves(v)
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps emulated::part
#undef _mm512_permute_ps
#define _mm512_permute_ps emulated::permute
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4 emulated::shuffle
#define _mm512_reduce_max_ps emulated::most
