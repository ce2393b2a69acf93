// The FFN op and its predictors, with experts and without.
#include <algorithm>

#include "bind/bind.h"
#include "disk/cold_rows.h"
#include "disk/expert_cache.h"
#include "ops/scratch.h"

namespace hc {
namespace {

// End of each expert's rows, as a backend passes them.
using Ends = std::vector<int64_t>;

void check_ends(const Ends& ends, int64_t neurons, int64_t chosen, const char* op) {
    const std::string name(op);
    if (ends.empty() || ends.front() < 0 || ends.back() != neurons ||
        !std::is_sorted(ends.begin(), ends.end()))
        refuse(name + ": the ends of experts must ascend to " + std::to_string(neurons));
    if (chosen < 1 || chosen > int64_t(ends.size()))
        refuse(name + ": " + std::to_string(chosen) + " experts for each row; allowed: 1 to " +
               std::to_string(ends.size()));
}

// One layer's FFN as the backend holds it.
struct FfnWeights {
    std::optional<WeightRows> gate;
    WeightRows up, down;
    Maybe<const float> gate_bias, up_bias, down_bias;
    bool by_output;
    int activation;
    float threshold, limit, alpha;
    Ends ends;
    int64_t chosen;
    std::shared_ptr<LoadBatches>
        load_batches;  // batches of experts that are loaded when needed; null: all are in memory

    int64_t experts() const { return int64_t(ends.size()); }
    int64_t max_leaves() const { return (kMaxLeaves + chosen - 1) / chosen; }
};

// Down by output: a matrix (dim, N) for each expert with neurons; these experts have equally many.
bool fits_by_output(const Rows& down, const Panels& panels, const Rows& up, const Ends& ends) {
    int64_t before = 0, experts = 0;
    for (const int64_t end : ends) {
        if (end != before && end - before != down.cols) return false;
        experts += end != before;
        before = end;
    }
    return down.count == up.cols * experts && !panels.neurons;
}

bool fits_by_neuron(const Rows& down, const Panels& panels, const Rows& up, const Ends& ends) {
    if (!panels.neurons) return down.count == up.count && down.cols == up.cols;
    for (const int64_t end : ends)
        if (end % panels.neurons) return false;
    return down.count == up.count && down.cols == (up.cols + kBlock - 1) / kBlock * kBlock;
}

// End of the neurons of each slot; all experts have equally many.
Ends ends_of_slots(const ExpertCache& cache, int64_t rows, const Ends& ends) {
    const int64_t neurons = rows / cache.slots();
    Ends slots, experts;
    for (int64_t i = 1; i <= cache.slots(); ++i) slots.push_back(i * neurons);
    for (int64_t i = 1; i <= cache.experts(); ++i) experts.push_back(i * neurons);
    if (!neurons || slots.back() != rows || ends != experts)
        refuse("ffn: all experts of an expert cache must have the same number of neurons");
    return slots;
}

void check_cold(const ColdRows& cold, const Ends& ends, bool suits) {
    if (!suits) refuse("ffn: cold rows need a gate without a bias, and down by neuron");
    for (size_t i = 0; i < ends.size(); ++i)
        if (ends[i] != int64_t(i + 1) * cold.neurons()) refuse("ffn: experts do not fit the cold rows");
    if (int64_t(ends.size()) != cold.experts()) refuse("ffn: not as many experts as have cold rows");
}

FfnWeights ffn_weights(std::optional<WeightRows> gate, const WeightRows& up_rows, const WeightRows& down_rows,
                       Maybe<const float> gate_bias, Maybe<const float> up_bias, Maybe<const float> down_bias,
                       bool by_output, int activation, float threshold, float limit, float alpha,
                       const Ends& ends, int64_t chosen, std::shared_ptr<ExpertCache> cache,
                       std::shared_ptr<ColdRows> cold) {
    const Rows &up = plain_rows(up_rows, "ffn: up"), &down = down_rows.rows;
    if (gate) plain_rows(*gate, "ffn: gate");
    const Ends slot_ends = cache ? ends_of_slots(*cache, up.count, ends) : ends;
    check_ends(ends, cache ? ends.back() : up.count, chosen, "ffn");
    const auto fits = by_output ? fits_by_output : fits_by_neuron;
    if (!fits(down, down_rows.panels, up, slot_ends) ||
        (gate && (gate->rows.count != up.count || gate->rows.cols != up.cols)))
        refuse("ffn: gate, up and down do not fit each other");
    if (activation < 0 || activation > kSwigluOai) refuse("ffn: unknown activation");
    if ((activation == kDRelu || activation == kSwigluOai) && !gate)
        refuse("ffn: this activation multiplies two: it needs a gate");
    if (cold)
        check_cold(*cold, ends, gate && !gate_bias && !cache && !by_output && !down_rows.panels.neurons);
    std::shared_ptr<LoadBatches> load_batches = std::move(cache);
    if (cold) load_batches = std::move(cold);
    FfnWeights w{gate,       up_rows,   down_rows, gate_bias, up_bias, down_bias, by_output,
                 activation, threshold, limit,     alpha,     ends,    chosen,    std::move(load_batches)};
    const int64_t most = Experts(ends, chosen).most_neurons(), allowed = w.max_leaves() * kMaxLeafNeurons;
    if (most > allowed)
        refuse(std::string(ends.size() > 1 ? "ffn: an expert" : "ffn: a layer") + " of " +
               std::to_string(most) + " neurons; allowed: up to " + std::to_string(allowed));
    return w;
}

using Ids = Array<const int32_t>;

// The experts chosen by a step's rows, in arrays [>= rows, chosen].
std::shared_ptr<const Experts> chosen_of(const Ends& ends, int64_t chosen, const Ids& ids,
                                         const Maybe<const float>& factors, int64_t rows, const char* op) {
    const std::string name(op);
    auto experts = std::make_shared<Experts>(ends, chosen);
    experts->ids = data_of(ids, (name + ": ids").c_str(), rows, chosen);
    if (factors) experts->factors = data_of(*factors, (name + ": factors").c_str(), rows, chosen);
    return experts;
}

void bind_predict(BoundProgram& p, const Floats& x, const WeightRows& first, const WeightRows& second,
                  bool relu, const Array<const float>& threshold, const Array<uint64_t>& mask,
                  const Ends& ends, int64_t chosen, const Maybe<const int32_t>& ids) {
    const Rows &first_rows = plain_rows(first, "predict"), &second_rows = plain_rows(second, "predict");
    if (second_rows.cols != first_rows.count) refuse("predict: the factors do not fit each other");
    check_ends(ends, second_rows.count, chosen, "predict");
    if (ends.size() > 1 && !ids) refuse("predict: of several experts, ids must say which are chosen");
    const int64_t rows = std::min<int64_t>(p.rows(kTokens), kMaxDecodeRows);
    const Experts experts(ends, chosen);
    const int64_t width = experts.words.back();
    const Masks words{data_of(mask, "predict: mask", rows, width), width};
    const float* values = data_of(x, "predict: x", rows, first_rows.cols);
    const Predictor predictor{first_rows, second_rows, relu,
                              data_of(threshold, "predict: threshold", second_rows.count, 1)};
    if (!ids) return p.program.predict(values, predictor, words);
    p.program.predict(values, predictor, words, chosen_of(ends, chosen, *ids, {}, rows, "predict"));
}

void bind_ffn_op(BoundProgram& p, const Floats& x, const FfnWeights& w, const Floats& out, bool skip,
                 const Maybe<uint64_t>& mask, const Maybe<uint64_t>& active, const Maybe<int64_t>& stats,
                 bool accumulate, const Maybe<const int32_t>& ids, const Maybe<const float>& factors,
                 const Maybe<const float>& gates, const Maybe<uint64_t>& strongest) {
    if (ids.has_value() != factors.has_value()) refuse("ffn: ids and factors must be given together");
    if (w.experts() > 1 && !ids) refuse("ffn: of several experts, ids must say which are chosen");
    Ffn f{};
    if (w.gate) f.gate = w.gate->rows;
    f.up = w.up.rows;
    f.down = w.down.rows;
    f.panels = w.down.panels;
    const int64_t n = w.ends.back(), dim = f.dim(), rows = p.rows(kTokens);
    const int64_t decode = std::min<int64_t>(rows, kMaxDecodeRows);
    f.gate_bias = vector_of(w.gate_bias, "ffn: gate_bias", n);
    f.up_bias = vector_of(w.up_bias, "ffn: up_bias", n);
    f.down_bias = w.down_bias ? data_of(*w.down_bias, "ffn: down_bias", w.experts() * dim, 1) : nullptr;
    f.by_output = w.by_output;
    f.activation = Activation(w.activation);
    f.threshold = w.threshold;
    f.limit = w.limit;
    f.alpha = w.alpha;
    f.skip = skip;
    f.accumulate = accumulate;
    f.max_leaves = int(w.max_leaves());
    const int64_t words = Experts(w.ends, w.chosen).words.back();
    if (mask) {
        const int64_t width = std::max(words, width_of(*mask));  // the first words belong to this layer
        f.mask = {data_of(*mask, "ffn: mask", decode, width), width};
    }
    if (active) f.active = {data_of(*active, "ffn: active", decode, words), words};
    f.stats = reinterpret_cast<FfnCounts*>(vector_of(stats, "ffn: stats", sizeof(FfnCounts) / 8));
    f.out = data_of(out, "ffn: out", rows, dim);
    if (gates && (w.gate || ids))
        refuse("ffn: gates computed before are for weights without a gate, and no experts");
    if (gates) f.gates = data_of(*gates, "ffn: gates", rows, n);
    Masks marked;
    if (strongest && (ids || !f.by_output))
        refuse("ffn: the strongest neurons are reported only where down is a dot, and without experts");
    if (strongest) marked = {data_of(*strongest, "ffn: strongest", decode, words), words};
    const float* values = data_of(x, "ffn: x", rows, dim);
    if (!ids) return p.program.ffn(f, values, marked);
    const auto chosen = chosen_of(w.ends, w.chosen, *ids, factors, rows, "ffn");
    p.program.ffn(f, values, chosen, w.load_batches);
}

}  // namespace

void bind_ffn(nb::module_& m, nb::class_<BoundProgram>& program) {
    nb::class_<FfnWeights>(m, "FfnWeights")
        .def(nb::new_(&ffn_weights), "gate"_maybe, "up"_a, "down"_a, "gate_bias"_maybe, "up_bias"_maybe,
             "down_bias"_maybe, "by_output"_a, "activation"_a, "threshold"_a, "limit"_a, "alpha"_a, "ends"_a,
             "chosen"_a, "cache"_a.none() = nb::none(), "cold"_a.none() = nb::none());
    program
        .def("predict", &bind_predict, "x"_exact, "first"_a, "second"_a, "relu"_a, "threshold"_exact,
             "mask"_exact, "ends"_a, "chosen"_a, "ids"_maybe)
        .def("ffn", &bind_ffn_op, "x"_exact, "weights"_a, "out"_exact, "skip"_a, "mask"_maybe, "active"_maybe,
             "stats"_maybe, "accumulate"_a, "ids"_maybe, "factors"_maybe, "gates"_maybe, "strongest"_maybe);
}

}  // namespace hc
