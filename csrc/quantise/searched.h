// Types whose scales are searched for. A block is first brought to a largest size from 1 to 2, by a power of
// two: what follows meets neither overflow nor denormals, and scales are rounded to the float16 they become.
#pragma once
#include <cmath>

#include "quantise/affine.h"
#include "quantise/blocks.h"
#include "quantise/exact.h"
#include "quantise/scaled.h"

namespace hc {
namespace {

// The power of two not above the largest size; 0 where all weights are nearer to 0 than to any other float16.
inline float unit_of(const float* x, int n) {
    const uint32_t largest = largest_bits(x, n);
    return float_of(largest) > 0x1p-25f ? float_of(largest & kInfinite) : 0;
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

// What is left of the squares of a block's weights where it is all but one of those that the type holds
// exactly, such as a constant one. Then rounding the scale is what errs, and some more scales are tried.
constexpr double kNearlyExact = 3e-5;
constexpr int kMoreScales = 8;

// The eight runs of a group, brought to size.
template <int N> void load_group(Runs<N>& to, const float* x, const float* w, int group, float unit) {
    const float inverse = unit == 0 ? 0 : 1 / unit;
    float all[kLanes];
    for (float& each : all) each = inverse;
    const int first = group * N * kLanes;
    load_runs(to, x + first, w ? w + first : nullptr, kLanes, all);
}

template <int N> double energy_of(const Runs<N>& runs) {
    V squares = splat(0);
    for (int j = 0; j < N; ++j) squares += load(runs.w[j]) * load(runs.x[j]) * load(runs.x[j]);
    return sum_lanes(squares);
}

// Where the largest weight lies before a scale is fitted, relative to the lowest or to the highest value.
constexpr float kFineStarts[] = {-0.9f, -0.7f, -0.6f, -0.5f, -0.4f, -0.3f,
                                 -0.2f, -0.1f, 0.0f,  0.2f,  0.4f,  0.6f};
constexpr float kCoarseStarts[] = {-0.5f, -0.1f, 0.3f};
constexpr float kTableStarts[] = {-7, -5, -3, -1, 0, 3, 6, 9};
// The same of the code of the largest weight, relative to the last one.
constexpr float kAffineStarts[] = {-0.9f, -0.8f, -0.7f, -0.6f, -0.5f, -0.4f, -0.3f, -0.2f, -0.1f, 0.0f,
                                   0.1f,  0.2f,  0.3f,  0.4f,  0.5f,  0.6f,  0.7f,  0.8f,  0.9f};

// --- blocks of 256 weights, whose runs have scales and minima of few bits ---

template <int Groups> struct AffineBlock {
    HalfScale scale, minimum;
    V scales[Groups], minima[Groups];
    double error = INFINITY;
};

template <int N> class AffineBlockSearch {
  public:
    static constexpr int kGroups = kLarge / N / kLanes;
    using Block = AffineBlock<kGroups>;

    // Codes 0..last of runs of N weights, with scales and minima 0..top.
    AffineBlockSearch(const char* type, float last, float top, const float* x, const float* w)
        : type_(type), last_(splat(last)), top_(top), unit_(unit_of(x, kLarge)) {
        for (int g = 0; g < kGroups; ++g) load_group(runs_[g], x, w, g, unit_);
    }

    template <int S> Block find(const float (&starts)[S], int refits) {
        Block best;
        for (int g = 0; g < kGroups; ++g) best.scales[g] = best.minima[g] = splat(0);
        if (unit_ == 0) return best;
        V steps[kGroups], depths[kGroups];
        float most_step = 0, most_depth = 0;
        double energy = 0;
        for (int g = 0; g < kGroups; ++g) {
            const AffineFit fit =
                AffineSearch<N>(runs_[g], last_, true).find(starts, refits, [](const AffineFit&) {});
            steps[g] = fit.step;
            depths[g] = splat(0) - fit.base;
            most_step = largest_of(most_step, largest_lane(steps[g]));
            most_depth = largest_of(most_depth, largest_lane(depths[g]));
            energy += energy_of(runs_[g]);
        }
        for (int i = 0; i < kMoreScales; ++i) {
            const float top = top_ - float(i);
            float d = most_step / top, dmin = most_depth / top;
            Block block = near(multiples(steps, d), multiples(depths, dmin), d, dmin, 1);
            keep(best, block);
            fit_multiples(block, d, dmin);
            keep(best, near(block.scales, block.minima, d, dmin, 1));
            if (best.error > kNearlyExact * energy || best.error == 0) break;
        }
        return best;
    }

    void put_block_codes(const Block& block, uint8_t* codes) const {
        for (int g = 0; g < kGroups; ++g) {
            const V step = splat(block.scale.value) * block.scales[g], inverse = ratio(splat(1), step);
            const V base = splat(-block.minimum.value) * block.minima[g];
            alignas(32) float at[N][kLanes];
            for (int j = 0; j < N; ++j) store(at[j], affine_code(load(runs_[g].x[j]), base, inverse, last_));
            for (int i = 0; i < kLanes; ++i)
                for (int j = 0; j < N; ++j) codes[(g * kLanes + i) * N + j] = uint8_t(int(at[j][i]));
        }
    }

  private:
    struct Numbers {
        V at[kGroups];
    };

    static float largest_of(float a, float b) { return a > b ? a : b; }
    static void keep(Block& best, const Block& block) {
        if (block.error < best.error) best = block;
    }

    Numbers multiples(const V* of, float d) const {
        const float unit = HalfScale(type_, d, unit_).value;
        Numbers numbers;
        for (int g = 0; g < kGroups; ++g)
            numbers.at[g] = round_lanes(between(ratio(of[g], splat(unit)), splat(0), splat(top_)));
        return numbers;
    }
    Block near(const Numbers& scales, const Numbers& minima, float d, float dmin, int reach) const {
        return near(scales.at, minima.at, d, dmin, reach);
    }

    // Scales and minima no farther than `reach` from these, multiples of d and dmin: those of least error.
    Block near(const V* scales, const V* minima, float d, float dmin, int reach) const {
        Block block;
        block.scale = HalfScale(type_, d, unit_);
        block.minimum = HalfScale(type_, dmin, unit_);
        const V zero = splat(0), top = splat(top_);
        V total = zero;
        for (int g = 0; g < kGroups; ++g) {
            V least = splat(INFINITY);
            block.scales[g] = block.minima[g] = zero;
            for (int ds = -reach; ds <= reach; ++ds)
                for (int dm = -reach; dm <= reach; ++dm) {
                    const V scale = between(scales[g] + splat(float(ds)), zero, top);
                    const V minimum = between(minima[g] + splat(float(dm)), zero, top);
                    const V error = affine_error(runs_[g], splat(block.scale.value) * scale,
                                                 splat(-block.minimum.value) * minimum, last_);
                    const auto better = error < least;
                    least = select(better, error, least);
                    block.scales[g] = select(better, scale, block.scales[g]);
                    block.minima[g] = select(better, minimum, block.minima[g]);
                }
            total += least;
        }
        block.error = sum_lanes(total);
        return block;
    }

    // What scales and minima are best multiples of, where codes, scales and minima stay what they are.
    void fit_multiples(const Block& block, float& d, float& dmin) const {
        V qq = splat(0), qm = qq, mm = qq, xq = qq, xm = qq;
        for (int g = 0; g < kGroups; ++g) {
            const V scale = block.scales[g], minimum = block.minima[g];
            const V inverse = ratio(splat(1), splat(block.scale.value) * scale);
            const V base = splat(-block.minimum.value) * minimum;
            for (int j = 0; j < N; ++j) {
                const V x = load(runs_[g].x[j]), w = load(runs_[g].w[j]);
                const V q = scale * affine_code(x, base, inverse, last_), wq = w * q, wm = w * minimum;
                qq += wq * q;
                qm += wq * minimum;
                mm += wm * minimum;
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

    const char* type_;
    const V last_;
    const float top_, unit_;
    Runs<N> runs_[kGroups];
};

// --- blocks of 256 weights, whose runs have scales of few bits ---

template <int Groups> struct ScaledBlock {
    HalfScale scale;
    V scales[Groups];
    double error = INFINITY;
};

template <int N, class Values> class ScaledBlockSearch {
  public:
    static constexpr int kGroups = kLarge / N / kLanes;
    using Block = ScaledBlock<kGroups>;

    // Scales are lowest..-lowest - 1.
    ScaledBlockSearch(const char* type, const Values& values, float lowest, const float* x, const float* w)
        : type_(type), values_(values), lowest_(lowest), unit_(unit_of(x, kLarge)) {
        for (int g = 0; g < kGroups; ++g) load_group(runs_[g], x, w, g, unit_);
    }

    template <int S> Block find(const float (&starts)[S], int refits) {
        Block best;
        for (int g = 0; g < kGroups; ++g) best.scales[g] = splat(0);
        if (unit_ == 0) return best;
        V scales[kGroups], numbers[kGroups];
        float farthest = 0;
        double energy = 0;
        for (int g = 0; g < kGroups; ++g) {
            scales[g] = ScaleSearch<N, Values>(runs_[g], values_).find(starts, refits, [](V, V) {});
            for (int i = 0; i < kLanes; ++i)
                farthest = size(scales[g][i]) > size(farthest) ? scales[g][i] : farthest;
            energy += energy_of(runs_[g]);
        }
        for (int i = 0; i < kMoreScales; ++i) {
            float d = farthest / (lowest_ + float(i));  // the largest scale takes about the lowest number
            const float unit = HalfScale(type_, d, unit_).value;
            for (int g = 0; g < kGroups; ++g)
                numbers[g] =
                    round_lanes(between(ratio(scales[g], splat(unit)), splat(lowest_), splat(-lowest_ - 1)));
            Block block = near(numbers, d, 1);
            keep(best, block);
            if (best.error == 0) break;
            d = fit_multiple(block);
            keep(best, near(block.scales, d, 0));
            if (best.error > kNearlyExact * energy) break;
        }
        return best;
    }

    void put_block_codes(const Block& block, uint8_t* codes) const {
        for (int g = 0; g < kGroups; ++g) {
            const V inverse = ratio(splat(1), splat(block.scale.value) * block.scales[g]);
            alignas(32) float at[N][kLanes];
            for (int j = 0; j < N; ++j) store(at[j], values_.nearest(load(runs_[g].x[j]) * inverse));
            for (int i = 0; i < kLanes; ++i)
                for (int j = 0; j < N; ++j) codes[(g * kLanes + i) * N + j] = values_.code(at[j][i]);
        }
    }

  private:
    static float size(float a) { return a < 0 ? -a : a; }
    static void keep(Block& best, const Block& block) {
        if (block.error < best.error) best = block;
    }

    // Scales no farther than `reach` from these, multiples of d: those of least error.
    Block near(const V* scales, float d, int reach) const {
        Block block;
        block.scale = HalfScale(type_, d, unit_);
        V total = splat(0);
        for (int g = 0; g < kGroups; ++g) {
            V least = splat(INFINITY);
            block.scales[g] = splat(0);
            for (int ds = -reach; ds <= reach; ++ds) {
                const V scale = between(scales[g] + splat(float(ds)), splat(lowest_), splat(-lowest_ - 1));
                const V error = scaled_error(runs_[g], values_, splat(block.scale.value) * scale);
                const auto better = error < least;
                least = select(better, error, least);
                block.scales[g] = select(better, scale, block.scales[g]);
            }
            total += least;
        }
        block.error = sum_lanes(total);
        return block;
    }

    // What the scales are best multiples of, where codes and scales stay what they are.
    float fit_multiple(const Block& block) const {
        V xq = splat(0), qq = xq;
        for (int g = 0; g < kGroups; ++g) {
            const V inverse = ratio(splat(1), splat(block.scale.value) * block.scales[g]);
            for (int j = 0; j < N; ++j) {
                const V x = load(runs_[g].x[j]), q = block.scales[g] * values_.nearest(x * inverse);
                const V wq = load(runs_[g].w[j]) * q;
                xq += wq * x;
                qq += wq * q;
            }
        }
        const double squares = sum_lanes(qq);
        return squares > 0 ? float(sum_lanes(xq) / squares) : 0;
    }

    const char* type_;
    const Values& values_;
    const float lowest_, unit_;
    Runs<N> runs_[kGroups];
};

// --- blocks of 32 weights, eight at a time ---

struct SmallBlocks {
    const char* type;
    int count;
    float units[kLanes] = {};
    Runs<kSmall> runs;

    // At most eight blocks of what is left of a row.
    SmallBlocks(const char* name, const float* x, const float* w, int64_t left)
        : type(name), count(int(left < kSmall * kLanes ? left / kSmall : kLanes)) {
        float inverses[kLanes] = {};
        for (int i = 0; i < count; ++i) {
            units[i] = unit_of(x + kSmall * i, kSmall);
            inverses[i] = units[i] == 0 ? 0 : 1 / units[i];
        }
        load_runs(runs, x, w, count, inverses);
    }
    // Each scale as it is once it was float16; those go to `halves` where that is given.
    V rounded(V scales, uint16_t* halves = nullptr) const {
        float values[kLanes] = {};
        for (int i = 0; i < count; ++i) {
            const HalfScale scale = units[i] == 0 ? HalfScale() : HalfScale(type, scales[i], units[i]);
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
    for (int64_t at = 0; at < n; at += kSmall * kLanes) {
        const SmallBlocks blocks(type, x + at, w ? w + at : nullptr, n - at);
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
    const int bytes = bits == 4 ? 20 : 24;
    for (int64_t at = 0; at < n; at += kSmall * kLanes) {
        const SmallBlocks blocks(type, x + at, w + at, n - at);
        const auto judge = [&](AffineFit& fit) {
            const V base = blocks.rounded(fit.base);
            // Of equal weights, the step is what the base's rounding has left.
            const V step = select(size_of(fit.step) > splat(0), fit.step, fit.base - base);
            fit = {blocks.rounded(step), base, splat(0)};
            fit.error = affine_error(blocks.runs, fit.step, base, last);
        };
        const AffineFit fit = AffineSearch<kSmall>(blocks.runs, last, false).find(kAffineStarts, 2, judge);
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
    each_block("Q2_K", x, w, n, out, 84, [](const float* x, const float* w, uint8_t* out) {
        AffineBlockSearch<16> search("Q2_K", 3, 15, x, w);
        const auto block = search.find(kAffineStarts, 2);
        for (int j = 0; j < 16; ++j)
            out[j] = uint8_t(int(block.scales[j / 8][j % 8]) | int(block.minima[j / 8][j % 8]) << 4);
        uint8_t codes[kLarge];
        search.put_block_codes(block, codes);
        put_pairs(out + 16, codes, 0);
        put_half(out + 80, block.scale.half);
        put_half(out + 82, block.minimum.half);
    });
}

void write_q3_k(const float* x, const float* w, int64_t n, uint8_t* out) {
    const CentredValues values(4);
    each_block("Q3_K", x, w, n, out, 110, [&](const float* x, const float* w, uint8_t* out) {
        ScaledBlockSearch<16, CentredValues> search("Q3_K", values, -32, x, w);
        const auto block = w ? search.find(kFineStarts, 2) : search.find(kCoarseStarts, 1);
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

// Two float16, then 8 scales and 8 minima of 6 bits: the first four of each whole, the others spread over
// what is left.
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

// The small types follow a rule; where importance is given, they are searched for as well.
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
