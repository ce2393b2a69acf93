// The router op.
#include "bind/bind.h"

namespace hc {
namespace {

void bind_router_op(BoundProgram& p, const Floats& x, const WeightRows& weights,
                    const Maybe<const float>& bias, const Array<int32_t>& ids, const Floats& factors,
                    int64_t k, bool softmax, const Maybe<const float>& selection_bias, bool normalise,
                    float scale, const Maybe<const float>& expert_scale, int64_t groups, int64_t used_groups,
                    int64_t best) {
    const Rows& w = plain_rows(weights, "router");
    const int64_t rows = p.rows(kTokens);
    if (w.count < 1 || w.count > kMaxExperts || k < 1 || k > kMaxChosen || k > w.count)
        refuse("router: " + std::to_string(k) + " of " + std::to_string(w.count) +
               " experts; allowed: up to " + std::to_string(kMaxChosen) + " of up to " +
               std::to_string(kMaxExperts));
    if (groups < 1 || groups > kMaxExpertGroups || w.count % groups || used_groups < 1 ||
        used_groups > groups || w.count / groups * used_groups < k || best < 1 || best > 2)
        refuse("router: " + std::to_string(used_groups) + " of " + std::to_string(groups) + " groups of " +
               std::to_string(w.count) + " experts");
    const Router r{int(w.count), int(k),
                   softmax,      vector_of(selection_bias, "router: selection bias", w.count),
                   normalise,    scale};
    const ExpertGroups of{int(groups), int(used_groups), int(best)};
    p.program.router(data_of(x, "router: x", rows, w.cols), w, vector_of(bias, "router: bias", w.count), r,
                     vector_of(expert_scale, "router: expert scale", w.count),
                     data_of(ids, "router: ids", rows, k), data_of(factors, "router: factors", rows, k), of);
}

}  // namespace

void bind_router(nb::class_<BoundProgram>& program) {
    program.def("router", &bind_router_op, "x"_exact, "weights"_a, "bias"_maybe, "ids"_exact, "factors"_exact,
                "k"_a, "softmax"_a, "selection_bias"_maybe, "normalise"_a, "scale"_a, "expert_scale"_maybe,
                "groups"_a, "used_groups"_a, "best"_a);
}

}  // namespace hc
