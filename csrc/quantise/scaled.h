// Scales of runs with weights scale * value, where a code's values are integers or from a table: a search for
// the least squared error.
#pragma once
#include "quantise/lanes.h"

namespace hc {
namespace {

// Code c stands for c - middle: integers from -middle to middle - 1.
struct CentredValues {
    V lowest, highest;

    explicit CentredValues(int middle) : lowest(splat(float(-middle))), highest(splat(float(middle - 1))) {}
    V nearest(V x) const { return round_lanes(between(x, lowest, highest)); }
    uint8_t code(float value) const { return uint8_t(value - lowest[0]); }
};

// IQ4_NL's 16 values. The midpoint of two neighbours is a multiple of a half, so a table with steps of a half
// finds the nearest value.
class TableValues {
  public:
    static constexpr int kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                        1,    13,   25,  38,  53,  69,  89,  113};
    V lowest, highest;

    TableValues() : lowest(splat(-127)), highest(splat(113)) {
        int code = 0;
        for (int i = 0; i < kCells; ++i) {
            while (code < 15 && 2 * (i - kOffset) + 1 > 2 * (kValues[code] + kValues[code + 1])) ++code;
            codes_[i] = uint8_t(code);
            values_[i] = float(kValues[code]);
        }
    }
    V nearest(V x) const {
        alignas(32) float at[kLanes];
        store(at, between(x, lowest, highest) * splat(2) + splat(kOffset));
        for (float& value : at) value = values_[int(value)];
        return load(at);
    }
    uint8_t code(float value) const { return codes_[int(value * 2 + kOffset)]; }

  private:
    static constexpr int kOffset = 256, kCells = 512;
    float values_[kCells];
    uint8_t codes_[kCells];
};

// The scale of each run: tries several that map its largest weight to about the lowest or highest value,
// keeps the one with the best fit, and fits it again.
template <int N, class Values> class ScaleSearch {
  public:
    ScaleSearch(const Runs<N>& runs, const Values& values) : runs_(runs), values_(values) {
        farthest_ = load(runs.x[0]);
        for (int j = 1; j < N; ++j) {
            const V x = load(runs.x[j]);
            farthest_ = select(size_of(x) > size_of(farthest_), x, farthest_);
        }
    }

    // Starts are added to the lowest value if negative, else to the highest; then refits `refits` times from
    // the best scale. `judge(scale, error)` may round a scale and must then update its error, which is
    // relative to the error of all zeros.
    template <int S, class Judge> V find(const float (&starts)[S], int refits, const Judge& judge) {
        error_ = scale_ = splat(0);
        judge(scale_, error_);
        const V inverse = ratio(splat(1), farthest_);
        for (const float start : starts) {
            const V end = start < 0 ? values_.lowest : values_.highest;
            improve((end + splat(start)) * inverse, judge);
        }
        for (int i = 0; i < refits; ++i) improve(ratio(splat(1), scale_), judge);
        return scale_;
    }

  private:
    template <class Judge> void improve(V inverse, const Judge& judge) {
        V xq = splat(0), qq = xq;
        for (int j = 0; j < N; ++j) {
            const V x = load(runs_.x[j]), q = values_.nearest(x * inverse), wq = load(runs_.w[j]) * q;
            xq += wq * x;
            qq += wq * q;
        }
        V scale = ratio(xq, qq), error = splat(0) - scale * xq;
        judge(scale, error);
        const auto better = error < error_;
        error_ = select(better, error, error_);
        scale_ = select(better, scale, scale_);
    }

    const Runs<N>& runs_;
    const Values& values_;
    V farthest_, error_, scale_;
};

template <int N, class Values> V scaled_error(const Runs<N>& runs, const Values& values, V scale) {
    const V inverse = ratio(splat(1), scale);
    V error = splat(0);
    for (int j = 0; j < N; ++j) {
        const V x = load(runs.x[j]), off = x - scale * values.nearest(x * inverse);
        error += load(runs.w[j]) * off * off;
    }
    return error;
}

}  // namespace
}  // namespace hc
