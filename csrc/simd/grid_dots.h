// Dot products of rows whose blocks index a grid, read in the file's layout: lane = block, as everywhere.
// Entries are loaded singly, since gathers are slower on most processors; all other work is done for a whole
// vector of blocks.
#pragma once
#include <cstring>

#include "simd/block_dot.h"
#include "simd/grids.h"

namespace hc {
namespace {

inline float half_at(const uint8_t* at) {
    uint16_t half;
    std::memcpy(&half, at, 2);
    float value[Vec::width];
    Vec::store(value, Vec::set1_f16(&half));
    return value[0];
}
inline uint16_t half_word(const uint8_t* at) {
    uint16_t word;
    std::memcpy(&word, at, 2);
    return word;
}
inline uint32_t word_of(const uint8_t* at) {
    uint32_t word;
    std::memcpy(&word, at, 4);
    return word;
}

// The blocks of one vector: some of one super-block of 256 weights, or all of two. If the row ends after the
// first, it also stands for the second, with scales of 0.
template <class V> struct SupersOf {
    static constexpr int count = V::width < 8 ? 1 : V::width / 8;
    const uint8_t* at[count];
    int first, n;  // block in the super-block; lanes in use

    HC_INLINE SupersOf(const uint8_t* row, int bytes, int64_t block, int lanes)
        : first(int(block % 8)), n(lanes) {
        for (int i = 0; i < count; ++i) at[i] = row + (block / 8 + (8 * i < lanes ? i : 0)) * bytes;
    }
    HC_INLINE const uint8_t* of(int lane) const { return at[lane / 8]; }
    HC_INLINE int block(int lane) const { return V::width < 8 ? first + lane : lane % 8; }
    // Data of each block, from `offset` on. words(): a word. pairs(): two words. each_byte(): a byte.
    // nibbles(): a nibble. half(): a half of the super-block.
    HC_INLINE I words(int offset) const {
        if constexpr (count > 1)
            return V::load_halves(at[0] + offset, at[1] + offset);
        else
            return V::load_i(at[0] + offset + 4 * first);
    }
    HC_INLINE void pairs(int offset, I& even, I& odd) const {
        if constexpr (count > 1)
            V::load_pair_halves(at[0] + offset, at[1] + offset, even, odd);
        else
            V::load_pairs(at[0] + offset + 8 * first, even, odd);
    }
    HC_INLINE I each_byte(int offset) const {
        if constexpr (count > 1)
            return V::load_u8_halves(at[0] + offset, at[1] + offset);
        else
            return V::load_u8(at[0] + offset + first, V::width);
    }
    HC_INLINE I nibbles(int offset) const {
        if constexpr (count > 1)
            return V::nibble_halves(word_of(at[0] + offset), word_of(at[1] + offset));
        else
            return V::spread_nibbles(at[0] + offset, first, V::width);
    }
    HC_INLINE F half(int offset) const {
        const uint16_t low = half_word(at[0] + offset);
        if constexpr (count > 1)
            return V::f16_halves(low, half_word(at[1] + offset), n);
        else
            return V::set1_f16(&low);
    }
};
using Supers = SupersOf<Vec>;

// Four bytes of seven signs each get the sign of the eighth code, which makes the number of signs even.
HC_INLINE I with_eighth(I signs) {
    constexpr int8_t odd[16] = {0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0};
    const I folded = Vec::bit_and(Vec::bit_xor(signs, Vec::shr<4>(signs)), Vec::set1_i(0x0f0f0f0f));
    return Vec::bit_or(signs, Vec::lookup(folded, odd));
}

// The same for four adjacent fields of seven bits.
HC_INLINE I all_signs(I fields) {
    I signs = Vec::bit_and(fields, Vec::set1_i(0x7f));
    signs = Vec::bit_or(signs, Vec::bit_and(Vec::shl<1>(fields), Vec::set1_i(0x7f00)));
    signs = Vec::bit_or(signs, Vec::bit_and(Vec::shl<2>(fields), Vec::set1_i(0x7f0000)));
    signs = Vec::bit_or(signs, Vec::bit_and(Vec::shl<3>(fields), Vec::set1_i(0x7f000000)));
    return with_eighth(signs);
}

// d * (1/2 + code) * times.
HC_INLINE F half_more(F d, I code, float times) {
    return Vec::mul(Vec::mul(d, Vec::add(Vec::set1(0.5f), Vec::to_float(code))), Vec::set1(times));
}

// A type's data of some blocks: entry<W>(lane), word W of that block, or for entries with eight codes
// pair<P>(lane), words 2 P and 2 P + 1; bits of all signs; the scales of the first or second halves.
// look_ahead may prepare slow parts one vector earlier.
struct GridBlocks {
    static constexpr bool pairs = false;
    struct Ahead {};
    const Supers& supers;
    static HC_INLINE void look_ahead(const Supers&, Ahead&) {}
};

struct GridIQ3_XXS : GridBlocks {
    static constexpr int bytes = 98, code_bits = 6;
    const I fields;

    HC_INLINE GridIQ3_XXS(const Supers& s, const Ahead&) : GridBlocks{s}, fields(s.words(66)) {}
    template <int W> HC_INLINE uint32_t entry(int lane) const {
        return kGridIQ3_XXS.at[supers.of(lane)[2 + 8 * supers.block(lane) + W]];
    }
    HC_INLINE I signs() const { return all_signs(fields); }
    HC_INLINE F scale(int) const { return half_more(supers.half(0), Vec::shr<28>(fields), 0.5f); }
};

struct GridIQ2_XXS : GridBlocks {
    static constexpr int bytes = 66, code_bits = 6;
    static constexpr bool pairs = true;
    I fields;

    HC_INLINE GridIQ2_XXS(const Supers& s, const Ahead&) : GridBlocks{s} {
        I numbers;
        s.pairs(2, numbers, fields);
    }
    template <int P> HC_INLINE uint64_t pair(int lane) const {
        return kGridIQ2_XXS.at[supers.of(lane)[2 + 8 * supers.block(lane) + P]];
    }
    HC_INLINE I signs() const { return all_signs(fields); }
    HC_INLINE F scale(int) const { return half_more(supers.half(0), Vec::shr<28>(fields), 0.25f); }
};

// A byte with the scales of both halves.
HC_INLINE F quarter_scales(const Supers& supers, int offset, int half) {
    const I both = supers.each_byte(offset);
    return half_more(supers.half(0), half ? Vec::shr<4>(both) : Vec::bit_and(both, Vec::set1_i(15)), 0.25f);
}

struct GridIQ2_XS : GridBlocks {
    static constexpr int bytes = 74, code_bits = 6;
    static constexpr bool pairs = true;

    HC_INLINE GridIQ2_XS(const Supers& s, const Ahead&) : GridBlocks{s} {}
    template <int P> HC_INLINE uint64_t pair(int lane) const {
        return kGridIQ2_XS.at[half_word(supers.of(lane) + 2 + 8 * supers.block(lane) + 2 * P) & 511];
    }
    HC_INLINE I signs() const {
        I low, high;
        supers.pairs(2, low, high);
        // Fields of seven bits, from bits 9 and 25.
        I signs = Vec::bit_and(Vec::shr<9>(low), Vec::set1_i(0x7f));
        signs = Vec::bit_or(signs, Vec::bit_and(Vec::shr<17>(low), Vec::set1_i(0x7f00)));
        signs = Vec::bit_or(signs, Vec::bit_and(Vec::shl<7>(high), Vec::set1_i(0x7f0000)));
        signs = Vec::bit_or(signs, Vec::bit_and(Vec::shr<1>(high), Vec::set1_i(0x7f000000)));
        return with_eighth(signs);
    }
    HC_INLINE F scale(int half) const { return quarter_scales(supers, 66, half); }
};

struct GridIQ2_S {
    static constexpr int bytes = 82, code_bits = 6;
    static constexpr bool pairs = true;
    // Entry numbers of a block: the even two, then the odd two.
    struct Ahead {
        alignas(64) uint16_t number[2][2 * Vec::width];
    };
    const Supers& supers;
    const Ahead& ahead;

    HC_INLINE GridIQ2_S(const Supers& s, const Ahead& a) : supers(s), ahead(a) {}
    static HC_INLINE void look_ahead(const Supers& s, Ahead& to) {
        const I low = s.words(2), high = s.each_byte(66), bytes_only = Vec::set1_i(0x00ff00ff);
        const I first = Vec::set1_i(0x300), second = Vec::set1_i(0x3000000);
        const I even =
            Vec::bit_or(Vec::bit_and(Vec::shl<8>(high), first), Vec::bit_and(Vec::shl<20>(high), second));
        const I odd =
            Vec::bit_or(Vec::bit_and(Vec::shl<6>(high), first), Vec::bit_and(Vec::shl<18>(high), second));
        const I numbers[2] = {Vec::bit_or(Vec::bit_and(low, bytes_only), even),
                              Vec::bit_or(Vec::bit_and(Vec::shr<8>(low), bytes_only), odd)};
        for (int i = 0; i < 2; ++i) std::memcpy(to.number[i], &numbers[i], sizeof(I));
    }
    template <int P> HC_INLINE uint64_t pair(int lane) const {
        return kGridIQ2_S.at[ahead.number[P % 2][2 * lane + P / 2]];
    }
    HC_INLINE I signs() const { return supers.words(34); }
    HC_INLINE F scale(int half) const { return quarter_scales(supers, 74, half); }
};

struct GridIQ3_S {
    static constexpr int bytes = 110, code_bits = 4;
    static constexpr bool pairs = false;
    // Entry numbers of a block, in halves of words: even entries, then odd ones.
    struct Ahead {
        alignas(64) uint16_t number[2][4 * Vec::width];
    };
    const Supers& supers;
    const Ahead& ahead;

    HC_INLINE GridIQ3_S(const Supers& s, const Ahead& a) : supers(s), ahead(a) {}
    static HC_INLINE void look_ahead(const Supers& s, Ahead& to) {
        const I bytes_only = Vec::set1_i(0x00ff00ff), ninth = Vec::set1_i(0x01000100);
        for (int part = 0; part < 2; ++part) {
            const uint8_t* at = s.at[Supers::count > 1 ? part : 0];
            const int from = Supers::count > 1 ? 0 : 2 * s.first + part * Vec::width;
            const I low = Vec::load_i(at + 2 + 4 * from),
                    bits = Vec::spread_nibbles(at + 66, from, Vec::width);
            const I high = Vec::bit_or(bits, Vec::shl<14>(bits));
            const I even = Vec::bit_or(Vec::bit_and(low, bytes_only), Vec::bit_and(Vec::shl<8>(high), ninth));
            const I odd = Vec::bit_or(Vec::bit_and(Vec::shr<8>(low), bytes_only),
                                      Vec::bit_and(Vec::shl<7>(high), ninth));
            std::memcpy(to.number[0] + 2 * part * Vec::width, &even, sizeof even);
            std::memcpy(to.number[1] + 2 * part * Vec::width, &odd, sizeof odd);
        }
    }
    template <int W> HC_INLINE uint32_t entry(int lane) const {
        return kGridIQ3_S.at[ahead.number[W % 2][4 * lane + W / 2]];
    }
    HC_INLINE I signs() const { return supers.words(74); }
    HC_INLINE F scale(int) const {
        const I code = supers.nibbles(106);
        return Vec::mul(supers.half(0), Vec::to_float(Vec::add_i(Vec::add_i(code, code), Vec::set1_i(1))));
    }
};

// The dot product of one row with one token: the same bits as of an opened row.
template <class B> void dot_grid(const uint8_t* row, const Input& in, int t, float& dot, Stream& stream) {
    constexpr int M = smaller(Vec::words_at_once(B::code_bits), 4);
    const int64_t blocks = in.cols / kBlock;
    typename B::Ahead ahead[2];  // of this vector of blocks and of the next, alternating
    B::look_ahead({row, B::bytes, 0, int(smaller<int64_t>(blocks, Vec::width))}, ahead[0]);
    F sum = Vec::zero();
    for_groups<true>(blocks, [&](int64_t block, int lanes, int l, int n) HC_INLINE_LAMBDA {
        const int64_t next = block + l + Vec::width;
        const int turn = int(next / Vec::width % 2);
        if (next < blocks)
            B::look_ahead({row, B::bytes, next, int(smaller<int64_t>(blocks - next, Vec::width))},
                          ahead[turn]);
        const Supers supers(row, B::bytes, block + l, n);
        const B grid(supers, ahead[1 - turn]);
        const I signs = grid.signs();
        const int8_t* x = in.codes(t) + block * kBlock + 4 * l;
        const F dx = Vec::load(in.scales(t) + block + l);
        unroll<0, 2>([&](auto which) HC_INLINE_LAMBDA {
            constexpr int half = decltype(which)::value;
            I acc = Vec::zero_i(), code[2];
            unroll<0, 4 / M>([&](auto chunk) HC_INLINE_LAMBDA {
                auto part = Vec::dot_begin(acc);
                unroll<0, M>([&](auto m) HC_INLINE_LAMBDA {
                    constexpr int W = half * 4 + decltype(chunk)::value * M + decltype(m)::value;
                    if constexpr (!B::pairs)
                        code[W % 2] = Vec::each_word(
                            [&](int lane) HC_INLINE_LAMBDA { return grid.template entry<W>(lane); });
                    else if constexpr (W % 2 == 0)
                        Vec::each_pair([&](int lane)
                                           HC_INLINE_LAMBDA { return grid.template pair<W / 2>(lane); },
                                       code[0], code[1]);
                    constexpr int bits = W % 2 ? int(0x80402010) : 0x08040201;
                    const I word_signs = Vec::spread_byte<W / 2>(signs);
                    part = Vec::template dot_add<false>(
                        part, code[W % 2],
                        Vec::negative_where(Vec::load_i(x + W * 4 * kLanes), word_signs, Vec::set1_i(bits)));
                });
                acc = Vec::dot_end(acc, part);
            });
            sum = Vec::fma(Vec::to_float(acc), Vec::mul(grid.scale(half), dx), sum);
        });
        if (l + n == lanes) fetch(stream, lanes * B::bytes / 8);
    });
    dot = Vec::sum(sum);
}

}  // namespace
}  // namespace hc
