// How each opened type becomes bytes: from a row that pack.cpp has arranged, or from a file's blocks
// unchanged.
#pragma once
#include <cstring>

#include "simd/grid_dots.h"

namespace hc {
namespace {

HC_INLINE void put_word(Opened& to, int w, int l, I word) {
    std::memcpy(to.words[w] + l, &word, sizeof word);
}
HC_INLINE void put_floats(float* to, F value) { std::memcpy(to, &value, sizeof value); }

// Calls fn(l, n) for the vectors of a group.
template <class Fn> HC_INLINE void for_vectors(int lanes, Fn&& fn) {
    for (int l = 0; l < lanes; l += Vec::width) fn(l, smaller(Vec::width, lanes - l));
}

// --- rows that are arranged: scales of all blocks, then codes by groups, lane = block ---

// Opens a group by the type's struct; narrow codes are biased by 16.
template <class B> void open_as(const uint8_t* row, int64_t blocks, int64_t block, int lanes, Opened& to) {
    const Group<B> group{row, blocks, block, lanes};
    for_vectors(lanes, [&](int l, int n) HC_INLINE_LAMBDA {
        I unit[B::units];
        group.load(l, n, unit);
        unroll<0, 8>([&](auto k) HC_INLINE_LAMBDA {
            constexpr int w = decltype(k)::value;
            const I word = B::template word<w % 4, w / 4>(unit);
            constexpr int bias = 0x01010101 * (16 - B::offset);
            put_word(to, w, l, B::signed_codes ? word : Vec::add_i(word, Vec::set1_i(bias)));
        });
        const Head head = group.head(l, n);
        put_floats(to.scale[0] + l, head.scale);
        put_floats(to.scale[1] + l, head.high_scale);
        if constexpr (B::has_minimum) {
            put_floats(to.minimum[0] + l, head.minimum);
            put_floats(to.minimum[1] + l, head.high_minimum);
        }
    });
}

// The dot product of one row with one token, which reads the codes in place: the same bits.
template <class B> void dot_as(const uint8_t* row, const Input& in, int t, float& dot, Stream& stream) {
    float out[1][1];
    dot_quantised<B, 1, 1>(&row, in, t, out, stream);
    dot = out[0][0];
}

// One scale for each of `count` blocks, or for each of their halves.
inline void put_scales(Opened& to, int lane, int count, float low, float high) {
    for (int b = lane; b < lane + count; ++b) {
        to.scale[0][b] = low;
        to.scale[1][b] = high;
    }
}

// --- rows as a file has them ---

constexpr int8_t kMinus[16] = {0, -1, -1, 0, -1, 0, 0, 0, -1};  // of one bit
// Bit i of a lane's signs: code i is negative. No code is 0. Narrow codes are biased by 16.
template <bool Narrow> void apply_signs(Opened& to, const uint32_t (&signs)[kLanes], int lanes) {
    for_vectors(lanes, [&](int l, int) HC_INLINE_LAMBDA {
        const I all = Vec::load_i(signs + l);
        unroll<0, 8>([&](auto k) HC_INLINE_LAMBDA {
            constexpr int w = decltype(k)::value;
            I bits = Vec::bit_and(Vec::shr<4 * w>(all), Vec::set1_i(15));
            bits = Vec::bit_or(bits, Vec::shl<8>(bits));
            bits = Vec::bit_and(Vec::bit_or(bits, Vec::shl<16>(bits)), Vec::set1_i(0x08040201));
            const I mask = Vec::lookup(bits, kMinus), word = Vec::load_i(to.words[w] + l);
            const I one = Vec::set1_i(0x01010101), first = Vec::set1_i(0x0f0f0f0f);
            const I flip = Narrow ? Vec::bit_and(mask, first) : mask;
            I addend = Vec::bit_and(mask, one);
            if constexpr (Narrow)
                addend = Vec::bit_xor(Vec::bit_and(mask, Vec::set1_i(0x11111111)), Vec::set1_i(0x10101010));
            put_word(to, w, l, Vec::add_i(Vec::bit_xor(word, flip), addend));
        });
    });
}

// Opens blocks of 256 weights one by one: fn(block, lane) for the first of eight lanes.
template <int Bytes, class Fn>
HC_INLINE void for_supers(const uint8_t* row, int64_t block, int lanes, Fn&& fn) {
    const uint8_t* at = row + block / 8 * Bytes;
    for (int l = 0; l < lanes; l += 8, at += Bytes) fn(at, l);
}

// Seven signs; the sign of the eighth code makes their number even.
inline uint32_t eight_signs(uint32_t seven) {
    seven &= 127;
    const uint32_t odd = 0x6996u >> ((seven ^ seven >> 4) & 15) & 1;
    return seven | odd << 7;
}
// Signs of four groups of eight codes, from fields of seven bits.
inline uint32_t all_signs(uint32_t fields) {
    uint32_t signs = 0;
    for (int i = 0; i < 4; ++i) signs |= eight_signs(fields >> 7 * i) << 8 * i;
    return signs;
}

inline void put_eight(Opened& to, int lane, int i, uint64_t codes) {
    to.words[2 * i][lane] = uint32_t(codes);
    to.words[2 * i + 1][lane] = uint32_t(codes >> 32);
}

inline void open_iq3_xxs(const uint8_t* row, int64_t, int64_t block, int lanes, Opened& to) {
    alignas(64) uint32_t signs[kLanes];
    for_supers<98>(row, block, lanes, [&](const uint8_t* at, int l) {
        const float d = half_at(at);
        for (int b = 0; b < 8; ++b) {
            for (int w = 0; w < 8; ++w) to.words[w][l + b] = kGridIQ3_XXS.at[at[2 + 8 * b + w]];
            const uint32_t fields = word_of(at + 66 + 4 * b);
            signs[l + b] = all_signs(fields);
            const float scale = d * (0.5f + float(fields >> 28)) * 0.5f;
            put_scales(to, l + b, 1, scale, scale);
        }
    });
    apply_signs<false>(to, signs, lanes);
}

inline void open_iq3_s(const uint8_t* row, int64_t, int64_t block, int lanes, Opened& to) {
    alignas(64) uint32_t signs[kLanes];
    for_supers<110>(row, block, lanes, [&](const uint8_t* at, int l) {
        const float d = half_at(at);
        for (int b = 0; b < 8; ++b) {
            const uint32_t high = at[66 + b];
            for (int w = 0; w < 8; ++w)
                to.words[w][l + b] = kGridIQ3_S.at[at[2 + 8 * b + w] | (high << (8 - w) & 256)];
            signs[l + b] = word_of(at + 74 + 4 * b);
            const float scale = d * float(1 + 2 * (at[106 + b / 2] >> 4 * (b % 2) & 15));
            put_scales(to, l + b, 1, scale, scale);
        }
    });
    apply_signs<true>(to, signs, lanes);
}

inline float quarter_scale(float d, int code) { return d * (0.5f + float(code)) * 0.25f; }

inline void open_iq2_xxs(const uint8_t* row, int64_t, int64_t block, int lanes, Opened& to) {
    alignas(64) uint32_t signs[kLanes];
    for_supers<66>(row, block, lanes, [&](const uint8_t* at, int l) {
        const float d = half_at(at);
        for (int b = 0; b < 8; ++b) {
            for (int i = 0; i < 4; ++i) put_eight(to, l + b, i, kGridIQ2_XXS.at[at[2 + 8 * b + i]]);
            const uint32_t fields = word_of(at + 6 + 8 * b);
            signs[l + b] = all_signs(fields);
            const float scale = quarter_scale(d, int(fields >> 28));
            put_scales(to, l + b, 1, scale, scale);
        }
    });
    apply_signs<false>(to, signs, lanes);
}

inline void open_iq2_xs(const uint8_t* row, int64_t, int64_t block, int lanes, Opened& to) {
    alignas(64) uint32_t signs[kLanes];
    for_supers<74>(row, block, lanes, [&](const uint8_t* at, int l) {
        const float d = half_at(at);
        for (int b = 0; b < 8; ++b) {
            uint32_t all = 0;
            for (int i = 0; i < 4; ++i) {
                const uint32_t code = half_word(at + 2 + 8 * b + 2 * i);
                put_eight(to, l + b, i, kGridIQ2_XS.at[code & 511]);
                all |= eight_signs(code >> 9) << 8 * i;
            }
            signs[l + b] = all;
            const int scales = at[66 + b];
            put_scales(to, l + b, 1, quarter_scale(d, scales & 15), quarter_scale(d, scales >> 4));
        }
    });
    apply_signs<false>(to, signs, lanes);
}

inline void open_iq2_s(const uint8_t* row, int64_t, int64_t block, int lanes, Opened& to) {
    alignas(64) uint32_t signs[kLanes];
    for_supers<82>(row, block, lanes, [&](const uint8_t* at, int l) {
        const float d = half_at(at);
        for (int b = 0; b < 8; ++b) {
            const uint32_t high = at[66 + b];
            for (int i = 0; i < 4; ++i)
                put_eight(to, l + b, i, kGridIQ2_S.at[at[2 + 4 * b + i] | (high << (8 - 2 * i) & 0x300)]);
            signs[l + b] = word_of(at + 34 + 4 * b);
            const int scales = at[74 + b];
            put_scales(to, l + b, 1, quarter_scale(d, scales & 15), quarter_scale(d, scales >> 4));
        }
    });
    apply_signs<false>(to, signs, lanes);
}

// Eight codes of IQ1's grid, plus or minus one.
inline uint64_t with_delta(uint64_t codes, bool minus) {
    constexpr uint64_t ones = 0x0101010101010101;
    return minus ? codes - ones : codes + ones;
}

inline void open_iq1_s(const uint8_t* row, int64_t, int64_t block, int lanes, Opened& to) {
    for_supers<50>(row, block, lanes, [&](const uint8_t* at, int l) {
        const float d = half_at(at);
        for (int b = 0; b < 8; ++b) {
            const uint32_t high = half_word(at + 34 + 2 * b);
            for (int i = 0; i < 4; ++i)
                put_eight(to, l + b, i,
                          with_delta(kGridIQ1.at[at[2 + 4 * b + i] | (high >> 3 * i & 7) << 8], high >> 15));
            const float scale = d * float(2 * (high >> 12 & 7) + 1) * 0.125f;
            put_scales(to, l + b, 1, scale, scale);
        }
    });
}

inline void open_iq1_m(const uint8_t* row, int64_t, int64_t block, int lanes, Opened& to) {
    for_supers<56>(row, block, lanes, [&](const uint8_t* at, int l) {
        uint32_t scales[4], half = 0;
        for (int i = 0; i < 4; ++i) {
            scales[i] = half_word(at + 48 + 2 * i);
            half |= scales[i] >> 12 << 4 * i;
        }
        const uint8_t bytes[2] = {uint8_t(half), uint8_t(half >> 8)};
        const float d = half_at(bytes);
        for (int b = 0; b < 8; ++b) {
            for (int i = 0; i < 4; ++i) {
                const uint32_t high = at[32 + 2 * b + i / 2] >> 4 * (i % 2);
                put_eight(to, l + b, i, with_delta(kGridIQ1.at[at[4 * b + i] | (high & 7) << 8], high & 8));
            }
            const uint32_t pair = scales[b / 2] >> 6 * (b % 2);
            put_scales(to, l + b, 1, d * float(2 * (pair & 7) + 1) * 0.125f,
                       d * float(2 * (pair >> 3 & 7) + 1) * 0.125f);
        }
    });
}

// Digits to base 3: a byte is the first 8 bits of a fraction.
inline void open_tq1_0(const uint8_t* row, int64_t, int64_t block, int lanes, Opened& to) {
    for_supers<54>(row, block, lanes, [&](const uint8_t* at, int l) {
        int8_t codes[256], *code = codes;
        const auto digits = [&](const uint8_t* from, int count, int digits_a_byte) {
            for (int n = 0, power = 1; n < digits_a_byte; ++n, power *= 3)
                for (int m = 0; m < count; ++m) *code++ = int8_t((uint8_t(from[m] * power) * 3 >> 8) + 15);
        };
        digits(at, 32, 5);
        digits(at + 32, 16, 5);
        digits(at + 48, 4, 4);
        for (int b = 0; b < 8; ++b)
            for (int w = 0; w < 8; ++w) std::memcpy(&to.words[w][l + b], codes + 32 * b + 4 * w, 4);
        const float d = half_at(at + 52);
        put_scales(to, l, 8, d, d);
    });
}

// An unsigned scale: three bits of fraction after four of exponent. Returns half of it, because the values
// are doubled.
inline float half_of_e4m3(int code) {
    if (code == 0x7f) return 0;
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const uint32_t power = uint32_t((exponent ? exponent : 1) + 127 - 11) << 23;
    float unit;
    std::memcpy(&unit, &power, 4);
    return unit * float(exponent ? 8 + fraction : fraction);
}

constexpr int8_t kFP4[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
inline void open_nvfp4(const uint8_t* row, int64_t, int64_t block, int lanes, Opened& to) {
    const uint8_t* at = row + block / 2 * 36;
    for (int l = 0; l < lanes; l += 2, at += 36)
        for (int b = 0; b < 2; ++b) {
            put_scales(to, l + b, 1, half_of_e4m3(at[2 * b]), half_of_e4m3(at[2 * b + 1]));
            for (int i = 0; i < 4; ++i) {
                const uint32_t pairs = word_of(at + 4 + 16 * b + 4 * i);
                const int w = i / 2 * 4 + i % 2;
                to.words[w][l + b] = pairs;
                to.words[w + 2][l + b] = pairs >> 4;
            }
        }
    for_vectors(lanes, [&](int l, int) HC_INLINE_LAMBDA {
        for (int w = 0; w < 8; ++w)
            put_word(to, w, l, Vec::lookup(TypeBase::nibbles<0>(Vec::load_i(to.words[w] + l)), kFP4));
    });
}

inline void open_q1_0(const uint8_t* row, int64_t, int64_t block, int lanes, Opened& to) {
    alignas(64) uint32_t signs[kLanes];
    const uint8_t* at = row + block / 4 * 18;
    for (int l = 0; l < lanes; l += 4, at += 18) {
        const float d = half_at(at);
        put_scales(to, l, 4, d, d);
        for (int b = 0; b < 4; ++b) {
            signs[l + b] = ~word_of(at + 2 + 4 * b);
            for (auto& word : to.words) word[l + b] = 0x01010101;
        }
    }
    apply_signs<true>(to, signs, lanes);
}

inline void open_q2_0(const uint8_t* row, int64_t, int64_t block, int lanes, Opened& to) {
    const uint8_t* at = row + block / 2 * 18;
    for (int l = 0; l < lanes; l += 2, at += 18) {
        const float d = half_at(at);
        put_scales(to, l, 2, d, d);
        for (int b = 0; b < 2; ++b)
            for (int w = 0; w < 8; ++w) {
                uint32_t codes = at[2 + 8 * b + w];
                codes = (codes | codes << 12) & 0x000f000f;
                to.words[w][l + b] = ((codes | codes << 6) & 0x03030303) + 0x0f0f0f0f;
            }
    }
}

}  // namespace

const Opening* HC_OWN(opening_of)(Type type) {
    static constexpr Opening q2_k{open_as<BlockQ2_K>, 84, true, dot_as<BlockQ2_K>},
        q3_k{open_as<BlockQ3_K>, 110, false, dot_as<BlockQ3_K>},
        iq4_xs{open_as<BlockIQ4_XS>, 136, false, dot_as<BlockIQ4_XS>},
        iq3_s{open_iq3_s, 110, false, dot_grid<GridIQ3_S>},
        iq3_xxs{open_iq3_xxs, 98, false, dot_grid<GridIQ3_XXS>},
        iq2_xxs{open_iq2_xxs, 66, false, dot_grid<GridIQ2_XXS>},
        iq2_xs{open_iq2_xs, 74, false, dot_grid<GridIQ2_XS>},
        iq2_s{open_iq2_s, 82, false, dot_grid<GridIQ2_S>}, iq1_s{open_iq1_s, 50, false},
        iq1_m{open_iq1_m, 56, false}, tq1_0{open_tq1_0, 54, false},
        tq2_0{open_as<BlockTQ2_0>, 66, false, dot_as<BlockTQ2_0>}, nvfp4{open_nvfp4, 144, false},
        q1_0{open_q1_0, 36, false}, q2_0{open_q2_0, 72, false};
    switch (type) {
        case Q2_K: return &q2_k;
        case Q3_K: return &q3_k;
        case IQ4_XS: return &iq4_xs;
        case IQ3_S: return &iq3_s;
        case IQ3_XXS: return &iq3_xxs;
        case IQ2_XXS: return &iq2_xxs;
        case IQ2_XS: return &iq2_xs;
        case IQ2_S: return &iq2_s;
        case IQ1_S: return &iq1_s;
        case IQ1_M: return &iq1_m;
        case TQ1_0: return &tq1_0;
        case TQ2_0: return &tq2_0;
        case NVFP4: return &nvfp4;
        case Q1_0: return &q1_0;
        case Q2_0: return &q2_0;
        default: return nullptr;
    }
}

}  // namespace hc
