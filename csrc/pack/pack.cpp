#include "pack/pack.h"

#include <stdexcept>
#include <string>

#include "pack/pack_types.h"

namespace hc {

namespace {

// Fifth bits of 32 weights in each word: bit 4w + c goes to bit w of byte c.
Bytes16 fifth_bits(Bytes16 words) {
    exchange_within<2>(words, 0x0c0c0c0c);
    exchange_within<1>(words, 0x22222222);
    exchange_within<6>(words, 0x00cc00cc);
    exchange_within<12>(words, 0x0000f0f0);
    return words;
}

// Words 0..3 of lane(l) go to units 0..3 of lane l.
template <class Lane> void put_lanes(int lanes, uint8_t* to, Lane lane) {
    const int unit = 4 * lanes;
    int l = 0;
    for (; l + 4 <= lanes; l += 4) {
        Bytes16 words[4] = {lane(l), lane(l + 1), lane(l + 2), lane(l + 3)};
        transpose<4>(words);
        for (int u = 0; u < 4; ++u) store(to + u * unit + 4 * l, words[u]);
    }
    for (; l < lanes; ++l) {
        uint8_t words[16];
        store(words, lane(l));
        for (int u = 0; u < 4; ++u) std::memcpy(to + u * unit + 4 * l, words + 4 * u, 4);
    }
}

// Sixteen bytes with the nibbles of run b of a super-block: 32 bytes hold two runs, one after the other, or
// (Q6_K) 64 bytes hold four.
template <Type T> Bytes16 run_nibbles(const uint8_t* nibbles, int b) {
    const int bytes = T == Q6_K ? b / 4 * 64 + b % 2 * 32 : b / 2 * 32;
    const bool high = T == Q6_K ? b % 4 / 2 : b % 2;
    const Bytes16 first = load(nibbles + bytes), second = load(nibbles + bytes + 16);
    return high ? high_nibbles(first, second) : low_nibbles(first, second);
}

// Words 0, 1, 4, 5 and 2, 3, 6, 7 of `from`, and back from words 0, 2, 4, 6 and 1, 3, 5, 7.
struct WordPairs {
    Bytes16 a, b;
    explicit WordPairs(Bytes16 low, Bytes16 high) : a(zip_low<8>(low, high)), b(zip_high<8>(low, high)) {}
    void to_even_and_odd() {
        const Bytes16 low = zip_low<4>(a, b), high = zip_high<4>(a, b);
        a = zip_low<8>(low, high);
        b = zip_high<8>(low, high);
    }
    Bytes16 low() const { return zip_low<4>(a, b); }
    Bytes16 high() const { return zip_high<4>(a, b); }
};

// Fifth bits of a super-block, bit b of byte e for weight e of run b: into unit 4 of eight lanes.
void put_fifth_bits(const uint8_t* bits, uint8_t* to) {
    Bytes16 low = load(bits), high = load(bits + 16);
    exchange<4>(low, high, 0x0f);
    WordPairs pairs(low, high);
    exchange<2>(pairs.a, pairs.b, 0x33);
    pairs.to_even_and_odd();
    exchange<1>(pairs.a, pairs.b, 0x55);
    store(to, pairs.low());
    store(to + 16, pairs.high());
}

// Two high bits of half a super-block of Q6_K, bits 2q of byte i for weight i of run q: into units 4 and 5,
// `unit` bytes apart, of four lanes.
void put_sixth_bits(const uint8_t* bits, uint8_t* to, int unit) {
    WordPairs pairs(load(bits), load(bits + 16));
    exchange<4>(pairs.a, pairs.b, 0x0f);
    pairs.to_even_and_odd();
    exchange<2>(pairs.a, pairs.b, 0x33);
    store(to, pairs.low());
    store(to + unit, pairs.high());
}

// The codes of `lanes` lanes; `from` is the file block of the first one.
template <Type T> void put_codes(const uint8_t* from, int lanes, uint8_t* to) {
    constexpr Layout at = layout_of(T);
    const int bytes = block_size(T).bytes, unit = 4 * lanes;
    if constexpr (is_super(T)) {
        put_lanes(lanes, to, [&](int l) { return run_nibbles<T>(from + l / 8 * bytes + at.codes, l % 8); });
        for (int l = 0; l < lanes && T != Q4_K; l += 8) {
            const uint8_t* high = from + l / 8 * bytes + at.high;
            uint8_t* units = to + 4 * unit + 4 * l;
            if constexpr (T == Q5_K) put_fifth_bits(high, units);
            if constexpr (T == Q6_K) put_sixth_bits(high, units, unit);
            if constexpr (T == Q6_K) put_sixth_bits(high + 32, units + 16, unit);
        }
        return;
    }
    put_lanes(lanes, to, [&](int l) { return load(from + l * bytes + at.codes); });
    if constexpr (T == Q8_0)
        put_lanes(lanes, to + 4 * unit, [&](int l) { return load(from + l * bytes + at.codes + 16); });
    if constexpr (at.units == 5) {
        for (int l = 0; l < lanes; l += 4) {
            const auto word = [&](int i) {
                return l + i < lanes ? word_at(from + (l + i) * bytes + at.high) : 0;
            };
            const Bytes16 words = fifth_bits(words_of(word(0), word(1), word(2), word(3)));
            uint8_t* units = to + 4 * unit + 4 * l;
            if (l + 4 <= lanes) {
                store(units, words);
                continue;
            }
            uint8_t rest[16];
            store(rest, words);
            std::memcpy(units, rest, size_t(4 * (lanes - l)));
        }
    }
}

// Two bits of 128 weights, bits 2q of byte i for weight i of block q: into units 0 and 1 of four lanes.
void put_pairs(const uint8_t* bits, int lanes, uint8_t* to, int units) {
    for (int l = 0; l < lanes; l += 4) put_sixth_bits(bits + 8 * l, to + 4 * l, units);
}

// Types whose rows are opened separately: scales in the layout of simd/open_types.h, then codes, a group of
// lanes at a time. Calls fn(block, to, unit) for each eight lanes.
template <class Fn>
void put_groups(const uint8_t* from, int64_t supers, int bytes, int units, uint8_t* codes, Fn&& fn) {
    for (int64_t s = 0; s < supers; s += kLanes / 8) {
        const int lanes = 8 * int(supers - s < kLanes / 8 ? supers - s : kLanes / 8);
        for (int l = 0; l < lanes; l += 8, from += bytes) fn(from, codes + 4 * l, 4 * lanes);
        codes += int64_t(4) * units * lanes;
    }
}

void pack_q2_k(const uint8_t* from, int64_t supers, uint8_t* to) {
    uint8_t *minima = to + 2 * supers, *first = minima + 2 * supers, *second = first + 8 * supers;
    for (int64_t s = 0; s < supers; ++s) {
        const uint8_t* block = from + 84 * s;
        std::memcpy(to + 2 * s, block + 80, 2);
        std::memcpy(minima + 2 * s, block + 82, 2);
        for (int b = 0; b < 8; ++b) {
            first[8 * s + b] = block[2 * b];
            second[8 * s + b] = block[2 * b + 1];
        }
    }
    put_groups(from + 16, supers, 84, 2, second + 8 * supers,
               [](const uint8_t* at, uint8_t* codes, int unit) { put_pairs(at, 8, codes, unit); });
}

void pack_q3_k(const uint8_t* from, int64_t supers, uint8_t* to) {
    uint8_t *low = to + 2 * supers, *high = low + 8 * supers;
    for (int64_t s = 0; s < supers; ++s) {
        const uint8_t *block = from + 110 * s, *scales = block + 96;
        std::memcpy(to + 2 * s, block + 108, 2);
        // Scale j: a nibble of byte j % 8, and two bits of byte 8 + j % 4.
        const auto nibble = [&](int j) { return scales[j % 8] >> 4 * (j / 8) & 15; };
        const auto two = [&](int j) { return uint32_t(scales[8 + j % 4] >> 2 * (j / 4) & 3); };
        uint32_t bits = 0;
        for (int b = 0; b < 8; ++b) {
            low[8 * s + b] = uint8_t(nibble(2 * b) | nibble(2 * b + 1) << 4);
            bits |= (two(2 * b) | two(2 * b + 1) << 2) << 4 * b;
        }
        put_word(high + 4 * s, bits);
    }
    put_groups(from, supers, 110, 3, high + 4 * supers, [](const uint8_t* at, uint8_t* codes, int unit) {
        put_pairs(at + 32, 8, codes, unit);
        put_fifth_bits(at, codes + 2 * unit);
    });
}

void pack_iq4_xs(const uint8_t* from, int64_t supers, uint8_t* to) {
    for (int64_t s = 0; s < supers; ++s) {
        const uint8_t* block = from + 136 * s;
        std::memcpy(to + 2 * s, block, 2);
        std::memcpy(to + 2 * (supers + s), block + 2, 2);
        std::memcpy(to + 4 * (supers + s), block + 4, 4);
    }
    uint8_t* codes = to + 8 * supers;
    for (int64_t b = 0; b < 8 * supers; b += kLanes) {
        const int lanes = int(8 * supers - b < kLanes ? 8 * supers - b : kLanes);
        put_lanes(lanes, codes + 16 * b,
                  [&](int l) { return load(from + (b + l) / 8 * 136 + 8 + (b + l) % 8 * 16); });
    }
}

void pack_tq2_0(const uint8_t* from, int64_t supers, uint8_t* to) {
    for (int64_t s = 0; s < supers; ++s) std::memcpy(to + 2 * s, from + 66 * s + 64, 2);
    put_groups(from, supers, 66, 2, to + 2 * supers,
               [](const uint8_t* at, uint8_t* codes, int unit) { put_pairs(at, 8, codes, unit); });
}

// Scales, then minima, of `count` file blocks.
template <Type T> void put_scales(const uint8_t* from, int64_t count, uint8_t* to) {
    constexpr Layout at = layout_of(T);
    const int bytes = block_size(T).bytes;
    for (int64_t i = 0; i < count; ++i)
        std::memcpy(to + i * at.scale, from + i * bytes + at.scale_at, at.scale);
    if constexpr (at.minimum > 0)
        for (int64_t i = 0; i < count; ++i)
            std::memcpy(to + (count + i) * at.minimum, from + i * bytes + at.scale, at.minimum);
}

template <Type T> void put_row_scales(const uint8_t* from, int64_t supers, uint8_t* to) {
    const int bytes = block_size(T).bytes;
    for (int64_t s = 0; s < supers; ++s, from += bytes) {
        if constexpr (T == Q6_K) {
            uint8_t *first = to + 2 * supers + 8 * s, *second = first + 8 * supers;
            for (int b = 0; b < 8; ++b) {
                first[b] = from[192 + 2 * b];
                second[b] = from[192 + 2 * b + 1];
            }
        } else {
            const KScales scales = k_scales(from + 4);
            std::memcpy(to + 4 * supers + 8 * s, scales.low, 8);
            put_word(to + 12 * supers + 4 * s, scales.high);
        }
    }
}

template <Type T> void pack_row_of(const uint8_t* from, int64_t cols, uint8_t* to) {
    const BlockSize size = block_size(T);
    const int64_t blocks = cols / kBlock, count = cols / size.weights;
    constexpr int block_codes = 4 * layout_of(T).units;
    uint8_t* codes = to + row_bytes(T, cols) - blocks * block_codes;
    put_scales<T>(from, count, to);
    if constexpr (is_super(T)) put_row_scales<T>(from, count, to);
    for (int64_t b = 0; b < blocks; b += kLanes) {
        const int lanes = int(blocks - b < kLanes ? blocks - b : kLanes);
        put_codes<T>(from + b * kBlock / size.weights * size.bytes, lanes, codes + b * block_codes);
    }
}

}  // namespace

int64_t row_size(Type type, int64_t cols) {
    const BlockSize size = block_size(type);
    if (!size.weights)
        throw std::invalid_argument("block type " + std::to_string(int(type)) + " has no kernels");
    if (cols % size.weights)
        throw std::invalid_argument("a row of " + std::to_string(cols) +
                                    " weights is not a multiple of its block of " +
                                    std::to_string(size.weights));
    return row_bytes(type, cols);
}

void pack_row(Type type, const uint8_t* from, int64_t cols, uint8_t* to) {
    switch (type) {
        case Q2_K: return pack_q2_k(from, cols / 256, to);
        case Q3_K: return pack_q3_k(from, cols / 256, to);
        case IQ4_XS: return pack_iq4_xs(from, cols / 256, to);
        case TQ2_0: return pack_tq2_0(from, cols / 256, to);
        default: break;
    }
    if (!is_quantised(type) || is_opened(type)) {  // same bytes as in the file
        std::memcpy(to, from, size_t(row_bytes(type, cols)));
        return;
    }
    with_constant(type, [&](auto constant) { pack_row_of<decltype(constant)::value>(from, cols, to); });
}

}  // namespace hc
