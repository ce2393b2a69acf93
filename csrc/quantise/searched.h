// Types whose scales are searched for.
#pragma once
#include "quantise/affine_block.h"
#include "quantise/exact.h"
#include "quantise/scaled_block.h"

namespace hc {
namespace {

// Start position of the largest weight before a scale is fitted, relative to the lowest or highest value.
constexpr float kFineStarts[] = {-0.9f, -0.7f, -0.6f, -0.5f, -0.4f, -0.3f,
                                 -0.2f, -0.1f, 0.0f,  0.2f,  0.4f,  0.6f};
constexpr float kTableStarts[] = {-7, -5, -3, -1, 0, 3, 6, 9};
// The same for the code of the largest weight, relative to the last code.
constexpr float kAffineStarts[] = {-0.9f, -0.8f, -0.7f, -0.6f, -0.5f, -0.4f, -0.3f, -0.2f, -0.1f, 0.0f,
                                   0.1f,  0.2f,  0.3f,  0.4f,  0.5f,  0.6f,  0.7f,  0.8f,  0.9f};

// --- blocks of 32 weights, eight at a time ---

struct SmallBlocks {
    int count;
    float units[kLanes] = {};
    Runs<kSmall> runs;

    // At most eight blocks from the `left` remaining weights of a row.
    SmallBlocks(const float* x, const float* w, int64_t left)
        : count(int(left < kSmall * kLanes ? left / kSmall : kLanes)) {
        float inverses[kLanes] = {};
        for (int i = 0; i < count; ++i) {
            units[i] = unit_of(x + kSmall * i, kSmall);
            inverses[i] = units[i] == 0 ? 0 : 1 / units[i];
        }
        load_runs(runs, x, w, count, inverses);
    }
    // Rounds each scale to float16; writes the float16 to `halves` if given.
    V rounded(V scales, uint16_t* halves = nullptr) const {
        float values[kLanes] = {};
        for (int i = 0; i < count; ++i) {
            const HalfScale scale = units[i] == 0 ? HalfScale() : HalfScale(scales[i], units[i]);
            values[i] = scale.value;
            if (halves) halves[i] = scale.half;
        }
        return load(values);
    }
};

template <class Values, int S, class Put> void search_blocks(const char* type, const float* x, const float* w,
                                                             int64_t n, const Values& values,
                                                             const float (&starts)[S], const Put& put) {
    check_finite(type, x, n, kHalfBound);
    half_scale(type, float_of(largest_bits(x, n)) / values.lowest[0]);
    for (int64_t at = 0; at < n; at += kSmall * kLanes) {
        const SmallBlocks blocks(x + at, w ? w + at : nullptr, n - at);
        const auto judge = [&](V& scale, V& error) {
            scale = blocks.rounded(scale);
            error = scaled_error(blocks.runs, values, scale);
        };
        const V scale = ScaleSearch<kSmall, Values>(blocks.runs, values).find(starts, 2, judge);
        uint16_t halves[kLanes];
        const V inverse = ratio(splat(1), blocks.rounded(scale, halves));
        int codes[kLanes][kSmall];
        for (int j = 0; j < kSmall; ++j) {
            const V q = values.nearest(load(blocks.runs.x[j]) * inverse);
            for (int i = 0; i < kLanes; ++i) codes[i][j] = values.code(q[i]);
        }
        for (int i = 0; i < blocks.count; ++i) put(at / kSmall + i, halves[i], codes[i]);
    }
}

void search_affine_blocks(const char* type, int bits, const float* x, const float* w, int64_t n,
                          uint8_t* out) {
    check_finite(type, x, n, kHalfBound);
    const V last = splat(float((1 << bits) - 1));
    for (int64_t at = 0; at < n; at += kSmall) {
        const Ends ends(x + at);
        half_scale(type, ends.least);
        half_scale(type, (ends.most - ends.least) / last[0]);
    }
    const int bytes = bits == 4 ? 20 : 24;
    for (int64_t at = 0; at < n; at += kSmall * kLanes) {
        const SmallBlocks blocks(x + at, w + at, n - at);
        const auto judge = [&](AffineFit& fit) {
            const V base = blocks.rounded(fit.base);
            // For equal weights, the step is the rounding error of the base.
            const V step = select(size_of(fit.step) > splat(0), fit.step, fit.base - base);
            fit = {blocks.rounded(step), base, splat(0)};
            fit.error = affine_error(blocks.runs, fit.step, base, last);
        };
        const AffineFit fit = AffineSearch<kSmall>(blocks.runs, last, false).find(kAffineStarts, 4, judge);
        uint16_t steps[kLanes], bases[kLanes];
        const V inverse = ratio(splat(1), blocks.rounded(fit.step, steps));
        const V base = blocks.rounded(fit.base, bases);
        int codes[kLanes][kSmall];
        for (int j = 0; j < kSmall; ++j) {
            const V q = affine_code(load(blocks.runs.x[j]), base, inverse, last);
            for (int i = 0; i < kLanes; ++i) codes[i][j] = int(q[i]);
        }
        for (int i = 0; i < blocks.count; ++i) {
            uint8_t* block = out + (at / kSmall + i) * bytes;
            put_half(block, steps[i]);
            put_half(block + 2, bases[i]);
            put_codes(block + bytes - 16, codes[i], bits);
        }
    }
}

// --- the types ---

// Calls fn(x, w, out) for each block of a row.
template <class Fn> void each_block(const char* type, const float* x, const float* w, int64_t n, uint8_t* out,
                                    int64_t bytes, const Fn& fn) {
    check_finite(type, x, n, kHalfBound);
    for (int64_t at = 0; at < n; at += kLarge, out += bytes) fn(x + at, w ? w + at : nullptr, out);
}

void write_q2_k(const float* x, const float* w, int64_t n, uint8_t* out) {
    Products sums;
    each_block("Q2_K", x, w, n, out, 84, [&](const float* x, const float* w, uint8_t* out) {
        AffineBlockSearch<16> search("Q2_K", 3, 15, x, w);
        const auto block = search.find(kAffineStarts, 2);
        for (int j = 0; j < 16; ++j)
            out[j] = uint8_t(int(block.scales[j / 8][j % 8]) | int(block.minima[j / 8][j % 8]) << 4);
        uint8_t codes[kLarge];
        search.put_block_codes(block, codes);
        put_pairs(out + 16, codes, 0);
        put_half(out + 80, block.scale.half);
        put_half(out + 82, block.minimum.half);
        search.add_products(block, sums);
    });
    grow_scales(out, n / kLarge, 84, {80, 82}, sums);
}

void write_q3_k(const float* x, const float* w, int64_t n, uint8_t* out) {
    const CentredValues values(4);
    each_block("Q3_K", x, w, n, out, 110, [&](const float* x, const float* w, uint8_t* out) {
        ScaledBlockSearch<16, CentredValues> search("Q3_K", values, -32, x, w);
        const auto block = search.find(kFineStarts, 2, 4);
        uint8_t codes[kLarge];
        search.put_block_codes(block, codes);
        put_bits(out, codes, 2);
        put_pairs(out + 32, codes, 0);
        int scales[16];
        for (int j = 0; j < 16; ++j) scales[j] = int(block.scales[j / 8][j % 8]) + 32;
        for (int j = 0; j < 8; ++j) out[96 + j] = uint8_t((scales[j] & 15) | (scales[j + 8] & 15) << 4);
        for (int j = 0; j < 4; ++j) {
            int byte = 0;
            for (int k = 0; k < 4; ++k) byte |= scales[4 * k + j] >> 4 << 2 * k;
            out[104 + j] = uint8_t(byte);
        }
        put_half(out + 108, block.scale.half);
    });
}

// Two float16, then 8 scales and 8 minima of 6 bits: the first four of each whole, the others distributed
// over the free bits.
template <class Block> void put_affine_scales(uint8_t* out, const Block& block) {
    put_half(out, block.scale.half);
    put_half(out + 2, block.minimum.half);
    out += 4;
    for (int j = 0; j < 4; ++j) {
        const int scale = int(block.scales[0][j + 4]), minimum = int(block.minima[0][j + 4]);
        out[j] = uint8_t(int(block.scales[0][j]) | scale >> 4 << 6);
        out[j + 4] = uint8_t(int(block.minima[0][j]) | minimum >> 4 << 6);
        out[j + 8] = uint8_t((scale & 15) | (minimum & 15) << 4);
    }
}

void write_q4_k(const float* x, const float* w, int64_t n, uint8_t* out) {
    each_block("Q4_K", x, w, n, out, 144, [](const float* x, const float* w, uint8_t* out) {
        AffineBlockSearch<32> search("Q4_K", 15, 63, x, w);
        const auto block = search.find(kAffineStarts, 2);
        uint8_t codes[kLarge];
        search.put_block_codes(block, codes);
        put_affine_scales(out, block);
        put_nibbles(out + 16, codes, 32);
    });
}

void write_q5_k(const float* x, const float* w, int64_t n, uint8_t* out) {
    each_block("Q5_K", x, w, n, out, 176, [](const float* x, const float* w, uint8_t* out) {
        AffineBlockSearch<32> search("Q5_K", 31, 63, x, w);
        const auto block = search.find(kAffineStarts, 2);
        uint8_t codes[kLarge];
        search.put_block_codes(block, codes);
        put_affine_scales(out, block);
        put_bits(out + 16, codes, 4);
        put_nibbles(out + 48, codes, 32);
    });
}

void write_q6_k(const float* x, const float* w, int64_t n, uint8_t* out) {
    const CentredValues values(32);
    each_block("Q6_K", x, w, n, out, 210, [&](const float* x, const float* w, uint8_t* out) {
        ScaledBlockSearch<16, CentredValues> search("Q6_K", values, -128, x, w);
        const auto block = search.find(kFineStarts, 2);
        uint8_t codes[kLarge];
        search.put_block_codes(block, codes);
        put_nibbles(out, codes, 64);
        put_pairs(out + 128, codes, 4);
        for (int j = 0; j < 16; ++j) out[192 + j] = uint8_t(int(block.scales[j / 8][j % 8]));
        put_half(out + 208, block.scale.half);
    });
}

void write_iq4_nl(const float* x, const float* w, int64_t n, uint8_t* out) {
    const TableValues values;
    search_blocks("IQ4_NL", x, w, n, values, kTableStarts,
                  [&](int64_t block, uint16_t scale, const int* codes) {
                      put_half(out + 18 * block, scale);
                      put_codes(out + 18 * block + 2, codes, 4);
                  });
}

void write_iq4_xs(const float* x, const float* w, int64_t n, uint8_t* out) {
    const TableValues values;
    each_block("IQ4_XS", x, w, n, out, 136, [&](const float* x, const float* w, uint8_t* out) {
        ScaledBlockSearch<32, TableValues> search("IQ4_XS", values, -32, x, w);
        const auto block = search.find(kTableStarts, 2);
        uint8_t codes[kLarge];
        search.put_block_codes(block, codes);
        int high = 0;
        std::memset(out + 4, 0, 4);
        for (int j = 0; j < 8; ++j) {
            const int scale = int(block.scales[0][j]) + 32;
            high |= scale >> 4 << 2 * j;
            out[4 + j / 2] |= uint8_t((scale & 15) << 4 * (j % 2));
        }
        put_half(out, block.scale.half);
        put_half(out + 2, uint16_t(high));
        put_nibbles(out + 8, codes, 16);
    });
}

void search_centred(const char* type, int bits, const float* x, const float* w, int64_t n, uint8_t* out) {
    const int bytes = bits == 4 ? 18 : 22;
    search_blocks(type, x, w, n, CentredValues(1 << (bits - 1)), kFineStarts,
                  [&](int64_t block, uint16_t scale, const int* codes) {
                      put_half(out + bytes * block, scale);
                      put_codes(out + bytes * (block + 1) - 16, codes, bits);
                  });
}

// The small types follow a rule without importance; with importance they are searched for.
void write_q4_0(const float* x, const float* w, int64_t n, uint8_t* out) {
    w ? search_centred("Q4_0", 4, x, w, n, out) : write_centred("Q4_0", 4, x, n, out);
}
void write_q5_0(const float* x, const float* w, int64_t n, uint8_t* out) {
    w ? search_centred("Q5_0", 5, x, w, n, out) : write_centred("Q5_0", 5, x, n, out);
}
void write_q4_1(const float* x, const float* w, int64_t n, uint8_t* out) {
    w ? search_affine_blocks("Q4_1", 4, x, w, n, out) : write_from_minimum("Q4_1", 4, x, n, out);
}
void write_q5_1(const float* x, const float* w, int64_t n, uint8_t* out) {
    w ? search_affine_blocks("Q5_1", 5, x, w, n, out) : write_from_minimum("Q5_1", 5, x, n, out);
}

}  // namespace
}  // namespace hc
