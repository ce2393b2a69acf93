// Blocks of 256 weights with runs that have scales of few bits.
#pragma once
#include <cmath>

#include "quantise/half_scale.h"
#include "quantise/scaled.h"

namespace hc {
namespace {

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

    // `block_scales`: number of block scales to try.
    template <int S> Block find(const float (&starts)[S], int refits, int block_scales = 1) {
        Block best;
        for (int g = 0; g < kGroups; ++g) best.scales[g] = splat(0);
        if (unit_ == 0) return best;
        V most = splat(0);
        for (const Runs<N>& runs : runs_)
            for (int j = 0; j < N; ++j) most = larger(size_of(load(runs.x[j])), most);
        half_scale(type_, largest_lane(most) / (values_.lowest[0] * lowest_) * unit_);
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
            float d = farthest / (lowest_ + float(i));  // the largest scale gets about the lowest number
            const float unit = HalfScale(d, unit_).value;
            for (int g = 0; g < kGroups; ++g)
                numbers[g] =
                    round_lanes(between(ratio(scales[g], splat(unit)), splat(lowest_), splat(-lowest_ - 1)));
            Block block = near(numbers, d, 1);
            keep(best, block);
            if (best.error == 0) break;
            d = fit_multiple(block);
            keep(best, near(block.scales, d, 0));
            if (i + 1 >= block_scales && best.error > kNearlyExact * energy) break;
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

    // Returns the block with the least error among scales at most `reach` away from these, multiples of d.
    Block near(const V* scales, float d, int reach) const {
        Block block;
        block.scale = HalfScale(d, unit_);
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

    // Finds the best d for fixed codes and scales.
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

}  // namespace
}  // namespace hc
