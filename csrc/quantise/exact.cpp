// Types whose bytes follow from a rule: those of ggml's quantize_row_*_ref and of its gguf package, to the
// bit.
#include <cmath>
#include <stdexcept>

#include "quantise/half.h"
#include "quantise/quantise.h"

namespace hc {
namespace {

constexpr int kSmall = 32;
constexpr int kLarge = 256;

[[noreturn]] void refuse_value(const char* type, float value) {
    char text[96];
    std::snprintf(text, sizeof text, "value %g does not fit in %s; keep this tensor in F32", double(value),
                  type);
    throw std::invalid_argument(text);
}

// 1 / scale, and 0 where that is infinite: then the scale's float16 is 0, too.
float inverse_of(float scale) {
    const float inverse = 1 / scale;
    return std::isfinite(inverse) ? inverse : 0;
}

float largest_size(const float* x, int n) {
    float most = 0;
    for (int i = 0; i < n; ++i) most = std::fabs(x[i]) > most ? std::fabs(x[i]) : most;
    return most;
}

// Half away from zero, as C's roundf: adding the float below 0.5 cannot carry 0.49999997 to 1.
int round_away(float x) {
    constexpr float kBelowHalf = 0.49999997f;
    return int(x + (x < 0 ? -kBelowHalf : kBelowHalf));
}

// Codes that count from the middle of their range: the weight of the largest size gets code 0.
void write_centred(const char* type, int bits, const float* x, int64_t n, uint8_t* out) {
    check_finite(type, x, n, kHalfBound);
    const int bytes = bits == 4 ? 18 : 22;
    const float middle = float(1 << (bits - 1)), last = 2 * middle - 1;
    for (int64_t at = 0; at < n; at += kSmall, x += kSmall, out += bytes) {
        float farthest = x[0];
        for (int i = 1; i < kSmall; ++i) farthest = std::fabs(x[i]) > std::fabs(farthest) ? x[i] : farthest;
        const float scale = farthest / -middle, inverse = inverse_of(scale);
        uint8_t codes[kSmall];
        for (int i = 0; i < kSmall; ++i) {
            const float code = x[i] * inverse + (middle + 0.5f);
            codes[i] = uint8_t(code < last ? code : last);
        }
        put_half(out, half_scale(type, scale));
        put_codes(out + bytes - 16, codes, bits);
    }
}

// Codes that count from a minimum.
void write_from_minimum(const char* type, int bits, const float* x, int64_t n, uint8_t* out) {
    check_finite(type, x, n, kHalfBound);
    const int bytes = bits == 4 ? 20 : 24;
    const float last = float((1 << bits) - 1);
    for (int64_t at = 0; at < n; at += kSmall, x += kSmall, out += bytes) {
        float least = x[0], most = x[0];
        for (int i = 1; i < kSmall; ++i) {
            least = x[i] < least ? x[i] : least;
            most = x[i] > most ? x[i] : most;
        }
        put_half(out + 2, half_scale(type, least));
        const float scale = (most - least) / last, inverse = inverse_of(scale);
        uint8_t codes[kSmall];
        for (int i = 0; i < kSmall; ++i) {
            const float code = (x[i] - least) * inverse + 0.5f;
            codes[i] = uint8_t(code < last ? code : last);
        }
        put_half(out, half_scale(type, scale));
        put_codes(out + bytes - 16, codes, bits);
    }
}

// Codes 0, 1 and 2 of what is about -scale, 0 and scale, and the scale: the largest size.
uint16_t ternary(const char* type, const float* x, uint8_t* codes) {
    const float scale = largest_size(x, kLarge), inverse = inverse_of(scale);
    for (int i = 0; i < kLarge; ++i) codes[i] = uint8_t(round_away(x[i] * inverse) + 1);
    return half_scale(type, scale);
}

// The exponent of a power of two, 127 less, of which the largest weight is 4 to 8 times as much. Of a float32
// logarithm, which just below a power of two may be the whole number above.
uint8_t mxfp4_exponent(float largest) {
    if (!(largest > 0)) return 0;
    const float exponent = std::floor(float(std::log2(double(largest)))) + 125;
    return exponent > 0 ? uint8_t(exponent) : 0;
}

constexpr float kMxfp4[8] = {0, 1, 2, 3, 4, 6, 8, 12};  // twice E2M1's

// The codes next to the weights, and the squared error. `e` 0 and 1 are denormal.
float mxfp4_codes(const float* x, const float* w, int e, uint8_t* codes) {
    const float unit = float_of(e < 2 ? uint32_t(1) << (21 + e) : uint32_t(e - 1) << 23);
    float total = 0;
    for (int i = 0; i < kSmall; ++i) {
        const float size = std::fabs(x[i]);
        float least = size;
        int code = 0;
        for (int k = 1; k < 8; ++k) {
            const float off = std::fabs(kMxfp4[k] * unit - size);
            code = off < least ? k : code;
            least = off < least ? off : least;
        }
        codes[i] = uint8_t(code && x[i] < 0 ? code + 8 : code);
        total += (w ? w[i] : 1.0f) * least * least;
    }
    return total;
}

}  // namespace

void write_f32(const float* x, const float*, int64_t n, uint8_t* out) {
    for (int64_t i = 0; i < n; ++i, out += 4) {
        const uint32_t bits = bits_of(x[i]);
        for (int k = 0; k < 4; ++k) out[k] = uint8_t(bits >> 8 * k);
    }
}

void write_f16(const float* x, const float*, int64_t n, uint8_t* out) {
    for (int64_t i = 0; i < n; ++i, out += 2) {
        const uint16_t half = to_half(x[i]);
        if ((half & 0x7fff) == 0x7c00 && std::isfinite(x[i])) refuse_value("F16", x[i]);
        put_half(out, half);
    }
}

void write_bf16(const float* x, const float*, int64_t n, uint8_t* out) {
    for (int64_t i = 0; i < n; ++i, out += 2) {
        const uint32_t bits = bits_of(x[i]);
        // A NaN whose payload lies in the lost half stays one.
        const uint32_t high = x[i] != x[i] ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        if ((high & 0x7fff) == 0x7f80 && std::isfinite(x[i])) refuse_value("BF16", x[i]);
        put_half(out, uint16_t(high));
    }
}

void write_q8_0(const float* x, const float*, int64_t n, uint8_t* out) {
    check_finite("Q8_0", x, n, kHalfBound);
    for (int64_t at = 0; at < n; at += kSmall, x += kSmall, out += 34) {
        const float scale = largest_size(x, kSmall) / 127, inverse = inverse_of(scale);
        put_half(out, half_scale("Q8_0", scale));
        for (int i = 0; i < kSmall; ++i) out[2 + i] = uint8_t(round_away(x[i] * inverse));
    }
}

void write_q4_0(const float* x, const float* w, int64_t n, uint8_t* out) {
    w ? search_q4_0(x, w, n, out) : write_centred("Q4_0", 4, x, n, out);
}
void write_q5_0(const float* x, const float* w, int64_t n, uint8_t* out) {
    w ? search_q5_0(x, w, n, out) : write_centred("Q5_0", 5, x, n, out);
}
void write_q4_1(const float* x, const float* w, int64_t n, uint8_t* out) {
    w ? search_q4_1(x, w, n, out) : write_from_minimum("Q4_1", 4, x, n, out);
}
void write_q5_1(const float* x, const float* w, int64_t n, uint8_t* out) {
    w ? search_q5_1(x, w, n, out) : write_from_minimum("Q5_1", 5, x, n, out);
}

// With importance, of three exponents the one that leaves the least error.
void write_mxfp4(const float* x, const float* w, int64_t n, uint8_t* out) {
    check_finite("MXFP4", x, n, INFINITY);
    for (int64_t at = 0; at < n; at += kSmall, x += kSmall, out += 17) {
        const int rule = mxfp4_exponent(largest_size(x, kSmall));
        uint8_t codes[kSmall], others[kSmall];
        float least = mxfp4_codes(x, w, rule, codes);
        out[0] = uint8_t(rule);
        for (int e = rule - 1; w && e <= rule + 1; e += 2) {
            if (e < 0 || e > 254) continue;
            const float error = mxfp4_codes(x, w, e, others);
            if (!(error < least)) continue;
            least = error;
            out[0] = uint8_t(e);
            std::memcpy(codes, others, sizeof codes);
        }
        put_codes(out + 1, codes, 4);
        if (w) w += kSmall;
    }
}

void write_tq2_0(const float* x, const float*, int64_t n, uint8_t* out) {
    check_finite("TQ2_0", x, n, kHalfBound);
    for (int64_t at = 0; at < n; at += kLarge, x += kLarge, out += 66) {
        uint8_t codes[kLarge];
        put_half(out + 64, ternary("TQ2_0", x, codes));
        for (int i = 0; i < 64; ++i) {
            const uint8_t* c = codes + i / 32 * 128 + i % 32;
            out[i] = uint8_t(c[0] | c[32] << 2 | c[64] << 4 | c[96] << 6);
        }
    }
}

// A byte holds five digits to base 3, a number below 243, as the first 8 bits of the fraction it is of 243.
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

}  // namespace hc
