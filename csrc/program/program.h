// A recorded list of steps. Each function appends one op of hotcold.kernels.backend.Backend.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "disk/load_batches.h"
#include "isa/table.h"
#include "pool/threads.h"
#include "program/batch.h"
#include "program/link.h"
#include "program/routing.h"

namespace hc {

enum RowsOf : int { kTokens = 0, kLogits = 1 };
enum IndexedBy : int { kByToken = 0, kByPosition = 1 };

// One layer's keys and values, [page, K, kPage] rows each.
struct Cache {
    uint8_t *k, *v;
    Type type;  // of a row: F16, F32 or Q8_0
    int64_t pages, kv_heads, head_dim;
};

// A neuron is a candidate if dot(its row of `second`, first * x) reaches its threshold.
struct Predictor {
    Rows first, second;
    bool relu;  // between the two products
    const float* threshold;
};

// Groups of neighbouring experts: a row chooses from `used` of them. A group ranks by the sum of its `best`
// (1 or 2) largest ranks.
struct ExpertGroups {
    int count = 1, used = 1, best = 2;
};
constexpr int kMaxExpertGroups = 64;

struct ExpertsOp;

// The states of one layer, [slots, ...], with equally many floats each.
struct States {
    float* base;
    int64_t slots, floats;
};

// The arrays in host memory that the two sides of a layer exchange, as the hot side sees them.
struct Mailbox {
    int layer;
    int32_t* counts;  // of the cold side's batch
    float *x, *y;     // [T, dim]
    uint64_t* mask;   // [T, words] candidates among the cold neurons, or null
    int64_t dim, words;
    int32_t* ids = nullptr;  // [T, experts] chosen by each row, with their factors; or null
    float* factors = nullptr;
    int64_t experts = 0;
};

class Program {
  public:
    Program(const Kernels& kernels, std::shared_ptr<Pool> pool, const Batch& batch, const BatchBounds& bounds,
            PromptMath math = kSameMath)
        : k_(kernels), math_(math), pool_(std::move(pool)), batch_(batch), bounds_(bounds) {}
    Program(const Program&) = delete;  // its steps point to it
    Program& operator=(const Program&) = delete;

    void embed(const Rows& table, float* out, IndexedBy, bool accumulate);
    // If `groups` > 1, row r of a token uses weight r % groups.
    void norm(const NormArgs&, const float* x, float* out, int64_t rows_per_token, RowsOf,
              int64_t groups = 1);
    void linear(const float* x, const std::vector<Product>&, RowsOf);
    // Each head has its rows of the weights. x is [T, heads, width]; the weights multiply the last columns of
    // each head.
    void linear_heads(const float* x, int64_t width, const Rows& weights, int64_t heads, float* out);
    // out [T, heads, n + m] from x [T, heads, n] and y [T, heads, m].
    void join_heads(const float* x, const float* y, float* out, int64_t heads, int64_t n, int64_t m);
    void rope(const RopeArgs&, int64_t positions, float* x, int64_t heads, int64_t head_dim);
    void store_kv(const float* k, const float* v, const Cache&);
    void attention(Attention, int64_t pages);
    void predict(const float* x, const Predictor&, const Masks& mask);
    void ffn(Ffn, const float* x, Masks strongest = {});
    // The same for experts, whose weights are consecutive: rows of masks have whole words for each expert.
    void predict(const float* x, const Predictor&, const Masks& mask, std::shared_ptr<const Experts>);
    // `load_batches`: loads some weights when they are needed; null: all are in memory.
    void ffn(const Ffn&, const float* x, std::shared_ptr<const Experts>,
             std::shared_ptr<LoadBatches> load_batches = {});
    // expert_scale [experts] multiplies the factors; or null.
    void router(const float* x, const Rows& weights, const float* bias, const Router&,
                const float* expert_scale, int32_t* ids, float* factors, const ExpertGroups& = {});
    void add(float* x, const float* y, int64_t dim, float keep = 1, float scale = 1);
    void gather(const float* x, float* out, int64_t dim);
    void softcap(float* logits, int64_t vocab, float cap);
    void short_conv(const ShortConv&, const States&);
    void gated_delta(const GatedDelta&, const States&);
    void ssm_scan(const SsmScan&, const States&);
    void decay(const Decay&, const float* x, float* out);
    // `x`: null means ones.
    void multiply(Gate, const float* x, const float* gate, float* out, int64_t dim);
    void token_shift(const TokenShift&, const States&);
    void wkv7(const Wkv&, const States&);
    // The inputs that fill a mailbox. Each row of `mask` has mask_words words; the last ones go to the
    // mailbox.
    struct Posted {
        const float* x;
        const uint64_t* mask;
        int64_t mask_words;
        const int32_t* ids;
        const float* factors;
    };
    void post(std::shared_ptr<FlagLink>, const Mailbox&, const Posted&);
    void collect(std::shared_ptr<FlagLink>, const Mailbox&, float* out);

    // Throws std::invalid_argument if the batch holds a number out of bounds. See Pool::run.
    void run(const std::function<void()>& check_interrupt = {}, int64_t* nanoseconds = nullptr);
    // Steps of the program: run() can report the time of each.
    size_t steps() const { return steps_.size(); }
    // Size of the buffer that all programs of a pool share; each thread has kLocalBytes besides.
    size_t scratch_bytes() const { return shared_bytes_; }

  private:
    // Scratch of one op. Ops run one after another, so all share one buffer of the largest op's size.
    class ScratchPlan;
    // When the buffer exists, `set` receives the address of a part of it. It writes pointers and reads none,
    // so the order of parts does not matter.
    struct Part {
        size_t at;
        std::function<void(uint8_t*)> set;
    };

    // Calls run(rows, part) for each sequence and each of `parts` parts of its state; `reads` as in Step.
    void by_sequence(const States&, int64_t parts,
                     std::function<void(const StateRows&, int64_t, const Scratch&)> run,
                     std::function<Span(int64_t, int64_t)> reads = {});
    Span stretch_of(const States&, int64_t parts, int64_t piece, int64_t end) const;
    int64_t count(RowsOf rows) const { return batch_.counts[rows == kTokens ? 0 : 2]; }
    int64_t max_rows(RowsOf rows) const { return rows == kTokens ? bounds_.tokens : bounds_.logits; }
    int64_t max_decode() const { return bounds_.max_decode(); }
    void step(std::function<int64_t()> pieces, std::function<void(int64_t, const Scratch&)> run,
              std::function<Span(int64_t, int64_t)> reads = {});
    void take_quantised(ScratchPlan&, std::shared_ptr<Input>, int64_t max_rows);
    void quantise(std::shared_ptr<Input>, std::function<int64_t()> rows);
    // The forms of an input that products with these weights read, besides `x`.
    struct Meets {
        bool quantised, plain, bf16 = false;  // bf16: tiles multiply BF16 weights by all rows
        void with(const Rows& rows, bool tiles) {
            (is_quantised(rows.type) ? quantised : tiles && rows.type == BF16 ? bf16 : plain) = true;
        }
    };
    // `plain_math`: prompt rows are computed like decode rows in every prompt math.
    void prepare(ScratchPlan&, std::shared_ptr<Input>, Meets, int64_t max_rows, std::function<int64_t()> rows,
                 bool plain_math = false);
    // Takes memory for Input::tiled if tiles may multiply this input. tile() records the step that writes it.
    bool take_tiled(ScratchPlan&, std::shared_ptr<Input>, Meets, int64_t max_rows);
    void tile(std::shared_ptr<Input>, std::function<int64_t()> rows);
    // True if tiles multiply any of a step's `rows` of this input.
    bool any_tiled(const Input& in, int64_t rows) const {
        if (in.bf16) return rows > 0;
        return in.math == kSameMath ? rows >= kLeastTiled : batch_.prompt_count() > 0;
    }
    // Runs ffn_hidden for all rows; the first `decode` are decode rows.
    void hidden(const Ffn&, int64_t first, int64_t count, int decode, int tokens, uint8_t* local) const;
    // Calls run(input, t0, t1) for all rows; separately for decode and prompt rows if their math differs.
    template <class Run> static void by_kind(const Input& in, int decode, int tokens, Run&& run) {
        if (!in.tiled || in.math == kSameMath) decode = 0;
        if (decode) run(in.of_decode_rows(), 0, decode);
        if (decode < tokens) run(in, decode, tokens);
    }
    void products(std::shared_ptr<Input>, std::shared_ptr<std::vector<Product>>,
                  std::function<int64_t()> rows);
    void ffn_by_neuron(std::shared_ptr<Ffn>, ScratchPlan&);
    void ffn_by_output(std::shared_ptr<Ffn>, ScratchPlan&, Masks strongest);
    void experts_by_neuron(std::shared_ptr<ExpertsOp>, ScratchPlan&);
    void experts_by_output(std::shared_ptr<ExpertsOp>, ScratchPlan&);
    // For one row.
    void choose(const Router&, const ExpertGroups&, const float* logits, int32_t* ids, float* factors) const;
    void name_rows(std::shared_ptr<ExpertsOp>, ScratchPlan&);
    void next_load_batch(std::shared_ptr<ExpertsOp>, int64_t load_batch);
    void load_batch_by_neuron(std::shared_ptr<ExpertsOp>, int64_t load_batch);
    void load_batch_by_output(std::shared_ptr<ExpertsOp>, int64_t load_batch);
    std::function<bool()> give_up() const;
    std::shared_ptr<Input> predictor_hidden(ScratchPlan&, const float* x, const Predictor&);

    const Kernels& k_;
    const PromptMath math_;
    std::shared_ptr<Pool> pool_;
    const Batch batch_;
    BatchBounds bounds_;
    std::vector<int32_t> active_;  // sequences that have rows, if ops keep a state
    std::vector<Step> steps_;
    std::vector<Part> parts_;
    size_t shared_bytes_ = 0;
    std::shared_ptr<uint8_t> shared_;  // from the first run on
};

}  // namespace hc
