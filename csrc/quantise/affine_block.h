// Blocks of 256 weights with runs that have scales and minima of few bits.
#pragma once
#include <cmath>

#include "quantise/affine.h"
#include "quantise/half_scale.h"

namespace hc {
namespace {

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
        check_scales();
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

    // Adds the block's sums to `sums`.
    void add_products(const Block& block, Products& sums) const {
        V squares = splat(0), products = splat(0);
        for (int g = 0; g < kGroups; ++g) {
            const V step = splat(block.scale.value) * block.scales[g], inverse = ratio(splat(1), step);
            const V base = splat(-block.minimum.value) * block.minima[g];
            for (int j = 0; j < N; ++j) {
                const V x = load(runs_[g].x[j]), weighted = load(runs_[g].importance[j]) * x;
                squares += weighted * x;
                products += weighted * (step * affine_code(x, base, inverse, last_) + base);
            }
        }
        sums.squares += sum_lanes(squares) * double(unit_) * double(unit_);
        sums.products += sum_lanes(products) * double(unit_) * double(unit_);
    }

  private:
    struct Numbers {
        V at[kGroups];
    };

    // Refuses weights with too large a range, or too far below 0.
    void check_scales() const {
        V depth = splat(0), height = splat(0);
        for (const Runs<N>& runs : runs_)
            for (int j = 0; j < N; ++j) {
                depth = larger(splat(0) - load(runs.x[j]), depth);
                height = larger(load(runs.x[j]), height);
            }
        const float deepest = largest_lane(depth);
        half_scale(type_, deepest / top_ * unit_);
        half_scale(type_, (deepest + largest_lane(height)) / last_[0] / top_ * unit_);
    }
    static float largest_of(float a, float b) { return a > b ? a : b; }
    static void keep(Block& best, const Block& block) {
        if (block.error < best.error) best = block;
    }

    Numbers multiples(const V* values, float d) const {
        const float unit = HalfScale(d, unit_).value;
        Numbers numbers;
        for (int g = 0; g < kGroups; ++g)
            numbers.at[g] = round_lanes(between(ratio(values[g], splat(unit)), splat(0), splat(top_)));
        return numbers;
    }
    Block near(const Numbers& scales, const Numbers& minima, float d, float dmin, int reach) const {
        return near(scales.at, minima.at, d, dmin, reach);
    }

    // Returns the block with the least error among scales and minima at most `reach` away from these,
    // multiples of d and dmin.
    Block near(const V* scales, const V* minima, float d, float dmin, int reach) const {
        Block block;
        block.scale = HalfScale(d, unit_);
        block.minimum = HalfScale(dmin, unit_);
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

    // Finds the best d and dmin for fixed codes, scales and minima.
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

}  // namespace
}  // namespace hc
