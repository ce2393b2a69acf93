// Sixteen bytes at a time, for packing. Uses instructions that every processor of an architecture has (SSE2,
// NEON), so needs no choice at run time; plain loops elsewhere and with HC_PLAIN_BYTES.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(HC_PLAIN_BYTES)
#elif defined(__SSE2__) || defined(_M_X64)
#define HC_BYTES_SSE2
#include <emmintrin.h>
#elif defined(__aarch64__) || defined(_M_ARM64)
#define HC_BYTES_NEON
#include <arm_neon.h>
#endif

namespace hc {
namespace {

#if defined(HC_BYTES_SSE2)

struct Bytes16 {
    __m128i v;
};
inline Bytes16 load(const uint8_t* p) { return {_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))}; }
inline Bytes16 words_of(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return {_mm_set_epi32(int(d), int(c), int(b), int(a))};
}
inline void store(uint8_t* p, Bytes16 a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), a.v); }
inline Bytes16 fill(uint8_t byte) { return {_mm_set1_epi8(char(byte))}; }
inline Bytes16 operator&(Bytes16 a, Bytes16 b) { return {_mm_and_si128(a.v, b.v)}; }
inline Bytes16 operator|(Bytes16 a, Bytes16 b) { return {_mm_or_si128(a.v, b.v)}; }
inline Bytes16 operator^(Bytes16 a, Bytes16 b) { return {_mm_xor_si128(a.v, b.v)}; }
template <int N> Bytes16 shl(Bytes16 a) { return {_mm_slli_epi32(a.v, N)}; }
template <int N> Bytes16 shr(Bytes16 a) { return {_mm_srli_epi32(a.v, N)}; }
template <int Size> Bytes16 zip_low(Bytes16 a, Bytes16 b) {
    if constexpr (Size == 1) return {_mm_unpacklo_epi8(a.v, b.v)};
    if constexpr (Size == 2) return {_mm_unpacklo_epi16(a.v, b.v)};
    if constexpr (Size == 4) return {_mm_unpacklo_epi32(a.v, b.v)};
    if constexpr (Size == 8) return {_mm_unpacklo_epi64(a.v, b.v)};
}
template <int Size> Bytes16 zip_high(Bytes16 a, Bytes16 b) {
    if constexpr (Size == 1) return {_mm_unpackhi_epi8(a.v, b.v)};
    if constexpr (Size == 2) return {_mm_unpackhi_epi16(a.v, b.v)};
    if constexpr (Size == 4) return {_mm_unpackhi_epi32(a.v, b.v)};
    if constexpr (Size == 8) return {_mm_unpackhi_epi64(a.v, b.v)};
}

#elif defined(HC_BYTES_NEON)

struct Bytes16 {
    uint8x16_t v;
};
inline Bytes16 load(const uint8_t* p) { return {vld1q_u8(p)}; }
inline Bytes16 words_of(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const uint64x2_t pairs =
        vcombine_u64(vcreate_u64(a | uint64_t(b) << 32), vcreate_u64(c | uint64_t(d) << 32));
    return {vreinterpretq_u8_u64(pairs)};
}
inline void store(uint8_t* p, Bytes16 a) { vst1q_u8(p, a.v); }
inline Bytes16 fill(uint8_t byte) { return {vdupq_n_u8(byte)}; }
inline Bytes16 operator&(Bytes16 a, Bytes16 b) { return {vandq_u8(a.v, b.v)}; }
inline Bytes16 operator|(Bytes16 a, Bytes16 b) { return {vorrq_u8(a.v, b.v)}; }
inline Bytes16 operator^(Bytes16 a, Bytes16 b) { return {veorq_u8(a.v, b.v)}; }
template <int N> Bytes16 shl(Bytes16 a) {
    return {vreinterpretq_u8_u32(vshlq_n_u32(vreinterpretq_u32_u8(a.v), N))};
}
template <int N> Bytes16 shr(Bytes16 a) {
    return {vreinterpretq_u8_u32(vshrq_n_u32(vreinterpretq_u32_u8(a.v), N))};
}
template <int Size> Bytes16 zip_low(Bytes16 a, Bytes16 b) {
    if constexpr (Size == 1) return {vzip1q_u8(a.v, b.v)};
    if constexpr (Size == 2)
        return {vreinterpretq_u8_u16(vzip1q_u16(vreinterpretq_u16_u8(a.v), vreinterpretq_u16_u8(b.v)))};
    if constexpr (Size == 4)
        return {vreinterpretq_u8_u32(vzip1q_u32(vreinterpretq_u32_u8(a.v), vreinterpretq_u32_u8(b.v)))};
    if constexpr (Size == 8)
        return {vreinterpretq_u8_u64(vzip1q_u64(vreinterpretq_u64_u8(a.v), vreinterpretq_u64_u8(b.v)))};
}
template <int Size> Bytes16 zip_high(Bytes16 a, Bytes16 b) {
    if constexpr (Size == 1) return {vzip2q_u8(a.v, b.v)};
    if constexpr (Size == 2)
        return {vreinterpretq_u8_u16(vzip2q_u16(vreinterpretq_u16_u8(a.v), vreinterpretq_u16_u8(b.v)))};
    if constexpr (Size == 4)
        return {vreinterpretq_u8_u32(vzip2q_u32(vreinterpretq_u32_u8(a.v), vreinterpretq_u32_u8(b.v)))};
    if constexpr (Size == 8)
        return {vreinterpretq_u8_u64(vzip2q_u64(vreinterpretq_u64_u8(a.v), vreinterpretq_u64_u8(b.v)))};
}

#else

struct Bytes16 {
    uint8_t v[16];
};
inline Bytes16 load(const uint8_t* p) {
    Bytes16 a;
    std::memcpy(a.v, p, 16);
    return a;
}
inline Bytes16 words_of(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const uint32_t words[4] = {a, b, c, d};
    Bytes16 all;
    std::memcpy(all.v, words, 16);
    return all;
}
inline void store(uint8_t* p, Bytes16 a) { std::memcpy(p, a.v, 16); }
inline Bytes16 fill(uint8_t byte) {
    Bytes16 a;
    std::memset(a.v, byte, 16);
    return a;
}
template <class Fn> Bytes16 each_word(Bytes16 a, Bytes16 b, Fn fn) {
    uint32_t x[4], y[4];
    std::memcpy(x, a.v, 16);
    std::memcpy(y, b.v, 16);
    for (int i = 0; i < 4; ++i) x[i] = fn(x[i], y[i]);
    std::memcpy(a.v, x, 16);
    return a;
}
inline Bytes16 operator&(Bytes16 a, Bytes16 b) {
    return each_word(a, b, [](uint32_t x, uint32_t y) { return x & y; });
}
inline Bytes16 operator|(Bytes16 a, Bytes16 b) {
    return each_word(a, b, [](uint32_t x, uint32_t y) { return x | y; });
}
inline Bytes16 operator^(Bytes16 a, Bytes16 b) {
    return each_word(a, b, [](uint32_t x, uint32_t y) { return x ^ y; });
}
template <int N> Bytes16 shl(Bytes16 a) {
    return each_word(a, a, [](uint32_t x, uint32_t) { return x << N; });
}
template <int N> Bytes16 shr(Bytes16 a) {
    return each_word(a, a, [](uint32_t x, uint32_t) { return x >> N; });
}
template <int Size> Bytes16 zip(const uint8_t* a, const uint8_t* b) {
    Bytes16 c;
    for (int i = 0; i < 8; i += Size) {
        std::memcpy(c.v + 2 * i, a + i, Size);
        std::memcpy(c.v + 2 * i + Size, b + i, Size);
    }
    return c;
}
template <int Size> Bytes16 zip_low(Bytes16 a, Bytes16 b) { return zip<Size>(a.v, b.v); }
template <int Size> Bytes16 zip_high(Bytes16 a, Bytes16 b) { return zip<Size>(a.v + 8, b.v + 8); }

#endif

// Transposes rows of 16 bytes: 16 / Size rows of equally many elements.
template <int Size> void transpose(Bytes16 (&rows)[16 / Size]) {
    constexpr int n = 16 / Size;
    for (int round = 1; round < n; round *= 2) {
        Bytes16 next[n];
        for (int i = 0; i < n / 2; ++i) {
            next[2 * i] = zip_low<Size>(rows[i], rows[i + n / 2]);
            next[2 * i + 1] = zip_high<Size>(rows[i], rows[i + n / 2]);
        }
        for (int i = 0; i < n; ++i) rows[i] = next[i];
    }
}

// Exchanges, in every byte, the bits of `mask` in b with the bits N higher in a.
template <int N> void exchange(Bytes16& a, Bytes16& b, uint8_t mask) {
    const Bytes16 differ = (shr<N>(a) ^ b) & fill(mask);
    b = b ^ differ;
    a = a ^ shl<N>(differ);
}

// Exchanges, in every word, the bits of `mask` with the bits N higher.
template <int N> void exchange_within(Bytes16& words, uint32_t mask) {
    const Bytes16 differ = (shr<N>(words) ^ words) & words_of(mask, mask, mask, mask);
    words = words ^ differ ^ shl<N>(differ);
}

}  // namespace
}  // namespace hc
