// The FFN op for experts, and their predictors. A step's (row, expert) pairs are sorted by expert. Each
// expert's pairs are the rows of a small FFN, whose kernels see only its weights. Neurons are summed as in a
// layer without experts; a row's experts are added one after another.
#include <algorithm>
#include <array>
#include <cstring>

#include "program/experts_op.h"

namespace hc {

namespace {

// sum (+)= factor * y, one expert after another.
void add_expert(const float* y, float factor, bool first, int64_t n, float* sum) {
    for (int64_t i = 0; i < n; ++i) {
        const float v = factor * (y ? y[i] : 0.0f);
        sum[i] = first ? v : sum[i] + v;
    }
}

void put(const float* sum, bool accumulate, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = accumulate ? out[i] + sum[i] : sum[i];
}

// Adds one row's experts from the sums of its pairs.
void add_experts(const ExpertsOp& op, const Routing& routing, int t) {
    const int64_t k = op.experts->chosen, dim = op.layer.dim();
    float sum[kGroup];
    for (int64_t i = 0; i < dim; i += kGroup) {
        const int64_t n = std::min<int64_t>(kGroup, dim - i);
        for (int64_t j = 0; j < k; ++j) {
            const int pair = routing.pair(t, j);
            const Routing::Part& part = routing.part_of(pair);
            const float* y = op.neurons(part) ? op.sum(routing, pair) : op.down_bias(part.expert);
            add_expert(at(y, i), op.experts->factors[t * k + j], j == 0, n, sum);
        }
        put(sum, op.layer.accumulate, n, op.layer.out + t * dim + i);
    }
}

// The same for one group of a decode row; sums its experts' pieces here.
void reduce_experts(const Kernels& k, const ExpertsOp& op, int t, int64_t group) {
    const int64_t dim = op.layer.dim(), i = group * kGroup, n = std::min<int64_t>(kGroup, dim - i);
    float sum[kGroup], y[kGroup];
    for (int64_t j = 0; j < op.experts->chosen; ++j) {
        const int pair = op.decode.pair(t, j);
        const Routing::Part& part = op.decode.part_of(pair);
        const float* from = at(op.down_bias(part.expert), i);
        if (op.neurons(part)) {
            k.ffn_reduce(op.view(op.decode, part), part.rows(), pair - part.begin, group, y);
            from = y;
        }
        add_expert(from, op.experts->factors[t * op.experts->chosen + j], j == 0, n, sum);
    }
    put(sum, op.layer.accumulate, n, op.layer.out + t * dim + i);
}

// Clears the masks of decode rows: experts that a row did not choose have no active neurons.
void clear_active(const ExpertsOp& op, int rows) {
    if (!op.layer.active) return;
    for (int t = 0; t < rows; ++t)
        std::memset(op.layer.active.row(t), 0, size_t(op.experts->words.back()) * 8);
}

void add_stats(const ExpertsOp& op) {
    for (const Routing::Part& part : op.decode.parts()) {
        if (!op.neurons(part)) continue;
        const Ffn f = op.view(op.decode, part);
        FfnCounts counts{};
        for (int piece = 0; piece < f.pieces(part.rows()); ++piece) counts.add(f.piece_stats[piece]);
        if (op.by_gates()) counts.gate_rows = op.neurons(part);  // each gate row once; some are read twice
        op.layer.stats->add(counts);
    }
}

}  // namespace

void Program::ffn(const Ffn& args, const float* x, std::shared_ptr<const Experts> experts,
                  std::shared_ptr<LoadBatches> load_batches) {
    ScratchPlan plan(*this);
    const int64_t rows = bounds_.tokens, pairs = rows * experts->chosen, dim = args.dim();
    auto op = std::make_shared<ExpertsOp>(args, experts, std::move(load_batches), rows, max_decode());
    Gathered& in = op->input;
    const bool gated = args.gate.base;
    in.codes = is_quantised(args.up.type) || (gated && is_quantised(args.gate.type));
    const bool floats = !is_quantised(args.up.type) || (gated && !is_quantised(args.gate.type));
    in.from = in.to = Input{x, dim, nullptr, dim};
    const std::shared_ptr<Input> from(op, &in.from), to(op, &in.to);
    if (in.codes) {
        take_quantised(plan, from, rows);
        quantise(from, [this] { return count(kTokens); });
        take_quantised(plan, to, pairs);
    }
    const bool tiled =
        take_tiled(plan, from, {in.codes, floats}, rows) && take_tiled(plan, to, {in.codes, floats}, pairs);
    in.to.tiled_codes = in.from.tiled_codes;  // rows are copied, so both have one layout
    if (tiled) tile(from, [this] { return count(kTokens); });
    if (floats) plan.take(pairs * dim * 4, [op](uint8_t* p) { op->input.take(p); });
    plan.take(pairs * dim * 4, [op](uint8_t* p) { op->sums = reinterpret_cast<float*>(p); });
    step([this] { return int64_t(count(kTokens) > 0); },
         [this, op](int64_t, const Scratch&) {
             // By output, decode rows are like all others.
             const int decode = op->layer.by_output ? 0 : batch_.decode_count();
             op->decode.sort(0, decode);
             op->prompt.sort(decode, batch_.tokens_count());
             op->input.tiles = op->input.from.tiled && any_tiled(op->input.from, batch_.tokens_count());
             clear_active(*op, batch_.decode_count());
             if (op->load_batches && !op->by_rows()) op->load_batches->begin(op->named(), nullptr, give_up());
         });
    step(
        [op] {
            const bool any = op->decode.scattered() || op->prompt.scattered();
            return int64_t(any ? op->decode.pairs() + op->prompt.pairs() : 0);
        },
        [op](int64_t pair, const Scratch&) {
            const int64_t before = op->decode.pairs();
            if (pair < before) return op->input.copy(op->decode, int(pair), 0);
            op->input.copy(op->prompt, int(pair - before), before);
        });
    if (op->by_rows()) name_rows(op, plan);
    if (args.by_output)
        experts_by_output(op, plan);
    else
        experts_by_neuron(op, plan);
}

// Names the rows that a step needs, so that their reads begin. Gates in memory are computed first with the
// FFN's threshold, so all active neurons reach it here.
void Program::name_rows(std::shared_ptr<ExpertsOp> op, ScratchPlan& plan) {
    op->wanted.resize(size_t(op->experts->words.back()));
    if (op->by_gates()) {
        op->thresholds.assign(size_t(op->most_neurons), op->layer.threshold);
        op->active_gates.stride = op->experts->words.back();
        plan.take(max_decode() * op->active_gates.stride * 8,
                  [op](uint8_t* p) { op->active_gates.words = reinterpret_cast<uint64_t*>(p); });
        const int64_t size = ceil_div(piece_rows(op->layer.gate), 64);
        const auto blocks_of = [=](const Routing::Part& part) {
            return ceil_div(ceil_div(op->neurons(part), 64), size);
        };
        step([=] { return op->decode_cut.over(op->decode, blocks_of); },
             [=](int64_t piece, const Scratch&) {
                 const Routing::Part& part = op->decode.parts()[op->decode_cut.part(piece)];
                 const int64_t n = op->neurons(part), first = piece * size;
                 const Rows gate = rows_of(op->layer.gate, op->experts->first(part.expert), n);
                 k_.predict(gate, op->input.of(part, 0), op->thresholds.data(), first,
                            std::min(ceil_div(n, 64), first + size), part.rows(),
                            op->of_part(op->active_gates, part));
             });
    }
    step([this] { return int64_t(count(kTokens) > 0); },
         [this, op](int64_t, const Scratch&) {
             op->find_wanted();
             op->load_batches->begin(op->named(), op->wanted.data(), give_up());
         });
}

// Like an FFN without experts, expert by expert.
void Program::experts_by_neuron(std::shared_ptr<ExpertsOp> op, ScratchPlan& plan) {
    const Experts& experts = *op->experts;
    const int64_t dim = op->layer.dim(), pairs = bounds_.tokens * experts.chosen;
    const int64_t decode_pairs = max_decode() * experts.chosen;
    op->levels.resize(size_t(experts.count()));
    for (int64_t e = 0; e < experts.count(); ++e) {
        Ffn f = op->expert(e);
        if (f.neurons()) cut_into_pieces(f, int(max_decode()), pool_->threads(), int(experts.chosen));
        std::copy(std::begin(f.levels), std::end(f.levels), op->levels[size_t(e)].begin());
        op->most_leaves = std::max<int64_t>(op->most_leaves, f.leaves());
    }
    plan.take(pairs * op->most_neurons * 4,
              [op](uint8_t* p) { op->layer.hidden = reinterpret_cast<float*>(p); });
    plan.take(decode_pairs * op->most_leaves * sums_of(dim) * 4,
              [op](uint8_t* p) { op->layer.partial = reinterpret_cast<float*>(p); });
    const int64_t parts = std::min(decode_pairs, experts.count());
    plan.take(parts * op->most_leaves * int64_t(sizeof(FfnCounts)),
              [op](uint8_t* p) { op->layer.piece_stats = reinterpret_cast<FfnCounts*>(p); });
    plan.take(parts * op->most_leaves * 4,
              [op](uint8_t* p) { op->layer.added = reinterpret_cast<uint32_t*>(p); });

    for (int64_t load_batch = 0; load_batch < op->most_load_batches(); ++load_batch) {
        next_load_batch(op, load_batch);
        load_batch_by_neuron(op, load_batch);
    }
    if (op->by_rows())
        step([this] { return int64_t(count(kTokens) > 0); },
             [op](int64_t, const Scratch&) { op->load_batches->end(); });
    const int64_t groups = padded(dim) / kGroup;
    step([=] { return groups * batch_.decode_count(); },
         [=](int64_t piece, const Scratch&) {
             if (op->layer.stats && piece == 0 && !batch_.prompt_count()) add_stats(*op);
             reduce_experts(k_, *op, int(piece / groups), piece % groups);
         });
    step([this] { return int64_t(batch_.prompt_count()); },
         [this, op](int64_t t, const Scratch&) {
             add_experts(*op, op->prompt, batch_.decode_count() + int(t));
         });
}

// Returns a function that says whether a run that waits for the disk should stop.
std::function<bool()> Program::give_up() const {
    return [pool = pool_.get()] { return pool->ending(); };
}

// Waits for the experts of a batch of loads; the first batch needs no reads.
void Program::next_load_batch(std::shared_ptr<ExpertsOp> op, int64_t load_batch) {
    if (!load_batch) return;
    step(
        [op, load_batch] {
            return int64_t(op->is_load_batch(load_batch - 1) && op->load_batches->unfinished());
        },
        [this, op](int64_t, const Scratch&) { op->load_batches->next(give_up()); });
}

// For the experts of one batch of loads: pieces of decode rows, and prompt rows up to their sums by output.
void Program::load_batch_by_neuron(std::shared_ptr<ExpertsOp> op, int64_t load_batch) {
    const int64_t size = piece_rows(op->layer.up), groups = padded(op->layer.dim()) / kGroup;
    const auto pieces_of = [op](const Routing::Part& part) {
        const bool any = op->neurons(part) && op->in_load_batch(part);
        return any ? int64_t(op->view(op->decode, part).pieces(part.rows())) : 0;
    };
    const auto blocks_of = [op, size](const Routing::Part& part) {
        return op->in_load_batch(part) ? ceil_div(op->neurons(part), size) : 0;
    };
    step(
        [=] {
            if (!op->is_load_batch(load_batch)) return int64_t(0);
            return op->decode_cut.over(op->decode, pieces_of) + op->prompt_cut.over(op->prompt, blocks_of);
        },
        [this, op, size](int64_t piece, const Scratch& s) {
            if (piece < op->decode_cut.pieces()) {
                const Routing::Part& part = op->decode.parts()[op->decode_cut.part(piece)];
                return k_.ffn_piece(op->view(op->decode, part), part.rows(), int(piece), s.local);
            }
            piece -= op->decode_cut.pieces();
            const Routing::Part& part = op->prompt.parts()[op->prompt_cut.part(piece)];
            const int64_t first = piece * size, end = std::min(first + size, op->neurons(part));
            k_.ffn_hidden(op->view(op->prompt, part), first, end - first, 0, part.rows(), s.local);
        });
    const auto tiles_of = [op, groups](const Routing::Part& part) {
        return op->neurons(part) && op->in_load_batch(part) ? groups * ceil_div(part.rows(), kPromptTile) : 0;
    };
    step([=] { return op->is_load_batch(load_batch) ? op->prompt_cut.over(op->prompt, tiles_of) : 0; },
         [=](int64_t piece, const Scratch& s) {
             const Routing::Part& part = op->prompt.parts()[op->prompt_cut.part(piece)];
             const int t0 = int(piece / groups) * kPromptTile, t1 = std::min(t0 + kPromptTile, part.rows());
             k_.ffn_prompt_down(op->view(op->prompt, part), piece % groups, t0, t1, s.local);
         });
}

// Reads every chosen row; down is a dot product over all neurons of an expert.
void Program::experts_by_output(std::shared_ptr<ExpertsOp> op, ScratchPlan& plan) {
    const Experts& experts = *op->experts;
    const int64_t pairs = bounds_.tokens * experts.chosen;
    int64_t down = 0;
    for (int64_t e = 0; e < experts.count(); ++e) {
        op->down_rows.push_back(down);
        down += experts.neurons(e) ? op->layer.dim() : 0;
    }
    op->hidden.cols = op->hidden.stride = op->most_neurons;
    plan.take(pairs * op->most_neurons * 4,
              [op](uint8_t* p) { op->hidden.x = op->layer.hidden = reinterpret_cast<float*>(p); });
    const std::shared_ptr<Input> hidden(op, &op->hidden);
    const bool quantised = is_quantised(op->layer.down.type);
    if (quantised) take_quantised(plan, hidden, pairs);
    take_tiled(plan, hidden, {quantised, !quantised}, pairs);
    for (int64_t load_batch = 0; load_batch < op->most_load_batches(); ++load_batch) {
        next_load_batch(op, load_batch);
        load_batch_by_output(op, load_batch);
    }
    step([this] { return count(kTokens); },
         [op](int64_t t, const Scratch&) { add_experts(*op, op->prompt, int(t)); });
}

void Program::load_batch_by_output(std::shared_ptr<ExpertsOp> op, int64_t load_batch) {
    const int64_t size = piece_rows(op->layer.up), down_size = piece_rows(op->layer.down);
    const auto blocks_of = [op, size](const Routing::Part& part) {
        return op->in_load_batch(part) ? ceil_div(op->neurons(part), size) : 0;
    };
    const auto decode_of = [this, op](const Routing::Part& part) {
        const int32_t* tokens = op->prompt.tokens(part);
        return int(std::lower_bound(tokens, tokens + part.rows(), batch_.decode_count()) - tokens);
    };
    step([=] { return op->is_load_batch(load_batch) ? op->prompt_cut.over(op->prompt, blocks_of) : 0; },
         [this, op, size, decode_of](int64_t piece, const Scratch& s) {
             const Routing::Part& part = op->prompt.parts()[op->prompt_cut.part(piece)];
             const int64_t first = piece * size, end = std::min(first + size, op->neurons(part));
             hidden(op->view(op->prompt, part), first, end - first, decode_of(part), part.rows(), s.local);
         });
    if (op->layer.mask || op->layer.active || op->layer.stats)
        step([this, op,
              load_batch] { return int64_t(op->is_load_batch(load_batch) && batch_.decode_count() > 0); },
             [this, op, decode_of](int64_t, const Scratch&) {
                 for (const Routing::Part& part : op->prompt.parts()) {
                     if (!op->in_load_batch(part)) continue;
                     const int decode = decode_of(part);
                     if (op->neurons(part) && decode)
                         account_by_output(op->view(op->prompt, part), decode, !batch_.prompt_count());
                 }
             });
    const bool quantised = is_quantised(op->layer.down.type);
    if (quantised || op->hidden.math != kSameMath)
        step([op, load_batch] { return op->is_load_batch(load_batch) ? int64_t(op->prompt.pairs()) : 0; },
             [this, op, quantised](int64_t pair, const Scratch&) {
                 const Routing::Part& part = op->prompt.part_of(int(pair));
                 if (!op->neurons(part) || !op->in_load_batch(part)) return;
                 const Input in = op->hidden_of(part);
                 if (quantised) k_.quantise(in, int(pair) - part.begin);
                 if (in.tiled && any_tiled(in, part.rows())) k_.tile_input(in, int(pair) - part.begin);
             });
    const auto outputs_of = [op, down_size](const Routing::Part& part) {
        return op->neurons(part) && op->in_load_batch(part) ? ceil_div(op->layer.dim(), down_size) : 0;
    };
    step([=] { return op->is_load_batch(load_batch) ? op->prompt_cut.over(op->prompt, outputs_of) : 0; },
         [this, op, down_size, decode_of](int64_t piece, const Scratch& s) {
             const Routing::Part& part = op->prompt.parts()[op->prompt_cut.part(piece)];
             const Ffn f = op->view(op->prompt, part);
             const int64_t first = piece * down_size, end = std::min(first + down_size, f.dim());
             const Product product{f.down, f.down_bias, f.out, f.dim(), false};
             by_kind(op->hidden_of(part), decode_of(part), part.rows(), [&](const Input& x, int t0, int t1) {
                 k_.product(product, x, first, end - first, t0, t1, s.local);
             });
         });
}

void Program::predict(const float* x, const Predictor& p, const Masks& mask,
                      std::shared_ptr<const Experts> experts) {
    struct Op {
        Routing routing;
        Cut cut;
        Gathered input;
    };
    ScratchPlan plan(*this);
    auto op = std::make_shared<Op>(Op{Routing(*experts, max_decode()), Cut(size_t(experts->count())), {}});
    const auto hidden = predictor_hidden(plan, x, p);
    const int64_t pairs = max_decode() * experts->chosen;
    op->input.codes = is_quantised(p.second.type);
    op->input.to = *hidden;
    if (op->input.codes)
        take_quantised(plan, std::shared_ptr<Input>(op, &op->input.to), pairs);
    else
        plan.take(pairs * p.second.cols * 4, [op](uint8_t* q) { op->input.take(q); });
    step([this] { return int64_t(batch_.decode_count() > 0); },
         [=](int64_t, const Scratch&) {
             op->routing.sort(0, batch_.decode_count());
             op->input.from = *hidden;
             for (int pair = 0; pair < op->routing.pairs(); ++pair) op->input.copy(op->routing, pair, 0);
         });
    const int64_t size = ceil_div(piece_rows(p.second), 64);
    const auto blocks_of = [=](const Routing::Part& part) {
        return ceil_div(ceil_div(experts->neurons(part.expert), 64), size);
    };
    step([=] { return batch_.decode_count() ? op->cut.over(op->routing, blocks_of) : 0; },
         [=](int64_t piece, const Scratch&) {
             const Routing::Part& part = op->routing.parts()[op->cut.part(piece)];
             const int64_t first = experts->first(part.expert), n = experts->neurons(part.expert);
             const int64_t end = std::min(ceil_div(n, 64), (piece + 1) * size);
             const Masks part_mask{mask.words + experts->words[size_t(part.expert)], mask.stride,
                                   op->routing.tokens(part)};
             k_.predict(rows_of(p.second, first, n), op->input.of(part, 0), p.threshold + first, piece * size,
                        end, part.rows(), part_mask);
         });
}

}  // namespace hc
