// The block types: how a packed row's scales and codes become vectors. A new type is one struct here, one
// line in `with_type`, and its packing in pack_types.h.
#pragma once
#include <cstring>
#include <utility>

#include "simd/types.h"
#include "simd/vec.h"

// Everything below is compiled once per ISA, in an unnamed namespace: the linker must never use a function
// compiled for AVX-512 for all ISAs.
namespace hc {
namespace {

using F = Vec::F;
using I = Vec::I;

template <int N> struct Constant {
    static constexpr int value = N;
};
template <int Begin, class Fn, int... N> HC_INLINE void unroll(Fn&& fn, std::integer_sequence<int, N...>) {
    (fn(Constant<Begin + N>{}), ...);
}
template <int Begin, int End, class Fn> HC_INLINE void unroll(Fn&& fn) {
    unroll<Begin>(fn, std::make_integer_sequence<int, End - Begin>{});
}
template <class T> constexpr T smaller(T a, T b) { return a < b ? a : b; }
template <class T> constexpr T larger(T a, T b) { return a > b ? a : b; }

// Lanes [at, at + n) of a row: `at` counts blocks.
struct Lanes {
    const uint8_t* row;
    int64_t blocks, at;
    int n;
};

// A block's scale, or the scales of its halves, and the minimum added to every weight, likewise.
struct Head {
    F scale, high_scale, minimum;
    F high_minimum = Vec::zero();
};

HC_INLINE F f16_lanes(const Lanes& s, int64_t region) {
    const auto* at = (const uint16_t*)(s.row + region * s.blocks) + s.at;
    return s.n == Vec::width ? Vec::load_f16(at) : Vec::load_f16(at, s.n);
}

// The base of all types. A block is 32 codes in eight words of four (word w: elements 4w..4w+3), kept in
// `units` 32-bit units per lane: unit k < parts holds words k, k + parts, ...; further units hold the codes'
// high bits.
struct TypeBase {
    static constexpr bool quantised = true;
    static constexpr int parts = 4, words_per_part = 2, units = 4;
    static constexpr bool signed_codes = false;  // word() returns int8, else codes 0..127
    static constexpr int code_bits = 4;          // of the largest magnitude that word() returns
    static constexpr int offset = 0;             // bias of the codes: a power of two, or 0
    static constexpr bool halves = false;        // two scales in a block, of 16 weights each
    static constexpr bool has_minimum = false;
    static constexpr bool opened = false;  // a group is opened before it is read: open_groups.h
    static constexpr bool super =
        false;  // blocks of 256: a panel's scales depend on a neuron's position in it
    // value() returns a code times<W, Byte>() as large: its sums are corrected once.
    template <int W, int Byte> static constexpr int times() { return 1; }
    template <int W> static HC_INLINE I nibbles(I part) {
        return Vec::bit_and(W ? Vec::shr<4>(part) : part, Vec::set1_i(0x0f0f0f0f));
    }
    static HC_INLINE Head f16_head(const Lanes& s) { return {f16_lanes(s, 0), Vec::zero(), Vec::zero()}; }
};

struct BlockQ8_0 : TypeBase {
    static constexpr int header_quarters = 8;  // bytes of scales for 4 blocks
    static constexpr int parts = 8, words_per_part = 1, units = 8, code_bits = 7;
    static constexpr bool signed_codes = true;
    static HC_INLINE Head head(const Lanes& s) { return f16_head(s); }
    template <int P, int W> static HC_INLINE I word(const I* unit) { return unit[P]; }
    template <int P, int W, int Byte> static HC_INLINE F value(const I* unit) {
        return Vec::to_float(Vec::sar<24>(Vec::shl<24 - 8 * Byte>(unit[P])));
    }
};

// Unsigned codes of four bits. A value is a nibble at its position in its unit, since a shift costs as much
// as the following product; the last nibble would be negative there.
struct Nibbles : TypeBase {
    template <int P, int W> static HC_INLINE I word(const I* unit) { return nibbles<W>(unit[P]); }
    template <int W, int Byte> static constexpr int times() {
        return W && Byte == 3 ? 1 : 1 << (8 * Byte + 4 * W);
    }
    template <int P, int W, int Byte> static HC_INLINE F value(const I* unit) {
        if constexpr (W && Byte == 3) return Vec::to_float(Vec::shr<28>(unit[P]));
        return Vec::to_float(Vec::bit_and(unit[P], Vec::set1_i(15 * times<W, Byte>())));
    }
};

// Unsigned codes of up to eight bits, likewise: a byte at its position in its word.
struct Bytes : TypeBase {
    template <int W, int Byte> static constexpr int times() { return Byte == 3 ? 1 : 1 << 8 * Byte; }
    template <int Byte> static HC_INLINE F byte(I word) {
        if constexpr (Byte == 3) return Vec::to_float(Vec::shr<24>(word));
        return Vec::to_float(Vec::bit_and(word, Vec::set1_i(255 * times<0, Byte>())));
    }
};

struct BlockQ4_0 : Nibbles {
    static constexpr int header_quarters = 8, offset = 8;
    static HC_INLINE Head head(const Lanes& s) { return f16_head(s); }
};

struct BlockQ4_1 : Nibbles {
    static constexpr int header_quarters = 16;
    static constexpr bool has_minimum = true;
    static HC_INLINE Head head(const Lanes& s) { return {f16_lanes(s, 0), Vec::zero(), f16_lanes(s, 2)}; }
};

// A fifth bit: byte c of unit 4 holds, for word w, the high bit of element 4w + c as its bit w.
struct FiveBits : Bytes {
    static constexpr int units = 5, code_bits = 5;
    template <int P, int W> static HC_INLINE I word(const I* unit) {
        constexpr int w = P + 4 * W, left = w < 4 ? 4 - w : 0, right = w < 4 ? 0 : w - 4;  // to bit 4
        const I high = w < 4 ? Vec::shl<left>(unit[4]) : Vec::shr<right>(unit[4]);
        return Vec::bit_or(nibbles<W>(unit[P]), Vec::bit_and(high, Vec::set1_i(0x10101010)));
    }
    template <int P, int W, int Byte> static HC_INLINE F value(const I* unit) {
        return byte<Byte>(word<P, W>(unit));
    }
};

struct BlockQ5_0 : FiveBits {
    static constexpr int header_quarters = 8, offset = 16;
    static HC_INLINE Head head(const Lanes& s) { return f16_head(s); }
};

struct BlockQ5_1 : FiveBits {
    static constexpr int header_quarters = 16;
    static constexpr bool has_minimum = true;
    static HC_INLINE Head head(const Lanes& s) { return {f16_lanes(s, 0), Vec::zero(), f16_lanes(s, 2)}; }
};

// Scales and minima of 6 bits: low nibbles of both in a byte, two high bits of each in another.
HC_INLINE Head k_scales(F d, F dmin, I low, I high) {
    const I four = Vec::set1_i(15), two = Vec::set1_i(3);
    const I scale = Vec::bit_or(Vec::bit_and(low, four), Vec::shl<4>(Vec::bit_and(high, two)));
    const I minimum = Vec::bit_or(Vec::shr<4>(low), Vec::shl<4>(Vec::bit_and(Vec::shr<2>(high), two)));
    return {Vec::mul(d, Vec::to_float(scale)), Vec::zero(),
            Vec::mul(Vec::sub(Vec::zero(), dmin), Vec::to_float(minimum))};
}

struct KBlock {
    static constexpr int header_quarters = 8;
    static constexpr bool has_minimum = true, super = true;
    // Super-blocks of 8 blocks. Regions: d, dmin (float16 per super-block), a byte per block (low nibbles), 4
    // bytes per super-block (high bits).
    static HC_INLINE Head head(const Lanes& s) {
        const int64_t supers = s.blocks / 8;
        const uint16_t* d = (const uint16_t*)s.row;
        return k_scales(Vec::spread_f16(d, s.at, s.n), Vec::spread_f16(d + supers, s.at, s.n),
                        Vec::load_u8(s.row + 4 * supers + s.at, s.n),
                        Vec::spread_nibbles(s.row + 12 * supers, s.at, s.n));
    }
    // The same for outputs [at, at + n) of a panel, run `r` of its neurons.
    static HC_INLINE Head panel_head(const Lanes& s, int r) {
        const I high = Vec::load_u8(s.row + (12 + r / 2) * s.blocks + s.at, s.n);
        return k_scales(f16_lanes(s, 0), f16_lanes(s, 2),
                        Vec::load_u8(s.row + (4 + r) * s.blocks + s.at, s.n),
                        r % 2 ? Vec::shr<4>(high) : high);
    }
};

struct BlockQ4_K : Nibbles, KBlock {
    using KBlock::has_minimum, KBlock::super;
};

struct BlockQ5_K : FiveBits, KBlock {
    using KBlock::has_minimum, KBlock::super;
};

// Two high bits: byte c of unit 4 + w / 4 holds the bits of element 4w + c at bit 2 (w % 4).
struct BlockQ6_K : Bytes {
    static constexpr int header_quarters = 9, units = 6, code_bits = 6, offset = 32;
    static constexpr bool halves = true, super = true;
    static HC_INLINE Head head(const Lanes& s) {
        const int64_t supers = s.blocks / 8;
        const F d = Vec::spread_f16((const uint16_t*)s.row, s.at, s.n);
        const uint8_t* scales = s.row + 2 * supers + s.at;
        return {Vec::mul(d, Vec::to_float(Vec::load_i8(scales, s.n))),
                Vec::mul(d, Vec::to_float(Vec::load_i8(scales + s.blocks, s.n))), Vec::zero()};
    }
    static HC_INLINE Head panel_head(const Lanes& s, int r) {
        const I scale = Vec::load_i8(s.row + (2 + r) * s.blocks + s.at, s.n);
        return {Vec::mul(f16_lanes(s, 0), Vec::to_float(scale)), Vec::zero(), Vec::zero()};
    }
    template <int P, int W> static HC_INLINE I word(const I* unit) {
        constexpr int left = P < 2 ? 4 - 2 * P : 0, right = P < 2 ? 0 : 2 * P - 4;  // to bits 4 and 5
        const I high = P < 2 ? Vec::shl<left>(unit[4 + W]) : Vec::shr<right>(unit[4 + W]);
        return Vec::bit_or(nibbles<W>(unit[P]), Vec::bit_and(high, Vec::set1_i(0x30303030)));
    }
    template <int P, int W, int Byte> static HC_INLINE F value(const I* unit) {
        return byte<Byte>(word<P, W>(unit));
    }
};

// Codes that index 16 values.
template <class T> struct TableBlock : TypeBase {
    static constexpr bool signed_codes = true;
    template <int P, int W> static HC_INLINE I word(const I* unit) {
        return Vec::lookup(nibbles<W>(unit[P]), T::table);
    }
    template <int P, int W, int Byte> static HC_INLINE F value(const I* unit) {
        return Vec::to_float(Vec::sar<24>(Vec::shl<24 - 8 * Byte>(word<P, W>(unit))));
    }
};

struct BlockIQ4_NL : TableBlock<BlockIQ4_NL> {
    static constexpr int header_quarters = 8, code_bits = 7;
    static constexpr int8_t table[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                         1,    13,   25,  38,  53,  69,  89,  113};
    static HC_INLINE Head head(const Lanes& s) { return f16_head(s); }
};

// OCP Microscaling FP4 (E2M1), values doubled; the scale is half of 2^(e - 127).
struct BlockMXFP4 : TableBlock<BlockMXFP4> {
    static constexpr int header_quarters = 4;
    static constexpr int8_t table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    static HC_INLINE Head head(const Lanes& s) {
        const I e = Vec::load_u8(s.row + s.at, s.n);
        // 2^(e - 128) as the product of two powers of two, because for e < 2 it is subnormal.
        const I half = Vec::shr<1>(e), rest = Vec::sub_i(e, half);
        const auto power = [](I exponent) {
            return Vec::as_float(Vec::shl<23>(Vec::add_i(exponent, Vec::set1_i(63))));
        };
        return {Vec::mul(power(half), power(rest)), Vec::zero(), Vec::zero()};
    }
};

// For the following types only the dot product of one row with one token is compiled; all other kernels read
// the opened form of open_types.h.

// Codes of two bits: bits 2i of unit u belong to word 4u + i.
struct Pairs : TypeBase {
    static constexpr int units = 2, code_bits = 2;
    static constexpr bool halves = true;
    template <int P, int W> static HC_INLINE I word(const I* unit) {
        return Vec::bit_and(Vec::shr<2 * P>(unit[W]), Vec::set1_i(0x03030303));
    }
};

// Scale and minimum of 4 bits each in a byte: first the bytes of all blocks' first halves, then of the second
// halves.
struct BlockQ2_K : Pairs {
    static constexpr int header_quarters = 10;
    static constexpr bool has_minimum = true;
    static HC_INLINE Head head(const Lanes& s) {
        const auto* d = (const uint16_t*)s.row;
        const F scale = Vec::spread_f16(d, s.at, s.n);
        const F minimum = Vec::sub(Vec::zero(), Vec::spread_f16(d + s.blocks / 8, s.at, s.n));
        const uint8_t* both = s.row + s.blocks / 2 + s.at;
        const I first = Vec::load_u8(both, s.n), second = Vec::load_u8(both + s.blocks, s.n);
        const auto low = [](I v) { return Vec::to_float(Vec::bit_and(v, Vec::set1_i(15))); };
        const auto high = [](I v) { return Vec::to_float(Vec::shr<4>(v)); };
        return {Vec::mul(scale, low(first)), Vec::mul(scale, low(second)), Vec::mul(minimum, high(first)),
                Vec::mul(minimum, high(second))};
    }
};

struct BlockTQ2_0 : Pairs {
    static constexpr int header_quarters = 1, offset = 1;
    static HC_INLINE Head head(const Lanes& s) {
        const F d = Vec::spread_f16((const uint16_t*)s.row, s.at, s.n);
        return {d, d, Vec::zero()};
    }
};

// A third bit: bit w of unit 2 belongs to word w. Scales of 6 bits, from -32: the halves' low nibbles in a
// byte, then their two high bits in a nibble.
struct BlockQ3_K : Pairs {
    static constexpr int header_quarters = 7, units = 3, code_bits = 3, offset = 4;
    static HC_INLINE Head head(const Lanes& s) {
        const int64_t supers = s.blocks / 8;
        const F d = Vec::spread_f16((const uint16_t*)s.row, s.at, s.n);
        const I low = Vec::load_u8(s.row + 2 * supers + s.at, s.n);
        const I high = Vec::spread_nibbles(s.row + 10 * supers, s.at, s.n);
        const I four = Vec::set1_i(15), two = Vec::set1_i(3), middle = Vec::set1_i(32);
        const I first = Vec::bit_or(Vec::bit_and(low, four), Vec::shl<4>(Vec::bit_and(high, two)));
        const I second = Vec::bit_or(Vec::shr<4>(low), Vec::shl<4>(Vec::shr<2>(high)));
        return {Vec::mul(d, Vec::to_float(Vec::sub_i(first, middle))),
                Vec::mul(d, Vec::to_float(Vec::sub_i(second, middle))), Vec::zero()};
    }
    template <int P, int W> static HC_INLINE I word(const I* unit) {
        constexpr int w = P + 4 * W, left = w < 2 ? 2 - w : 0, right = w < 2 ? 0 : w - 2;
        const I high = w < 2 ? Vec::shl<left>(unit[2]) : Vec::shr<right>(unit[2]);
        return Vec::bit_or(Pairs::word<P, W>(unit), Vec::bit_and(high, Vec::set1_i(0x04040404)));
    }
};

// Vec::spread_nibbles of two words, which a vector of both reads without memory between.
template <class V> HC_INLINE I spread_nibbles(const uint32_t (&words)[2], int at, int n) {
    if constexpr (V::width > 8)
        return V::nibble_halves(words[0], words[1]);
    else
        return V::spread_nibbles((const uint8_t*)words, at, n);
}

// Scales of 6 bits, from -32: two high bits of eight blocks in a half word, four low ones in a word.
struct BlockIQ4_XS : TableBlock<BlockIQ4_NL> {
    static constexpr int header_quarters = 4, code_bits = 7;
    static constexpr bool halves = true;
    static HC_INLINE Head head(const Lanes& s) {
        const int64_t supers = s.blocks / 8;
        uint32_t words[2] = {};  // a nibble for each block of a super-block
        for (int i = 0; 8 * i < s.n; ++i) {
            uint16_t pairs;
            std::memcpy(&pairs, s.row + 2 * (supers + s.at / 8 + i), 2);
            uint32_t word = (pairs | uint32_t(pairs) << 8) & 0x00ff00ff;
            word = (word | word << 4) & 0x0f0f0f0f;
            words[i] = (word | word << 2) & 0x33333333;
        }
        const I high = spread_nibbles<Vec>(words, int(s.at % 8), s.n);
        const I low = Vec::spread_nibbles(s.row + 4 * supers, s.at, s.n);
        const I scale = Vec::sub_i(Vec::bit_or(low, Vec::shl<4>(high)), Vec::set1_i(32));
        const F d = Vec::spread_f16((const uint16_t*)s.row, s.at, s.n);
        return {Vec::mul(d, Vec::to_float(scale)), Vec::mul(d, Vec::to_float(scale)), Vec::zero()};
    }
};

// Bytes with two scales in a block, for all opened types. Narrow ones, from -15 to 15, are biased by 16, so
// that products need no signs, and may have two minima.
template <bool Narrow> struct BlockOpened : Bytes {
    static constexpr int units = 8, code_bits = Narrow ? 5 : 7, offset = Narrow ? 16 : 0;
    static constexpr bool signed_codes = !Narrow, halves = true, has_minimum = Narrow, opened = true;
    template <int W, int Byte> static constexpr int times() { return Narrow ? Bytes::times<W, Byte>() : 1; }
    template <int P, int W> static HC_INLINE I word(const I* unit) { return unit[P + parts * W]; }
    template <int P, int W, int Byte> static HC_INLINE F value(const I* unit) {
        if constexpr (Narrow) return byte<Byte>(word<P, W>(unit));
        return Vec::to_float(Vec::sar<24>(Vec::shl<24 - 8 * Byte>(word<P, W>(unit))));
    }
};

// Scales of outputs [at, at + n) of a panel of `blocks` outputs, for run `r` of its neurons.
template <class B> HC_INLINE Head panel_head(const Lanes& s, int r) {
    if constexpr (B::super)
        return B::panel_head(s, r);
    else
        return B::head(s);
}

struct FloatF32 {
    static constexpr bool quantised = false, opened = false;
    static constexpr int bytes = 4;
    static F load(const uint8_t* row, int64_t i) { return Vec::load((const float*)row + i); }
    static F load(const uint8_t* row, int64_t i, int n) { return Vec::load((const float*)row + i, n); }
};
struct FloatF16 {
    static constexpr bool quantised = false, opened = false;
    static constexpr int bytes = 2;
    static F load(const uint8_t* row, int64_t i) { return Vec::load_f16((const uint16_t*)row + i); }
    static F load(const uint8_t* row, int64_t i, int n) { return Vec::load_f16((const uint16_t*)row + i, n); }
};
struct FloatBF16 {
    static constexpr bool quantised = false, opened = false;
    static constexpr int bytes = 2;
    static F load(const uint8_t* row, int64_t i) { return Vec::load_bf16((const uint16_t*)row + i); }
    static F load(const uint8_t* row, int64_t i, int n) {
        return Vec::load_bf16((const uint16_t*)row + i, n);
    }
};

// Types with blocks of 32 weights. isa/block_dots.cpp compiles their dot products, isa/other_dots.cpp the
// others.
inline bool has_small_blocks(Type type) { return block_size(type).weights == kBlock; }

// Calls fn with the type's struct.
template <class Fn> inline void with_block_type(Type type, Fn&& fn) {
    switch (type) {
        case Q4_0: return fn(BlockQ4_0{});
        case Q4_1: return fn(BlockQ4_1{});
        case Q5_0: return fn(BlockQ5_0{});
        case Q5_1: return fn(BlockQ5_1{});
        case Q8_0: return fn(BlockQ8_0{});
        case IQ4_NL: return fn(BlockIQ4_NL{});
        default: return fn(BlockMXFP4{});
    }
}
template <class Fn> inline void with_other_type(Type type, Fn&& fn) {
    switch (type) {
        case F32: return fn(FloatF32{});
        case F16: return fn(FloatF16{});
        case BF16: return fn(FloatBF16{});
        case Q4_K: return fn(BlockQ4_K{});
        case Q5_K: return fn(BlockQ5_K{});
        case Q6_K: return fn(BlockQ6_K{});
        case IQ4_XS:
        case IQ3_XXS:
        case IQ2_S:
        case IQ2_XS:
        case IQ2_XXS: return fn(BlockOpened<false>{});
        default: return fn(BlockOpened<true>{});
    }
}
template <class Fn> inline void with_type(Type type, Fn&& fn) {
    has_small_blocks(type) ? with_block_type(type, fn) : with_other_type(type, fn);
}

}  // namespace
}  // namespace hc
