// Weights of each block type: random blocks, packed for the kernels and read one by one for the truth.
#include "op_table.h"
#include "pack/pack.h"

namespace op_table {

uint16_t to_half(double v) {
    if (v == 0) return 0;
    int e;
    const double m = std::frexp(std::fabs(v), &e);
    if (e < -13) return 0;
    auto bits = int(std::nearbyint(m * 2048));
    if (bits == 2048) bits = 1024, ++e;
    return uint16_t((v < 0 ? 0x8000 : 0) | (e + 14) << 10 | (bits & 1023));
}
double from_half(uint16_t h) {
    const int e = h >> 10 & 31, m = h & 1023;
    const double v = e ? std::ldexp(1024 + m, e - 25) : std::ldexp(m, -24);
    return h & 0x8000 ? -v : v;
}

double half_at(const uint8_t* p) { return from_half(uint16_t(p[0] | p[1] << 8)); }

namespace {

// The weights of one file block as ggml defines them, element by element.
int nibble(const uint8_t* q, int e) { return e < 16 ? q[e] & 15 : q[e - 16] >> 4; }
int fifth(const uint8_t* bits, int e) { return (bits[e / 8] >> (e % 8) & 1) << 4; }

double k_weight(const uint8_t* p, int e, bool five) {
    const uint8_t* s = p + 4;
    const int j = e / 32;
    const int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | s[j - 4] >> 6 << 4;
    const int minimum = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | s[j] >> 6 << 4;
    const uint8_t byte = p[(five ? 48 : 16) + e / 64 * 32 + e % 32];
    const int code = (j % 2 ? byte >> 4 : byte & 15) + (five ? (p[16 + e % 32] >> j & 1) << 4 : 0);
    return half_at(p) * scale * code - half_at(p + 2) * minimum;
}

double q6_k_weight(const uint8_t* p, int e) {
    const int half = e / 128, quarter = e % 128 / 32, l = e % 32;
    const uint8_t byte = p[half * 64 + quarter % 2 * 32 + l];
    const int code = (quarter < 2 ? byte & 15 : byte >> 4) | (p[128 + half * 32 + l] >> (2 * quarter) & 3)
                                                                 << 4;
    return half_at(p + 208) * int8_t(p[192 + e / 16]) * (code - 32);
}

int pair(const uint8_t* q, int e) { return q[e / 128 * 32 + e % 32] >> e % 128 / 32 * 2 & 3; }

double q3_k_weight(const uint8_t* p, int e) {
    const int j = e / 16, code = pair(p + 32, e) + (p[e % 32] >> e / 32 & 1) * 4 - 4;
    const int scale = (p[96 + j % 8] >> j / 8 * 4 & 15) + (p[104 + j % 4] >> j / 4 * 2 & 3) * 16 - 32;
    return half_at(p + 108) * scale * code;
}

double nvfp4_weight(const uint8_t* p, int e) {
    static const double fp4[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const int s = p[e / 16], byte = p[4 + e / 16 * 8 + e % 8], code = e % 16 < 8 ? byte & 15 : byte >> 4;
    const int exponent = s >> 3 & 15, fraction = s & 7;
    const double scale = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
    return (s == 0x7f ? 0 : scale) * fp4[code & 7] * (code & 8 ? -1 : 1);
}

// Where the float16 of a block of this type begins.
int scale_at(Type type) {
    switch (type) {
        case Q6_K: return 208;
        case Q2_K: return 80;
        case Q3_K: return 108;
        case TQ2_0: return 64;
        default: return 0;
    }
}

double weight(Type type, const uint8_t* p, int e) {
    static const int iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    static const double fp4[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    switch (type) {
        case Q4_0: return half_at(p) * (nibble(p + 2, e) - 8);
        case Q4_1: return half_at(p) * nibble(p + 4, e) + half_at(p + 2);
        case Q5_0: return half_at(p) * (nibble(p + 6, e) + fifth(p + 2, e) - 16);
        case Q5_1: return half_at(p) * (nibble(p + 8, e) + fifth(p + 4, e)) + half_at(p + 2);
        case Q8_0: return half_at(p) * int8_t(p[2 + e]);
        case IQ4_NL: return half_at(p) * iq4[nibble(p + 2, e)];
        case MXFP4:
            return std::ldexp(fp4[nibble(p + 1, e) & 7], p[0] - 127) * (nibble(p + 1, e) & 8 ? -1 : 1);
        case Q4_K: return k_weight(p, e, false);
        case Q5_K: return k_weight(p, e, true);
        case Q6_K: return q6_k_weight(p, e);
        case Q2_K:
            return half_at(p + 80) * (p[e / 16] & 15) * pair(p + 16, e) - half_at(p + 82) * (p[e / 16] >> 4);
        case Q3_K: return q3_k_weight(p, e);
        case IQ4_XS: {
            const int j = e / 32, low = p[4 + j / 2] >> j % 2 * 4 & 15, high = p[2 + j / 4] >> j % 4 * 2 & 3;
            return half_at(p) * (low + 16 * high - 32) * iq4[nibble(p + 8 + 16 * j, e % 32)];
        }
        case TQ2_0: return half_at(p + 64) * (pair(p, e) - 1);
        case NVFP4: return nvfp4_weight(p, e);
        case Q1_0: return half_at(p) * (p[2 + e / 8] >> e % 8 & 1 ? 1 : -1);
        case Q2_0: return half_at(p) * ((p[2 + e / 4] >> e % 4 * 2 & 3) - 1);
        default: return 0;
    }
}

}  // namespace

Weights random_weights(Type type, int64_t count, int64_t cols) {
    Weights w;
    const int64_t size = row_size(type, cols);
    const BlockSize block = block_size(type);
    std::vector<uint8_t>& plain = w.plain;
    plain.resize(static_cast<size_t>(count * size));
    for (uint8_t& b : plain) b = uint8_t(random_bits());
    for (int64_t b = 0; b < count * cols / block.weights; ++b) {
        uint8_t* p = &plain[size_t(b * block.bytes)];
        const auto put_half = [&](int at, double v) {
            const uint16_t h = to_half(v);
            std::memcpy(p + at, &h, 2);
        };
        if (!is_quantised(type)) {
            const float v = uniform();
            uint32_t bits;
            std::memcpy(&bits, &v, 4);
            const uint16_t h = type == F16 ? to_half(v) : uint16_t(bits >> 16);
            const uint32_t back = uint32_t(h) << 16;
            float brain;
            std::memcpy(&brain, &back, 4);
            std::memcpy(p, type == F32 ? static_cast<const void*>(&v) : &h, size_t(block.bytes));
            w.values.push_back(type == F32 ? v : type == F16 ? from_half(h) : brain);
            continue;
        }
        const double d = 0.01 + 0.001 * double(b % 7);
        if (type == MXFP4)
            p[0] = uint8_t(120 + b % 5);
        else if (type == NVFP4)
            for (int i = 0; i < 4; ++i) p[i] = uint8_t(p[i] % 24 + 1);
        else
            put_half(scale_at(type), block.weights == 256 ? d / 20 : d);
        if (type == Q2_K) put_half(82, d / 15);
        if (type == Q4_1 || type == Q5_1 || type == Q4_K || type == Q5_K) put_half(2, d / 3);
        for (int e = 0; with_truth && e < block.weights; ++e) w.values.push_back(weight(type, p, e));
    }
    w.bytes.resize(plain.size());
    for (int64_t r = 0; r < count; ++r)
        pack_row(type, &plain[size_t(r * size)], cols, &w.bytes[size_t(r * size)]);
    w.rows = {w.bytes.data(), size, count, cols, type};
    w.largest = magnitude(w.values);
    return w;
}

std::vector<double> seen(Type type, const float* x, int64_t n) {
    std::vector<double> v(x, x + n);
    if (!is_quantised(type)) return v;
    for (int64_t b = 0; b < n; b += 32) {
        float amax = 0;
        for (int64_t i = b; i < b + 32; ++i) amax = std::max(amax, std::fabs(x[i]));
        const float inverse = amax > 0 ? 127.0f / amax : 0, scale = amax / 127.0f;
        for (int64_t i = b; i < b + 32; ++i) v[size_t(i)] = double(std::nearbyintf(x[i] * inverse)) * scale;
    }
    return v;
}

double dot(const Weights& w, int64_t r, const std::vector<double>& x) {
    double s = 0;
    for (int64_t i = 0; i < w.rows.cols; ++i) s += w.at(r, i) * x[size_t(i)];
    return s;
}

}  // namespace op_table
