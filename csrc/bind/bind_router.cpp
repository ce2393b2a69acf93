// The router op.
#include "bind/bind.h"

namespace hc {
namespace {

void check_router(const Rows& w, int64_t k, const ExpertGroups& groups) {
    if (w.count < 1 || w.count > kMaxExperts || k < 1 || k > kMaxChosen || k > w.count)
        refuse("router: " + std::to_string(k) + " of " + std::to_string(w.count) +
               " experts; allowed: up to " + std::to_string(kMaxChosen) + " of up to " +
               std::to_string(kMaxExperts));
    if (groups.count < 1 || groups.count > kMaxExpertGroups || w.count % groups.count || groups.used < 1 ||
        groups.used > groups.count || w.count / groups.count * groups.used < k || groups.best < 1 ||
        groups.best > 2)
        refuse("router: " + std::to_string(groups.used) + " of " + std::to_string(groups.count) +
               " groups of " + std::to_string(w.count) + " experts");
}

void bind_router_op(BoundProgram& p, const Floats& x, const WeightRows& weights,
                    const Maybe<const float>& bias, const Array<int32_t>& ids, const Floats& factors,
                    int64_t k, bool softmax, const Maybe<const float>& selection_bias, bool normalise,
                    float scale, const Maybe<const float>& expert_scale, int groups, int used_groups,
                    int best) {
    const Rows& w = plain_rows(weights, "router");
    const int64_t rows = p.rows(kTokens);
    const ExpertGroups expert_groups{groups, used_groups, best};
    check_router(w, k, expert_groups);
    const Router r{int(w.count), int(k),
                   softmax,      vector_of(selection_bias, "router: selection bias", w.count),
                   normalise,    scale};
    p.program.router(data_of(x, "router: x", rows, w.cols), w, vector_of(bias, "router: bias", w.count), r,
                     vector_of(expert_scale, "router: expert scale", w.count),
                     data_of(ids, "router: ids", rows, k), data_of(factors, "router: factors", rows, k),
                     expert_groups);
}

}  // namespace

void bind_router(nb::class_<BoundProgram>& program) {
    program.def("router", &bind_router_op, "x"_exact, "weights"_a, "bias"_maybe, "ids"_exact, "factors"_exact,
                "k"_a, "softmax"_a, "selection_bias"_maybe, "normalise"_a, "scale"_a, "expert_scale"_maybe,
                "groups"_a, "used_groups"_a, "best"_a);
}

}  // namespace hc
