// Types whose bytes follow from a rule: bit-identical to ggml's quantize_row_*_ref and to the gguf package.
#pragma once
#include <cmath>

#include "quantise/blocks.h"
#include "quantise/lanes.h"

namespace hc {
namespace {

// 1 / scale, or 0 if that is infinite: then the scale's float16 is 0 too.
inline float inverse_of(float scale) {
    const float inverse = 1 / scale;
    return size_bits(inverse) < kInfinite ? inverse : 0;
}

// The first weight with the largest magnitude.
template <int N> float farthest_of(const float* x) {
    const uint32_t most = largest_bits(x, N);
    int first = N - 1;
    for (int i = 0; i < N; ++i) {
        const int index = size_bits(x[i]) == most ? i : N - 1;
        first = index < first ? index : first;
    }
    return x[first];
}

// Rounds half away from zero like C's roundf: adding the float below 0.5 cannot carry 0.49999997 to 1.
inline int round_away(float x) {
    constexpr float kBelowHalf = 0.49999997f;
    return int(x + (x < 0 ? -kBelowHalf : kBelowHalf));
}

// Codes centred in their range: the weight with the largest magnitude gets code 0.
void write_centred(const char* type, int bits, const float* x, int64_t n, uint8_t* out) {
    check_finite(type, x, n, kHalfBound);
    const int bytes = bits == 4 ? 18 : 22;
    const float middle = float(1 << (bits - 1)), last = 2 * middle - 1;
    for (int64_t at = 0; at < n; at += kSmall, x += kSmall, out += bytes) {
        const float scale = farthest_of<kSmall>(x) / -middle, inverse = inverse_of(scale);
        int codes[kSmall];
        for (int i = 0; i < kSmall; ++i) {
            const float code = x[i] * inverse + (middle + 0.5f);
            codes[i] = int(code < last ? code : last);
        }
        put_half(out, half_scale(type, scale));
        put_codes(out + bytes - 16, codes, bits);
    }
}

// The smallest and the largest of 32 weights; if the smallest is zero, the first zero (its sign counts).
struct Ends {
    float least, most;
    explicit Ends(const float* x) {
        V lows = load(x), highs = lows;
        for (int at = kLanes; at < kSmall; at += kLanes) {
            lows = smaller(load(x + at), lows);
            highs = larger(load(x + at), highs);
        }
        float low[kLanes], high[kLanes];
        store(low, lows);
        store(high, highs);
        for (int half = kLanes / 2; half > 0; half /= 2)
            for (int i = 0; i < half; ++i) {
                low[i] = low[i + half] < low[i] ? low[i + half] : low[i];
                high[i] = high[i + half] > high[i] ? high[i + half] : high[i];
            }
        least = low[0];
        most = high[0];
        for (int i = kSmall; least == 0 && i-- > 0;)
            if (x[i] == 0) least = x[i];
    }
};

// Codes that count from a minimum.
void write_from_minimum(const char* type, int bits, const float* x, int64_t n, uint8_t* out) {
    check_finite(type, x, n, kHalfBound);
    const int bytes = bits == 4 ? 20 : 24;
    const float last = float((1 << bits) - 1);
    for (int64_t at = 0; at < n; at += kSmall, x += kSmall, out += bytes) {
        const Ends ends(x);
        const float least = ends.least, scale = (ends.most - least) / last, inverse = inverse_of(scale);
        int codes[kSmall];
        for (int i = 0; i < kSmall; ++i) {
            const float code = (x[i] - least) * inverse + 0.5f;
            codes[i] = int(code < last ? code : last);
        }
        put_half(out + 2, half_scale(type, least));
        put_half(out, half_scale(type, scale));
        put_codes(out + bytes - 16, codes, bits);
    }
}

// Codes 0, 1 and 2 for about -scale, 0 and scale; the scale is the largest magnitude.
uint16_t ternary(const char* type, const float* x, uint8_t* codes) {
    const float scale = float_of(largest_bits(x, kLarge)), inverse = inverse_of(scale);
    for (int i = 0; i < kLarge; ++i) codes[i] = uint8_t(round_away(x[i] * inverse) + 1);
    return half_scale(type, scale);
}

// Returns the exponent, biased by 127, of the power of two p with 4 p <= largest < 8 p. Uses a float32
// logarithm, which may round up to the next integer just below a power of two.
inline int mxfp4_exponent(float largest) {
    if (!(largest > 0)) return 0;
    const double exponent = std::floor(double(float(std::log2(double(largest))))) + 125;
    return exponent > 0 ? int(exponent) : 0;
}

// Values in units, and the bounds between them. Units of exponents 0 and 1 are denormal.
constexpr float kMxfp4[8] = {0, 1, 2, 3, 4, 6, 8, 12};
constexpr float kMxfp4Bounds[7] = {0.5f, 1.5f, 2.5f, 3.5f, 5, 7, 10};
inline float mxfp4_unit(int exponent) {
    return float_of(exponent < 2 ? uint32_t(1) << (21 + exponent) : uint32_t(exponent - 1) << 23);
}

// The codes nearest to the weights; of two equally near codes, the lower one.
void mxfp4_codes(const float* x, float unit, int* codes) {
    float bounds[7];
    for (int k = 0; k < 7; ++k) bounds[k] = kMxfp4Bounds[k] * unit;
    for (int i = 0; i < kSmall; ++i) {
        const float size = float_of(size_bits(x[i]));
        int code = 0;
        for (int k = 0; k < 7; ++k) code += size > bounds[k] ? 1 : 0;
        codes[i] = code | ((code != 0) & (x[i] < 0)) << 3;
    }
}

double mxfp4_error(const float* x, const float* w, float unit) {
    V total = splat(0);
    for (int i = 0; i < kSmall; i += kLanes) {
        const V size = size_of(load(x + i));
        V value = splat(0);
        for (int k = 0; k < 7; ++k)
            value = select(size > splat(kMxfp4Bounds[k] * unit), splat(kMxfp4[k + 1] * unit), value);
        total += load(w + i) * (size - value) * (size - value);
    }
    return sum_lanes(total);
}

void write_f32(const float* x, const float*, int64_t n, uint8_t* out) {
    std::memcpy(out, x, size_t(n) * sizeof *x);
}

void write_f16(const float* x, const float*, int64_t n, uint8_t* out) {
    for (int64_t i = 0; i < n; ++i, out += 2) {
        const uint16_t half = to_half(x[i]);
        if ((half & 0x7fff) == 0x7c00 && size_bits(x[i]) < kInfinite) refuse_value("F16", x[i]);
        put_half(out, half);
    }
}

// Rounds to nearest, ties to even. A NaN stays NaN even if its payload is in the lost half.
void write_bf16(const float* x, const float*, int64_t n, uint8_t* out) {
    for (int64_t at = 0; at < n; at += kLarge) {
        const int count = int(n - at < kLarge ? n - at : kLarge);
        uint16_t halves[kLarge];
        int overflows = 0;
        for (int i = 0; i < count; ++i) {
            const uint32_t bits = bits_of(x[at + i]), size = bits & 0x7fffffff;
            const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
            halves[i] = uint16_t(size > kInfinite ? bits >> 16 | 0x40 : rounded);
            overflows |= int(size < kInfinite) & int((rounded & 0x7fff) == 0x7f80);
        }
        for (int i = 0; overflows; ++i)
            if (size_bits(x[at + i]) < kInfinite && (halves[i] & 0x7fff) == 0x7f80)
                refuse_value("BF16", x[at + i]);
        std::memcpy(out + 2 * at, halves, size_t(count) * 2);
    }
}

void write_q8_0(const float* x, const float*, int64_t n, uint8_t* out) {
    check_finite("Q8_0", x, n, kHalfBound);
    for (int64_t at = 0; at < n; at += kSmall, x += kSmall, out += 34) {
        const float scale = float_of(largest_bits(x, kSmall)) / 127, inverse = inverse_of(scale);
        put_half(out, half_scale("Q8_0", scale));
        for (int i = 0; i < kSmall; ++i) out[2 + i] = uint8_t(round_away(x[i] * inverse));
    }
}

// With importance, chooses the exponent with the least error among three.
void write_mxfp4(const float* x, const float* w, int64_t n, uint8_t* out) {
    check_finite("MXFP4", x, n, INFINITY);
    for (int64_t at = 0; at < n; at += kSmall, x += kSmall, out += 17) {
        const int rule = mxfp4_exponent(float_of(largest_bits(x, kSmall)));
        int best = rule, codes[kSmall];
        double least = w ? mxfp4_error(x, w, mxfp4_unit(rule)) : 0;
        for (int e = rule - 1; w && e <= rule + 1; e += 2) {
            const double error = e < 0 || e > 254 ? INFINITY : mxfp4_error(x, w, mxfp4_unit(e));
            best = error < least ? e : best;
            least = error < least ? error : least;
        }
        mxfp4_codes(x, mxfp4_unit(best), codes);
        out[0] = uint8_t(best);
        put_codes(out + 1, codes, 4);
        if (w) w += kSmall;
    }
}

void write_tq2_0(const float* x, const float*, int64_t n, uint8_t* out) {
    check_finite("TQ2_0", x, n, kHalfBound);
    for (int64_t at = 0; at < n; at += kLarge, x += kLarge, out += 66) {
        uint8_t codes[kLarge];
        put_half(out + 64, ternary("TQ2_0", x, codes));
        put_pairs(out, codes, 0);
    }
}

// A byte holds five digits to base 3, a number below 243: the first 8 bits of the fraction number / 243.
void write_tq1_0(const float* x, const float*, int64_t n, uint8_t* out) {
    check_finite("TQ1_0", x, n, kHalfBound);
    for (int64_t at = 0; at < n; at += kLarge, x += kLarge, out += 54) {
        uint8_t codes[kLarge];
        put_half(out + 52, ternary("TQ1_0", x, codes));
        for (int i = 0; i < 52; ++i) {
            const int step = i < 32 ? 32 : i < 48 ? 16 : 4, first = i < 32 ? i : i < 48 ? 128 + i : 192 + i;
            int number = 0;
            for (int digit = 0; digit < 5; ++digit)
                number = 3 * number + (i < 48 || digit < 4 ? codes[first + digit * step] : 0);
            out[i] = uint8_t((number * 256 + 242) / 243);
        }
    }
}

}  // namespace
}  // namespace hc
