// Steps and bases of runs with weights step * code + base and codes 0..last: a search for the least squared
// error. Sums use differences from the smallest weight, so that a large base costs no digits.
#pragma once
#include "quantise/lanes.h"

namespace hc {
namespace {

struct AffineFit {
    V step, base, error;
};

template <int N> class AffineSearch {
  public:
    // `up_to_zero`: bases must be 0 or less.
    AffineSearch(const Runs<N>& runs, V last, bool up_to_zero)
        : runs_(runs), last_(last), up_to_zero_(up_to_zero) {
        low_ = load(runs.x[0]);
        V high = low_;
        for (int j = 1; j < N; ++j) {
            low_ = smaller(low_, load(runs.x[j]));
            high = larger(high, load(runs.x[j]));
        }
        if (up_to_zero) low_ = smaller(low_, splat(0));
        range_ = high - low_;
        weight_ = sum_ = squares_ = splat(0);
        for (int j = 0; j < N; ++j) {
            const V w = load(runs.w[j]), y = load(runs.x[j]) - low_;
            weight_ += w;
            sum_ += w * y;
            squares_ += w * y * y;
        }
    }

    // Starts from codes that end at about `last` plus each of `starts`; then refits `refits` times from the
    // step and base of the best fit. `judge(fit)` may round a fit and must then update its error.
    template <int S, class Judge>
    AffineFit find(const float (&starts)[S], int refits, const Judge& judge) const {
        const V inverse = ratio(splat(1), range_);
        AffineFit best{splat(0), low_, squares_};
        judge(best);
        for (const float start : starts) improve(best, (last_ + splat(start)) * inverse, low_, judge);
        for (int i = 0; i < refits; ++i) improve(best, ratio(splat(1), best.step), best.base, judge);
        return best;
    }

  private:
    // Fits step and base to the codes nearest to (x - base) * inverse, and keeps them if they are better.
    template <class Judge> void improve(AffineFit& best, V inverse, V base, const Judge& judge) const {
        V q1 = splat(0), q2 = q1, qy = q1;
        for (int j = 0; j < N; ++j) {
            const V x = load(runs_.x[j]);
            const V q = round_lanes(between((x - base) * inverse, splat(0), last_)),
                    wq = load(runs_.w[j]) * q;
            q1 += wq;
            q2 += wq * q;
            qy += wq * (x - low_);
        }
        const V determinant = weight_ * q2 - q1 * q1;
        const auto solvable = determinant > splat(1e-6f) * weight_ * q2;
        V step = select(solvable, (weight_ * qy - sum_ * q1) / determinant, splat(0));
        V shift = select(solvable, (q2 * sum_ - q1 * qy) / determinant, sum_ / weight_);
        if (up_to_zero_) {
            const auto above = low_ + shift > splat(0);
            step = select(above, ratio(qy + low_ * q1, q2), step);
            shift = select(above, splat(0) - low_, shift);
        }
        AffineFit fit{step, low_ + shift, squares_};
        fit.error += step * step * q2 + splat(2) * step * shift * q1 + shift * shift * weight_ -
                     splat(2) * (step * qy + shift * sum_);
        judge(fit);
        const auto better = fit.error < best.error;
        best.step = select(better, fit.step, best.step);
        best.base = select(better, fit.base, best.base);
        best.error = select(better, fit.error, best.error);
    }

    const Runs<N>& runs_;
    const V last_;
    const bool up_to_zero_;
    V low_, range_, weight_, sum_, squares_;
};

// The code nearest to each weight of a run.
template <class Inverse> inline V affine_code(V x, V base, Inverse inverse, V last) {
    return round_lanes(between((x - base) * inverse, splat(0), last));
}

template <int N> V affine_error(const Runs<N>& runs, V step, V base, V last) {
    const V inverse = ratio(splat(1), step);
    V error = splat(0);
    for (int j = 0; j < N; ++j) {
        const V x = load(runs.x[j]);
        const V off = x - (step * affine_code(x, base, inverse, last) + base);
        error += load(runs.w[j]) * off * off;
    }
    return error;
}

}  // namespace
}  // namespace hc
