// The op table without Python, for processors that are emulated and instruction sets that are forced:
//     hotcold_op_table [isa [dots|maths]]   exit 0: all ops agree with a float64 truth; 1: some do not;
//     77: this CPU lacks the isa
// First it prints a number that depends on every bit of the products of matrices. Products by BF16 weights
// are left out, since tiles add them in another order. With "dots" there is no truth of them: who asks knows
// the number of another instruction set, whose products have the same bits. Nor are there ops that it shares
// with that one. With "picked" in the place of "dots" it only prints what was picked for this CPU.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "isa/table.h"
#include "op_table.h"
#include "op_table_states.h"
#include "pack/fill.h"
#include "pack/pack.h"
#include "program/program.h"
#include "program/step_scratch.h"
#include "simd/fetching.h"

using namespace hc;
using namespace op_table;

// tests/native/plain_pack.cpp
void plain_pack_row(int type, const uint8_t* from, int64_t cols, uint8_t* to);
void plain_pack_panel(int type, const uint8_t* from, int64_t stride, int count, uint8_t* to);
void plain_transpose(int bytes, const uint8_t* from, int64_t stride, int count, int64_t columns, uint8_t* to);

namespace {

void test_linear(const Kernels& k, std::shared_ptr<Pool> pool, const Weights& w, int tokens) {
    Step1 s(tokens, std::min(tokens, 3), tokens);
    const Type type = w.rows.type;
    const int64_t rows = w.rows.count, cols = w.rows.cols;
    const auto x = random_floats(tokens * cols), bias = random_floats(rows);
    std::vector<float> out(size_t(tokens) * rows, 1.0f), embedded(size_t(tokens * cols));
    Program program(k, pool, s.batch, s.bounds);
    program.linear(x.data(), {{w.rows, bias.data(), out.data(), rows, true}}, kTokens);
    program.embed(w.rows, embedded.data(), kByToken, false);
    std::vector<float> both(embedded.size(), 3.0f);
    program.embed(w.rows, both.data(), kByPosition, true);
    program.run();
    if (type != BF16) note_bits(out);
    for (const auto* values : {&embedded, &both}) note_bits(*values);
    for (int t = 0; with_truth && t < tokens; ++t) {
        const auto v = seen(type, &x[size_t(t * cols)], cols);
        for (int r = 0; r < rows; ++r)
            check("linear", type, cols, out[size_t(t * rows + r)], 1 + bias[size_t(r)] + dot(w, r, v),
                  w.largest * double(cols) / 8);
        for (int64_t i = 0; i < cols; ++i)
            check("embed", type, cols, embedded[size_t(t * cols + i)], w.at(s.tokens[size_t(t)], i), 1);
        for (int64_t i = 0; i < cols; ++i)
            check("embed by position", type, cols, both[size_t(t * cols + i)], 3 + w.at(t, i), 1);
    }
}

// Products in each math that has other bits than vectors: instruction sets with tiles give the same.
void test_maths(const Kernels& k, std::shared_ptr<Pool> pool, const Weights& w, int tokens) {
    Step1 s(tokens, w.rows.type == BF16 ? 3 : 0, tokens);
    const auto x = random_floats(tokens * w.rows.cols);
    for (PromptMath math : {kSameMath, kSplitMath, kFastMath}) {
        if (math == kSameMath && w.rows.type != BF16) continue;
        if (math == kSplitMath && is_quantised(w.rows.type)) continue;
        std::vector<float> out(size_t(tokens) * w.rows.count);
        Program program(k, pool, s.batch, s.bounds, math);
        program.linear(x.data(), {{w.rows, nullptr, out.data(), w.rows.count, false}}, kTokens);
        program.run();
        note_bits(out);
    }
}

void test_step_scratch(const Kernels& k) {
    StepShape dense{5, 2, 3, 64, 4, 2, 16, 96, 1, 1, 0, true, kSameMath};
    StepShape routed{5, 2, 3, 64, 4, 2, 16, 32, 8, 2, 48, false, kFastMath};
    for (const StepShape& shape : {dense, routed}) {
        const size_t small = step_scratch_bytes(k, shape);
        StepShape larger = shape;
        larger.tokens *= 8;
        check("scratch of a step", F32, int64_t(small), small > 0, 1, 1);
        check("scratch of a larger step", F32, int64_t(small), step_scratch_bytes(k, larger) > small, 1, 1);
    }
}

struct FfnCase {
    Type type;
    bool by_output, gated, skip;
    Activation activation;
    int tokens, decode;
};

constexpr float kLimit = 0.6f, kAlpha = 1.702f;  // of kSwigluOai

double activate(Activation a, double g) {
    if (a == kSwigluOai)
        return std::min(g, double(kLimit)) / (1 + std::exp(-double(kAlpha) * std::min(g, double(kLimit))));
    if (a == kGeluErf) return 0.5 * g * std::erfc(-g / std::sqrt(2.0));
    if (a == kSilu) return g / (1 + std::exp(-g));
    if (a == kGelu)
        return 0.5 * g * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (g + 0.044715 * g * g * g)));
    g = std::max(g, 0.0);
    return a == kRelu2 ? g * g : g;
}

// The tenth of the largest in size is marked; what is near its edge may be, or not.
void check_strongest(Type type, const std::vector<float>& h, const uint64_t* marked) {
    const auto n = int64_t(h.size());
    std::vector<float> sizes(h);
    for (float& size : sizes) size = std::fabs(size);
    std::sort(sizes.begin(), sizes.end(), std::greater<>());
    const float least = sizes[size_t((n + 9) / 10 - 1)];
    for (int64_t i = 0; i < n; ++i) {
        const float size = std::fabs(h[size_t(i)]);
        if (std::fabs(size - least) <= 1e-3f * sizes[0] && size != 0) continue;
        check("strongest", type, n, double(marked[i / 64] >> (i % 64) & 1), size > least, 1);
    }
}

struct FfnWeights {
    Weights gate, up, down;
    FfnWeights(Type type, bool by_output, int64_t n, int64_t d)
        : gate(random_weights(type, n, d)),
          up(random_weights(type, n, d)),
          down(by_output ? random_weights(type, d, n) : random_weights(type, n, d)) {}
};

void test_ffn(const Kernels& k, std::shared_ptr<Pool> pool, const FfnCase& c, const FfnWeights& weights) {
    const auto& [gate, up, down] = weights;
    const int64_t n = up.rows.count, d = up.rows.cols;
    Step1 s(c.tokens, c.decode, c.tokens);
    const bool panels = c.by_output && can_skip(c.activation) && is_quantised(c.type) && !is_opened(c.type);
    const auto x = random_floats(c.tokens * d);
    std::vector<float> out(size_t(c.tokens * d));
    const int64_t words = (n + 63) / 64;
    std::vector<uint64_t> mask(size_t(c.tokens * words)), active(mask.size()), strongest(mask.size());
    for (uint64_t& m : mask) m = uint64_t(random_bits()) << 32 | random_bits();
    Ffn f{};
    if (c.gated) f.gate = gate.rows;
    f.up = up.rows;
    f.down = down.rows;
    f.by_output = c.by_output && !panels;
    f.activation = c.activation;
    f.limit = kLimit;
    f.alpha = kAlpha;
    f.skip = c.skip;
    std::vector<uint8_t> packed;
    if (panels) {
        f.panels = panels_of(c.type, d);
        const int64_t count = n / f.panels.neurons;
        packed.resize(size_t(count * f.panels.bytes()));
        f.down = {packed.data(), f.panels.row, n, (d + 31) / 32 * 32, c.type};
        Source source;
        source.data = down.plain.data();
        source.rows = d;
        source.row_bytes = row_size(c.type, n);
        const Target target{f.down, f.panels, true};
        fill(target, source, *pool, {});
    }
    f.max_leaves = kMaxLeaves;
    f.mask = {mask.data(), words};
    f.active = {active.data(), words};
    f.out = out.data();
    Program program(k, pool, s.batch, s.bounds);
    program.ffn(f, x.data(), f.by_output ? Masks{strongest.data(), words} : Masks{});
    program.run();
    for (int t = 0; t < c.tokens; ++t) {
        const auto v = seen(c.type, &x[size_t(t * d)], d);
        std::vector<float> h(static_cast<size_t>(n));
        for (int64_t i = 0; i < n; ++i) {
            const bool named = t >= c.decode || (mask[size_t(t * words + i / 64)] >> (i % 64) & 1);
            const double u = dot(up, i, v);
            double a = activate(c.activation, c.gated ? dot(gate, i, v) : u);
            if (c.activation == kSwigluOai)
                a *= std::max(-double(kLimit), std::min(double(kLimit), u)) + 1;
            else if (c.gated)
                a *= c.activation == kDRelu ? std::max(u, 0.0) : u;
            h[size_t(i)] = named ? float(a) : 0;
            if (t < c.decode && can_skip(c.activation))
                check("active", c.type, n, double(active[size_t(t * words + i / 64)] >> (i % 64) & 1),
                      h[size_t(i)] != 0, 1);
        }
        if (f.by_output && t < c.decode) check_strongest(c.type, h, &strongest[size_t(t * words)]);
        const auto coefficients =
            c.by_output && !panels ? seen(c.type, h.data(), n) : std::vector<double>(h.begin(), h.end());
        // By output a code of h may round the other way than here: allow one code's worth.
        const double size =
            magnitude(coefficients) * down.largest * (c.by_output && !panels ? 1000 : double(n) / 4);
        for (int64_t j = 0; j < d; ++j) {
            double want = 0;
            for (int64_t i = 0; i < n; ++i)
                want += coefficients[size_t(i)] * (c.by_output ? down.at(j, i) : down.at(i, j));
            check("ffn", c.type, n, out[size_t(t * d + j)], want, size);
        }
    }
}

void test_norm_rope(const Kernels& k, int64_t n, bool centre, bool interleaved) {
    const auto x = random_floats(n), weight = random_floats(n), bias = random_floats(n);
    std::vector<float> out(static_cast<size_t>(n));
    k.norm({weight.data(), centre ? bias.data() : nullptr, 1e-5f, centre, n}, x.data(), out.data());
    double mean = 0, squares = 0;
    for (float v : x) mean += v / double(n);
    if (!centre) mean = 0;
    for (float v : x) squares += (v - mean) * (v - mean) / double(n);
    for (size_t i = 0; i < size_t(n); ++i)
        check("norm", centre, n, out[i],
              (x[i] - mean) / std::sqrt(squares + 1e-5) * weight[i] + (centre ? bias[i] : 0), 1);
    for (float keep : {0.0f, 0.5f}) {
        std::vector<float> sum = keep == 0 ? std::vector<float>(size_t(n), NAN) : x;
        k.add(sum.data(), weight.data(), n, keep, 0.22f);
        for (size_t i = 0; i < size_t(n); ++i)
            check("add", centre, n, sum[i], keep * x[i] + 0.22 * weight[i], 1);
    }
    std::vector<float> head = x;
    const int64_t half = n / 4, p = 2;
    const auto cos = random_floats(3 * half), sin = random_floats(3 * half);
    k.rope({cos.data(), sin.data(), half, interleaved}, head.data(), int(p));
    for (int64_t i = 0; i < half; ++i) {
        const auto a = size_t(interleaved ? 2 * i : i), b = size_t(interleaved ? 2 * i + 1 : i + half);
        const double c = cos[size_t(p * half + i)], s = sin[size_t(p * half + i)];
        check("rope", interleaved, n, head[a], x[a] * c - x[b] * s, 1);
        check("rope", interleaved, n, head[b], x[a] * s + x[b] * c, 1);
    }
}

void test_router(const Kernels& k, std::shared_ptr<Pool> pool, Type type, bool softmax, int experts) {
    const int tokens = 3, chosen = 4;
    const int64_t d = 3 * std::max(32, block_size(type).weights);
    Step1 s(tokens, 1, tokens);
    const Weights w = random_weights(type, experts, d);
    const auto x = random_floats(tokens * d), bias = random_floats(experts), more = random_floats(experts);
    std::vector<int32_t> ids(size_t(tokens * chosen));
    std::vector<float> factors(ids.size());
    Program program(k, pool, s.batch, s.bounds);
    program.router(x.data(), w.rows, bias.data(), {experts, chosen, softmax, more.data(), true, 2.5f},
                   nullptr, ids.data(), factors.data());
    program.run(0);
    for (int t = 0; t < tokens; ++t) {
        const auto v = seen(type, &x[size_t(t * d)], d);
        std::vector<double> score, rank;
        double total = 0, sum = 0, worst = 1e30;
        for (int e = 0; e < experts; ++e) {
            const double logit = dot(w, e, v) + bias[size_t(e)];
            score.push_back(softmax ? std::exp(logit) : 1 / (1 + std::exp(-logit)));
            total += score.back();
        }
        for (int e = 0; e < experts; ++e) {
            if (softmax) score[size_t(e)] /= total;
            rank.push_back(score[size_t(e)] + more[size_t(e)]);
        }
        const int32_t* own = &ids[size_t(t * chosen)];
        for (int i = 0; i < chosen; ++i) {
            check("router ascends", type, experts, i == 0 || own[i] > own[i - 1], 1, 1);
            sum += score[size_t(own[i])];
            worst = std::min(worst, rank[size_t(own[i])]);
        }
        for (int e = 0; e < experts; ++e)
            if (std::find(own, own + chosen, e) == own + chosen)
                check("router", type, experts, rank[size_t(e)] < worst + 1e-4, 1, 1);
        for (int i = 0; i < chosen; ++i)
            check("router factor", type, experts, factors[size_t(t * chosen + i)],
                  2.5 * score[size_t(own[i])] / std::max(sum, 1e-20), 5);
    }
}

void test_predict(const Kernels& k, std::shared_ptr<Pool> pool, Type type, bool relu) {
    const int tokens = 3, n = 150, rank = 64;
    const int64_t d = 3 * std::max(32, block_size(type).weights);
    Step1 s(tokens, tokens, tokens);
    const Weights first = random_weights(type, rank, d), second = random_weights(F32, n, rank);
    const auto x = random_floats(tokens * d), threshold = random_floats(n);
    std::vector<uint64_t> mask(tokens * 3, ~uint64_t(0));
    Program program(k, pool, s.batch, s.bounds);
    program.predict(x.data(), {first.rows, second.rows, relu, threshold.data()}, {mask.data(), 3});
    program.run();
    for (int t = 0; t < tokens; ++t) {
        const auto v = seen(type, &x[size_t(t * d)], d);
        std::vector<double> hidden;
        for (int r = 0; r < rank; ++r)
            hidden.push_back(relu ? std::max(0.0, dot(first, r, v)) : dot(first, r, v));
        for (int i = 0; i < n; ++i) {
            const double margin = dot(second, i, hidden) - threshold[size_t(i)];
            if (std::fabs(margin) < 1e-3) continue;  // either side is right
            check("predict", type, n, double(mask[size_t(t * 3 + i / 64)] >> (i % 64) & 1), margin >= 0, 1);
        }
    }
}

// A NaN is never taken for an inactive neuron: it shows in the output of every instruction set.
void test_nan(const Kernels& k, std::shared_ptr<Pool> pool) {
    const int64_t n = 64, d = 32;
    Step1 s(2, 1, 2);  // a decode row and a prompt row
    const std::vector<float> ones(size_t(n * d), 1.0f), x(size_t(2 * d), 1.0f);
    std::vector<float> up = ones, out(size_t(2 * d));
    up[5 * d + 3] = std::nanf("");
    const auto rows = [&](const std::vector<float>& w) {
        return Rows{reinterpret_cast<const uint8_t*>(w.data()), d * 4, n, d, F32};
    };
    Ffn f{};
    f.gate = rows(ones);
    f.up = rows(up);
    f.down = rows(ones);
    f.activation = kDRelu;
    f.skip = true;
    f.max_leaves = kMaxLeaves;
    f.out = out.data();
    Program program(k, pool, s.batch, s.bounds);
    program.ffn(f, x.data());
    program.run();
    for (float v : out) check("NaN of an up row under dReLU", F32, d, std::isnan(v), 1, 1);
    float two[2] = {std::nanf(""), -1};
    k.relu(two, 2);
    check("NaN after ReLU", F32, 2, std::isnan(two[0]) && two[1] == 0, 1, 1);
}

void expect_equal(const std::vector<uint8_t>& seen, const std::vector<uint8_t>& wanted, const char* what) {
    ++checks;
    if (seen == wanted) return;
    ++failures;
    std::printf("%s: vectors and plain loops differ\n", what);
}

// Packing with this processor's vectors, and without.
void test_pack(Type type) {
    const BlockSize block = block_size(type);
    std::vector<uint8_t> from(size_t(kGroup * 3 * block.bytes));
    for (uint8_t& b : from) b = uint8_t(random_bits());
    for (int64_t blocks : {1, 4, 7, 16, 19}) {
        const int64_t cols = blocks * block.weights;
        std::vector<uint8_t> seen(static_cast<size_t>(row_size(type, cols))), wanted(seen.size());
        pack_row(type, from.data(), cols, seen.data());
        plain_pack_row(type, from.data(), cols, wanted.data());
        expect_equal(seen, wanted, "pack_row");
    }
    if (is_opened(type)) return;  // it has no panels
    const int64_t stride = 3 * block.bytes;
    for (int count : {5, 32, 100, 512}) {
        const Outputs outputs{from.data(), stride, 0, count};
        std::vector<uint8_t> seen(is_quantised(type) ? size_t(panels_of(type, count).bytes())
                                                     : size_t(count * 3 * block.bytes));
        std::vector<uint8_t> wanted(seen.size());
        if (is_quantised(type)) {
            pack_panel(type, outputs, count, seen.data());
            plain_pack_panel(type, from.data(), stride, count, wanted.data());
        } else {
            transpose_floats(block.bytes, outputs, 3, seen.data(), count * block.bytes);
            plain_transpose(block.bytes, from.data(), stride, count, 3, wanted.data());
        }
        expect_equal(seen, wanted, "pack_panel");
    }
}

constexpr Type kTypes[] = {F32,  F16,    BF16,  Q4_0, Q4_1, Q5_0,   Q5_1,  Q8_0,  Q4_K, Q5_K,
                           Q6_K, IQ4_NL, MXFP4, Q2_K, Q3_K, IQ4_XS, TQ2_0, NVFP4, Q1_0, Q2_0};

// What is no product of matrices.
void test_the_rest(const Kernels& k, std::shared_ptr<Pool> pool) {
    for (Type type : kTypes) {
        test_pack(type);
        const int64_t unit = block_size(type).weights > 32 ? 256 : 32;
        const bool all = type == F32 || type == Q4_0 || type == Q5_K;  // kinds; every type has some
        for (bool by_output : {false, true}) {
            const FfnWeights weights(type, by_output, unit == 32 ? 160 : 256, unit == 32 ? 96 : 256);
            for (Activation a : {kRelu, kDRelu, kRelu2, kSilu, kGelu, kGeluErf, kSwigluOai})
                for (bool gated : {true, false})
                    if ((gated || (a != kDRelu && a != kSwigluOai)) && (all || a == kRelu || a == kSilu))
                        for (auto [tokens, decode] : {std::pair{1, 1}, {5, 5}, {4, 1}})
                            test_ffn(k, pool, {type, by_output, gated, can_skip(a), a, tokens, decode},
                                     weights);
        }
        const FfnWeights many(type, false, 1000, unit == 32 ? 544 : 768);
        test_ffn(k, pool, {type, false, true, false, kRelu, 6, 2}, many);
        for (int experts : {4, 37, 128})
            for (bool softmax : {true, false}) test_router(k, pool, type, softmax, experts);
        test_predict(k, pool, type, true);
        test_predict(k, pool, type, false);
    }
    test_step_scratch(k);
    test_attentions(k, pool);
    for (int64_t n : {8, 36, 64, 100, 4096})
        for (bool flag : {false, true}) test_norm_rope(k, n, flag, flag);
    test_states(k, pool, [](const char* what, int64_t n, double got, double want, double size) {
        check(what, F32, n, got, want, size);
    });
}

}  // namespace

int main(int argc, char** argv) {
    const std::string isa = argc > 1 ? argv[1] : "";
    const Kernels* k = find_kernels(isa.c_str());
    if (!k) {
        for (const char* known :
             {"amx", "avx2+amx", "avx512", "avxvnni", "avxvnni_evex", "avx2", "i8mm", "dotprod", "neon"})
            if (isa == known) {
                std::printf("this processor or this build lacks %s\n", known);
                return 77;
            }
        std::printf(
            "unknown instruction set %s: choose from avx512, avxvnni, avx2, i8mm, dotprod, neon, scalar\n",
            isa.c_str());
        return 2;
    }
    if (argc > 2 && !std::strcmp(argv[2], "picked")) {
        std::printf("%s %d:%d\n", k->name, int(fetching.ahead), fetching.into_l2 ? 2 : 1);
        return 0;
    }
    with_truth = argc < 3;
    const bool maths = argc > 2 && !std::strcmp(argv[2], "maths");
    auto pool = std::make_shared<Pool>(3);
    for (Type type : kTypes) {
        const int64_t unit = block_size(type).weights > 32 ? 256 : 32;
        for (int64_t cols : {32, 64, 96, 256, 544, 768}) {
            if (cols % unit != 0) continue;
            // Whole sets of decoded rows, a part of one, and rows that no tile holds.
            const Weights w = random_weights(type, 45, cols);
            if (maths) {
                test_maths(*k, pool, w, 35);
                continue;
            }
            for (int tokens : {1, 2, 3, 5, 6, 7, 21})  // whole tiles of tokens, and every number left over
                test_linear(*k, pool, w, tokens);
        }
    }
    std::printf("products %016llx\n", static_cast<unsigned long long>(all_bits));
    test_nan(*k, pool);
    if (with_truth) test_the_rest(*k, pool);
    std::printf("%s: %d checks, %d failed\n", k->name, checks, failures);
    return failures ? 1 : 0;
}
