// Types whose scales are searched for. A block is first brought to a largest size from 1 to 2, by a power of
// two: what follows meets neither overflow nor denormals, and scales are rounded to the float16 they become.
#include <cmath>

#include "quantise/affine.h"
#include "quantise/half.h"
#include "quantise/quantise.h"
#include "quantise/scaled.h"

namespace hc {
namespace {

constexpr int kLarge = 256;
constexpr float kSmallest = 0x1p-24f;  // float16's

// The power of two not above the largest size; 0 where all weights are nearer to 0 than to any other float16.
float unit_of(const float* x, int n) {
    uint32_t largest = 0;
    for (int i = 0; i < n; ++i) {
        const uint32_t size = bits_of(x[i]) & 0x7fffffff;
        largest = size > largest ? size : largest;
    }
    return float_of(largest) > kSmallest / 2 ? float_of(largest & 0x7f800000) : 0;
}

// A scale of weights that were divided by `unit`, rounded to a float16 of what it is of the weights
// themselves.
struct HalfScale {
    uint16_t half = 0;
    float value = 0;

    HalfScale() = default;
    HalfScale(const char* type, float scale, float unit) {
        half = half_scale(type, scale * unit);
        if (scale != 0 && !(half & 0x7fff)) half |= 1;
        value = from_half(half) / unit;
    }
};

// --- blocks of 256 weights, whose runs have scales and minima of few bits ---

template <int Groups> struct AffineBlock {
    HalfScale scale, minimum;
    V scales[Groups], minima[Groups];
    double error = INFINITY;
};

constexpr int kAffineRounds = 2;

// Scales and minima 0..top near `scales` and `minima`: those of least error, given what they are multiples
// of.
template <int N, int Groups> void choose_near(const Runs<N>* runs, float last, float top, const V* scales,
                                              const V* minima, AffineBlock<Groups>& to) {
    V total = splat(0);
    for (int g = 0; g < Groups; ++g) {
        V least = splat(INFINITY);
        for (int ds = -1; ds <= 1; ++ds)
            for (int dm = -1; dm <= 1; ++dm) {
                const V scale = between(scales[g] + splat(float(ds)), splat(0), splat(top));
                const V minimum = between(minima[g] + splat(float(dm)), splat(0), splat(top));
                const V error = affine_error(runs[g], splat(to.scale.value) * scale,
                                             splat(-to.minimum.value) * minimum, splat(last));
                const auto better = error < least;
                least = select(better, error, least);
                to.scales[g] = select(better, scale, to.scales[g]);
                to.minima[g] = select(better, minimum, to.minima[g]);
            }
        total += least;
    }
    to.error = sum_lanes(total);
}

// What scales and minima are best multiples of, where codes, scales and minima stay what they are.
template <int N, int Groups>
void fit_multiples(const Runs<N>* runs, float last, const AffineBlock<Groups>& block, float& d, float& dmin) {
    V qq = splat(0), qm = qq, mm = qq, xq = qq, xm = qq;
    for (int g = 0; g < Groups; ++g) {
        const V step = splat(block.scale.value) * block.scales[g], inverse = ratio(splat(1), step);
        const V base = splat(-block.minimum.value) * block.minima[g];
        for (int j = 0; j < N; ++j) {
            const V x = load(runs[g].x[j]), w = load(runs[g].w[j]);
            const V q = block.scales[g] * affine_code(x, base, inverse, splat(last));
            const V wq = w * q, wm = w * block.minima[g];
            qq += wq * q;
            qm += wq * block.minima[g];
            mm += wm * block.minima[g];
            xq += wq * x;
            xm += wm * x;
        }
    }
    const double a = sum_lanes(qq), b = sum_lanes(qm), c = sum_lanes(mm);
    const double p = sum_lanes(xq), q = sum_lanes(xm), determinant = a * c - b * b;
    if (determinant > 1e-9 * a * c) {
        d = float((c * p - b * q) / determinant);
        dmin = float((b * p - a * q) / determinant);
    } else if (a > 0) {
        d = float((p + double(dmin) * b) / a);
    }
    d = d > 0 ? d : 0;
    dmin = dmin > 0 ? dmin : 0;
}

// Codes 0..last of 256 weights in runs of N, with scales and minima 0..top of the runs.
template <int N> AffineBlock<kLarge / N / kLanes> search_affine(const char* type, const float* x,
                                                                const float* w, float last, float top,
                                                                uint8_t* codes) {
    constexpr int kGroups = kLarge / N / kLanes;
    AffineBlock<kGroups> best;
    std::memset(codes, 0, kLarge);
    for (int g = 0; g < kGroups; ++g) best.scales[g] = best.minima[g] = splat(0);
    const float unit = unit_of(x, kLarge);
    if (unit == 0) return best;
    Runs<N> runs[kGroups];
    V scales[kGroups], minima[kGroups];
    const float inverse = 1 / unit;
    const float all[kLanes] = {inverse, inverse, inverse, inverse, inverse, inverse, inverse, inverse};
    float d = 0, dmin = 0;
    for (int g = 0; g < kGroups; ++g) {
        const int first = g * N * kLanes;
        load_runs(runs[g], x + first, w ? w + first : nullptr, kLanes, all);
        const AffineFit fit = AffineSearch<N>(runs[g], last, true).find();
        scales[g] = fit.step;
        minima[g] = splat(0) - fit.base;
        d = std::fmax(d, largest_lane(fit.step) / top);
        dmin = std::fmax(dmin, largest_lane(minima[g]) / top);
    }
    for (int round = 0; round < kAffineRounds; ++round) {
        AffineBlock<kGroups> block;
        block.scale = HalfScale(type, d, unit);
        block.minimum = HalfScale(type, dmin, unit);
        for (int g = 0; g < kGroups && round == 0; ++g) {
            scales[g] =
                round_lanes(between(ratio(scales[g], splat(block.scale.value)), splat(0), splat(top)));
            minima[g] =
                round_lanes(between(ratio(minima[g], splat(block.minimum.value)), splat(0), splat(top)));
        }
        choose_near(runs, last, top, scales, minima, block);
        if (block.error < best.error) best = block;
        fit_multiples(runs, last, block, d, dmin);
        for (int g = 0; g < kGroups; ++g) {
            scales[g] = block.scales[g];
            minima[g] = block.minima[g];
        }
    }
    for (int g = 0; g < kGroups; ++g) {
        const V step = splat(best.scale.value) * best.scales[g], inverse_step = ratio(splat(1), step);
        const V base = splat(-best.minimum.value) * best.minima[g];
        for (int j = 0; j < N; ++j) {
            const V q = affine_code(load(runs[g].x[j]), base, inverse_step, splat(last));
            for (int i = 0; i < kLanes; ++i) codes[(g * kLanes + i) * N + j] = uint8_t(q[i]);
        }
    }
    return best;
}

// --- blocks of 256 weights, whose runs have scales of few bits ---

template <int Groups> struct ScaledBlock {
    HalfScale scale;
    V scales[Groups];
    double error = INFINITY;
};

constexpr int kScaledRounds = 2;

// Scales lowest..-lowest - 1 near `scales`: those of least error, given what they are multiples of. Then what
// they are best multiples of, where codes and scales stay what they are, into d.
template <int N, int Groups, class Values> void choose_near(const Runs<N>* runs, const Values& values,
                                                            float lowest, const V* scales,
                                                            ScaledBlock<Groups>& to, float& d) {
    V total = splat(0), xq = total, qq = total;
    for (int g = 0; g < Groups; ++g) {
        V least = splat(INFINITY);
        for (int ds = -1; ds <= 1; ++ds) {
            const V scale = between(scales[g] + splat(float(ds)), splat(lowest), splat(-lowest - 1));
            const V error = scaled_error(runs[g], values, splat(to.scale.value) * scale);
            const auto better = error < least;
            least = select(better, error, least);
            to.scales[g] = select(better, scale, to.scales[g]);
        }
        total += least;
        const V inverse = ratio(splat(1), splat(to.scale.value) * to.scales[g]);
        for (int j = 0; j < N; ++j) {
            const V x = load(runs[g].x[j]), q = to.scales[g] * values.nearest(x * inverse);
            const V wq = load(runs[g].w[j]) * q;
            xq += wq * x;
            qq += wq * q;
        }
    }
    to.error = sum_lanes(total);
    const double squares = sum_lanes(qq);
    if (squares > 0) d = float(sum_lanes(xq) / squares);
}

template <int N, class Values, int S>
ScaledBlock<kLarge / N / kLanes> search_scaled(const char* type, const float* x, const float* w,
                                               const Values& values, const float (&starts)[S], float lowest,
                                               uint8_t* codes) {
    constexpr int kGroups = kLarge / N / kLanes;
    ScaledBlock<kGroups> best;
    for (int g = 0; g < kGroups; ++g) best.scales[g] = splat(0);
    const float unit = unit_of(x, kLarge), inverse = unit == 0 ? 0 : 1 / unit;
    Runs<N> runs[kGroups];
    V scales[kGroups];
    const float all[kLanes] = {inverse, inverse, inverse, inverse, inverse, inverse, inverse, inverse};
    float farthest = 0;
    for (int g = 0; g < kGroups; ++g) {
        const int first = g * N * kLanes;
        load_runs(runs[g], x + first, w ? w + first : nullptr, kLanes, all);
        scales[g] = ScaleSearch<N, Values>(runs[g], values).find(starts, 2);
        for (int i = 0; i < kLanes; ++i)
            farthest = std::fabs(scales[g][i]) > std::fabs(farthest) ? scales[g][i] : farthest;
    }
    float d = farthest / lowest;  // the largest scale takes the lowest number
    for (int round = 0; round < kScaledRounds && unit != 0; ++round) {
        ScaledBlock<kGroups> block;
        block.scale = HalfScale(type, d, unit);
        for (int g = 0; g < kGroups && round == 0; ++g)
            scales[g] = round_lanes(
                between(ratio(scales[g], splat(block.scale.value)), splat(lowest), splat(-lowest - 1)));
        choose_near(runs, values, lowest, scales, block, d);
        if (block.error < best.error) best = block;
        for (int g = 0; g < kGroups; ++g) scales[g] = block.scales[g];
    }
    for (int g = 0; g < kGroups; ++g) {
        const V inverse_scale = ratio(splat(1), splat(best.scale.value) * best.scales[g]);
        for (int j = 0; j < N; ++j) {
            const V q = values.nearest(load(runs[g].x[j]) * inverse_scale);
            for (int i = 0; i < kLanes; ++i) codes[(g * kLanes + i) * N + j] = values.code(q[i]);
        }
    }
    return best;
}

// --- blocks of 32 weights, eight at a time ---

// The units of up to eight blocks of 32 weights, and their inverses, 0 for 0.
struct Units {
    float value[kLanes] = {}, inverse[kLanes] = {};
    Units(const float* x, int blocks) {
        for (int i = 0; i < blocks; ++i) {
            value[i] = unit_of(x + 32 * i, 32);
            inverse[i] = value[i] == 0 ? 0 : 1 / value[i];
        }
    }
};

template <class Values, int S, class Put> void search_blocks(const char* type, const float* x, const float* w,
                                                             int64_t n, const Values& values,
                                                             const float (&starts)[S], Put put) {
    check_finite(type, x, n, kHalfBound);
    for (int64_t at = 0; at < n; at += 32 * kLanes) {
        const int blocks = int(n - at < 32 * kLanes ? (n - at) / 32 : kLanes);
        const Units units(x + at, blocks);
        Runs<32> runs;
        load_runs(runs, x + at, w ? w + at : nullptr, blocks, units.inverse);
        const V found = ScaleSearch<32, Values>(runs, values).find(starts, 2);
        HalfScale scales[kLanes];
        float rounded[kLanes] = {};
        for (int i = 0; i < blocks; ++i) {
            if (units.value[i] != 0) scales[i] = HalfScale(type, found[i], units.value[i]);
            rounded[i] = scales[i].value;
        }
        const V inverse = ratio(splat(1), load(rounded));
        uint8_t codes[kLanes][32];
        for (int j = 0; j < 32; ++j) {
            const V q = values.nearest(load(runs.x[j]) * inverse);
            for (int i = 0; i < kLanes; ++i) codes[i][j] = values.code(q[i]);
        }
        for (int i = 0; i < blocks; ++i) put(at / 32 + i, scales[i].half, codes[i]);
    }
}

void search_affine_blocks(const char* type, int bits, const float* x, const float* w, int64_t n,
                          uint8_t* out) {
    check_finite(type, x, n, kHalfBound);
    const float last = float((1 << bits) - 1);
    const int bytes = bits == 4 ? 20 : 24;
    for (int64_t at = 0; at < n; at += 32 * kLanes) {
        const int blocks = int(n - at < 32 * kLanes ? (n - at) / 32 : kLanes);
        const Units units(x + at, blocks);
        Runs<32> runs;
        load_runs(runs, x + at, w + at, blocks, units.inverse);
        const AffineFit fit = AffineSearch<32>(runs, last, false).find();
        HalfScale scales[kLanes], minima[kLanes];
        float steps[kLanes] = {}, bases[kLanes] = {};
        for (int i = 0; i < blocks; ++i) {
            if (units.value[i] == 0) continue;
            scales[i] = HalfScale(type, fit.step[i], units.value[i]);
            minima[i] = HalfScale(type, fit.base[i], units.value[i]);
            steps[i] = scales[i].value;
            bases[i] = minima[i].value;
        }
        const V inverse = ratio(splat(1), load(steps)), base = load(bases);
        uint8_t codes[kLanes][32];
        for (int j = 0; j < 32; ++j) {
            const V q = affine_code(load(runs.x[j]), base, inverse, splat(last));
            for (int i = 0; i < kLanes; ++i) codes[i][j] = uint8_t(q[i]);
        }
        for (int i = 0; i < blocks; ++i) {
            uint8_t* block = out + (at / 32 + i) * bytes;
            put_half(block, scales[i].half);
            put_half(block + 2, minima[i].half);
            put_codes(block + bytes - 16, codes[i], bits);
        }
    }
}

// --- layouts ---

// Two bits of each code, from `shift` on: byte i of each half of a block has those of weights i, 32 + i, ....
void put_pairs(uint8_t* out, const uint8_t* codes, int shift) {
    for (int i = 0; i < 64; ++i) {
        const uint8_t* c = codes + i / 32 * 128 + i % 32;
        int byte = 0;
        for (int k = 0; k < 4; ++k) byte |= (c[32 * k] >> shift & 3) << 2 * k;
        out[i] = uint8_t(byte);
    }
}

// One bit of each code: bit k of byte i has that of weight 32 * k + i.
void put_bits(uint8_t* out, const uint8_t* codes, int shift) {
    for (int i = 0; i < 32; ++i) {
        int byte = 0;
        for (int k = 0; k < 8; ++k) byte |= (codes[32 * k + i] >> shift & 1) << k;
        out[i] = uint8_t(byte);
    }
}

// Four bits of each code: of each two runs of `width`, the first in the low halves.
void put_nibbles(uint8_t* out, const uint8_t* codes, int width) {
    for (int i = 0; i < 128; ++i) {
        const uint8_t* c = codes + i / width * 2 * width + i % width;
        out[i] = uint8_t((c[0] & 15) | (c[width] & 15) << 4);
    }
}

// 8 scales and 8 minima of 6 bits: the first four of each whole, the others spread over what is left.
void put_six_bits(uint8_t* out, V scales, V minima) {
    for (int j = 0; j < 4; ++j) {
        const int scale = int(scales[j + 4]), minimum = int(minima[j + 4]);
        out[j] = uint8_t(int(scales[j]) | scale >> 4 << 6);
        out[j + 4] = uint8_t(int(minima[j]) | minimum >> 4 << 6);
        out[j + 8] = uint8_t((scale & 15) | (minimum & 15) << 4);
    }
}

// Calls fn(x, w, out) for each block of a row.
template <class Fn> void each_block(const char* type, const float* x, const float* w, int64_t n, uint8_t* out,
                                    int64_t bytes, Fn fn) {
    check_finite(type, x, n, kHalfBound);
    for (int64_t at = 0; at < n; at += kLarge, out += bytes) fn(x + at, w ? w + at : nullptr, out);
}

// Where the largest weight lies before a scale is fitted: below the lowest value, or above the highest.
constexpr float kCentredStarts[] = {-0.9f, -0.7f, -0.5f, -0.3f, -0.1f, 0.0f, 0.3f, 0.6f};
constexpr float kCoarseStarts[] = {-0.9f, -0.7f, -0.5f, -0.3f, -0.1f, 0.0f, 0.3f, 0.6f};
constexpr float kTableStarts[] = {-7, -5, -3, -1, 0, 3, 6, 9};

}  // namespace

void write_q2_k(const float* x, const float* w, int64_t n, uint8_t* out) {
    each_block("Q2_K", x, w, n, out, 84, [](const float* x, const float* w, uint8_t* out) {
        uint8_t codes[kLarge];
        const AffineBlock<2> block = search_affine<16>("Q2_K", x, w, 3, 15, codes);
        for (int j = 0; j < 16; ++j)
            out[j] = uint8_t(int(block.scales[j / 8][j % 8]) | int(block.minima[j / 8][j % 8]) << 4);
        put_pairs(out + 16, codes, 0);
        put_half(out + 80, block.scale.half);
        put_half(out + 82, block.minimum.half);
    });
}

void write_q3_k(const float* x, const float* w, int64_t n, uint8_t* out) {
    each_block("Q3_K", x, w, n, out, 110, [](const float* x, const float* w, uint8_t* out) {
        uint8_t codes[kLarge];
        const CentredValues values(4);
        const ScaledBlock<2> block = search_scaled<16>("Q3_K", x, w, values, kCoarseStarts, -32, codes);
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

void write_q4_k(const float* x, const float* w, int64_t n, uint8_t* out) {
    each_block("Q4_K", x, w, n, out, 144, [](const float* x, const float* w, uint8_t* out) {
        uint8_t codes[kLarge];
        const AffineBlock<1> block = search_affine<32>("Q4_K", x, w, 15, 63, codes);
        put_half(out, block.scale.half);
        put_half(out + 2, block.minimum.half);
        put_six_bits(out + 4, block.scales[0], block.minima[0]);
        put_nibbles(out + 16, codes, 32);
    });
}

void write_q5_k(const float* x, const float* w, int64_t n, uint8_t* out) {
    each_block("Q5_K", x, w, n, out, 176, [](const float* x, const float* w, uint8_t* out) {
        uint8_t codes[kLarge];
        const AffineBlock<1> block = search_affine<32>("Q5_K", x, w, 31, 63, codes);
        put_half(out, block.scale.half);
        put_half(out + 2, block.minimum.half);
        put_six_bits(out + 4, block.scales[0], block.minima[0]);
        put_bits(out + 16, codes, 4);
        put_nibbles(out + 48, codes, 32);
    });
}

void write_q6_k(const float* x, const float* w, int64_t n, uint8_t* out) {
    each_block("Q6_K", x, w, n, out, 210, [](const float* x, const float* w, uint8_t* out) {
        uint8_t codes[kLarge];
        const CentredValues values(32);
        const ScaledBlock<2> block = search_scaled<16>("Q6_K", x, w, values, kCentredStarts, -128, codes);
        put_nibbles(out, codes, 64);
        put_pairs(out + 128, codes, 4);
        for (int j = 0; j < 16; ++j) out[192 + j] = uint8_t(int(block.scales[j / 8][j % 8]));
        put_half(out + 208, block.scale.half);
    });
}

void write_iq4_nl(const float* x, const float* w, int64_t n, uint8_t* out) {
    static const TableValues values;
    search_blocks("IQ4_NL", x, w, n, values, kTableStarts,
                  [&](int64_t block, uint16_t scale, const uint8_t* codes) {
                      put_half(out + 18 * block, scale);
                      put_codes(out + 18 * block + 2, codes, 4);
                  });
}

void write_iq4_xs(const float* x, const float* w, int64_t n, uint8_t* out) {
    static const TableValues values;
    each_block("IQ4_XS", x, w, n, out, 136, [](const float* x, const float* w, uint8_t* out) {
        uint8_t codes[kLarge];
        const ScaledBlock<1> block = search_scaled<32>("IQ4_XS", x, w, values, kTableStarts, -32, codes);
        put_half(out, block.scale.half);
        int high = 0;
        std::memset(out + 4, 0, 4);
        for (int j = 0; j < 8; ++j) {
            const int scale = int(block.scales[0][j]) + 32;
            high |= scale >> 4 << 2 * j;
            out[4 + j / 2] |= uint8_t((scale & 15) << 4 * (j % 2));
        }
        put_half(out + 2, uint16_t(high));
        put_nibbles(out + 8, codes, 16);
    });
}

namespace {

void search_centred(const char* type, int bits, const float* x, const float* w, int64_t n, uint8_t* out) {
    const int bytes = bits == 4 ? 18 : 22;
    search_blocks(type, x, w, n, CentredValues(1 << (bits - 1)), kCentredStarts,
                  [&](int64_t block, uint16_t scale, const uint8_t* codes) {
                      put_half(out + bytes * block, scale);
                      put_codes(out + bytes * (block + 1) - 16, codes, bits);
                  });
}

}  // namespace

void search_q4_0(const float* x, const float* w, int64_t n, uint8_t* out) {
    search_centred("Q4_0", 4, x, w, n, out);
}
void search_q5_0(const float* x, const float* w, int64_t n, uint8_t* out) {
    search_centred("Q5_0", 5, x, w, n, out);
}
void search_q4_1(const float* x, const float* w, int64_t n, uint8_t* out) {
    search_affine_blocks("Q4_1", 4, x, w, n, out);
}
void search_q5_1(const float* x, const float* w, int64_t n, uint8_t* out) {
    search_affine_blocks("Q5_1", 5, x, w, n, out);
}

}  // namespace hc
