// Tries a later layer's router within an FFN op for experts, once the op's own reads have begun.
#include <algorithm>
#include <vector>

#include "program/look_ahead.h"
#include "program/program_parts.h"

namespace hc {

void Program::look_ahead(ScratchPlan& plan, const LookAhead& of) {
    struct Op {
        LookAhead of;
        bool wanted = false;
        std::vector<int32_t> ids, all;
        std::vector<float> factors;
    };
    auto op = std::make_shared<Op>(Op{of, false, {}, {}, {}});
    const int64_t most = std::min(kAheadRows, bounds_.tokens), chosen = of.router.chosen;
    op->ids.resize(size_t(most * chosen));
    op->factors.resize(op->ids.size());
    const auto rows = [this, op] { return op->wanted ? int64_t(batch_.decode_count()) : 0; };
    step([this] { return int64_t(count(kTokens) > 0); },
         [this, op](int64_t, const Scratch&) {
             const bool small = !batch_.prompt_count() && batch_.decode_count() <= kAheadRows;
             op->wanted = small && op->of.waves->wants_guess();
         });
    const auto in = input_of(of.x, of.weights.cols);
    if (of.normed) {
        const auto normed = std::make_shared<float*>();
        plan.take(most * in->cols * 4,
                  [in, normed](uint8_t* p) { in->x = *normed = reinterpret_cast<float*>(p); });
        step(rows, [this, op, in, normed](int64_t t, const Scratch&) {
            const int64_t at = t * in->cols;
            k_.norm(op->of.norm, op->of.x + at, *normed + at);
        });
    }
    Meets meets{};
    meets.with(of.weights);
    prepare(plan, in, meets, most, rows);
    auto logits = std::make_shared<std::vector<Product>>(
        1, Product{of.weights, of.bias, nullptr, of.weights.count, false});
    plan.take(most * of.weights.count * 4,
              [logits](uint8_t* p) { (*logits)[0].out = reinterpret_cast<float*>(p); });
    products(in, logits, rows);
    step([rows] { return int64_t(rows() > 0); },
         [this, op, rows, logits, chosen](int64_t, const Scratch&) {
             const Router& r = op->of.router;
             for (int64_t t = 0; t < rows(); ++t)
                 choose(r, op->of.groups, (*logits)[0].out + t * r.experts, op->ids.data() + t * chosen,
                        op->factors.data() + t * chosen);
             op->all.assign(op->ids.begin(), op->ids.begin() + rows() * chosen);
             std::sort(op->all.begin(), op->all.end());
             op->all.erase(std::unique(op->all.begin(), op->all.end()), op->all.end());
             op->of.waves->guess(op->all);
         });
}

}  // namespace hc
