#include "op_table_states.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

using namespace hc;

namespace {

std::mt19937 random_bits(11);

std::vector<float> random_floats(int64_t n, float scale = 1) {
    std::vector<float> v(static_cast<size_t>(n));
    for (float& x : v) x = scale * (float(random_bits() % 20001) / 10000.0f - 1.0f);
    return v;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double softplus(double x) { return x > 40 ? x : std::log1p(std::exp(x)); }

constexpr int kFirst = 2, kSecond = 19, kRows = kFirst + kSecond;  // rows of two sequences
constexpr int kSlots = 4;

// A step: sequence 1 decodes kFirst rows from the state in slot 3, which goes to slot 0; sequence 0 begins
// with kSecond rows of a prompt, and its state goes to slot 2. Or one row of sequence 0, as a step alone.
struct StateStep {
    std::vector<int32_t> counts, tokens, positions, sequence, slots, pages, lengths, logits, first, rows,
        from, to;
    Batch batch;
    BatchBounds bounds;
    explicit StateStep(bool alone) : counts{kRows, kFirst, 0, 2}, first{kFirst, 0}, rows{kSecond, kFirst} {
        for (std::vector<int32_t>* each : {&tokens, &positions, &slots}) each->assign(kRows, 0);
        sequence.assign(kRows, 0);
        std::fill(sequence.begin(), sequence.begin() + kFirst, 1);
        pages = {0, 0};
        lengths = {kSecond, kFirst};
        from = {-1, 3};
        to.assign(kRows, -1);  // by row
        to[kFirst - 1] = 0;
        to[kRows - 1] = 2;
        if (alone) {
            counts = {1, 1, 0, 1};
            sequence[0] = first[0] = 0;
            to[0] = 2;
            rows = {1, 0};
        }
        batch = {counts.data(),   tokens.data(), positions.data(),
                 sequence.data(), slots.data(),  pages.data(),
                 lengths.data(),  logits.data(), 1,
                 first.data(),    rows.data(),   from.data(),
                 to.data()};
        bounds = {kRows, 2, 1};
    }
};

// One op on both sequences; then again sequence 0, a row at a time, which must have the same bits.
struct Case {
    const Kernels& k;
    std::shared_ptr<Pool> pool;
    const Check& check;
    const char* what;
    int64_t state, width, out_width;  // floats of a slot, and of rows of input and output
    // `x` are rows of all inputs, one after another.
    std::function<void(Program&, const States&, const float* x, float* out)> record;
    // One sequence in float64: its state before, which becomes the one after; rows [first, end).
    std::function<void(std::vector<double>& state, const float* x, int first, int end, double* out)> truth;

    void run() const {
        const auto x = random_floats(kRows * width);
        std::vector<float> states = random_floats(kSlots * state), out(size_t(kRows * out_width));
        const std::vector<float> before = states;
        execute(false, x.data(), states, out.data());
        compare(x.data(), before, states, out);
        std::vector<float> again = before, row(size_t(kRows * out_width));
        for (int t = 0; t < kSecond; ++t) {
            execute(true, &x[size_t((kFirst + t) * width)], again, row.data(), t > 0);
            for (int64_t i = 0; i < out_width; ++i)
                check(what, i, row[size_t(i)] == out[size_t((kFirst + t) * out_width + i)], 1, 1);
        }
        for (int64_t i = 2 * state; i < 3 * state; ++i)
            check(what, i, again[size_t(i)] == states[size_t(i)], 1, 1);
    }

    void execute(bool alone, const float* x, std::vector<float>& states, float* out,
                 bool goes_on = false) const {
        StateStep s(alone);
        if (goes_on) s.from[0] = 2;
        Program program(k, pool, s.batch, s.bounds);
        record(program, {states.data(), kSlots, state}, x, out);
        program.run();
    }

    void compare(const float* x, const std::vector<float>& before, const std::vector<float>& after,
                 const std::vector<float>& out) const {
        std::vector<double> want(out.size()), first(before.begin() + 3 * state, before.end());
        std::vector<double> second(size_t(state), 0.0);
        truth(first, x, 0, kFirst, want.data());
        truth(second, x, kFirst, kRows, want.data());
        double size = 1;
        for (double v : want) size = std::max(size, std::fabs(v));
        for (size_t i = 0; i < out.size(); ++i) check(what, int64_t(i), out[i], want[i], size);
        for (int64_t i = 0; i < state; ++i) {
            check(what, i, after[size_t(i)], first[size_t(i)], size);
            check(what, i, after[size_t(2 * state + i)], second[size_t(i)], size);
            check(what, i, after[size_t(state + i)] == before[size_t(state + i)], 1, 1);
        }
    }
};

void test_short_conv(const Kernels& k, std::shared_ptr<Pool> pool, const Check& check, int64_t channels,
                     int64_t taps, bool silu) {
    const auto weight = random_floats(channels * taps), bias = random_floats(channels);
    const auto record = [&](Program& p, const States& states, const float* x, float* out) {
        p.short_conv({x, weight.data(), bias.data(), out, channels, taps, silu}, states);
    };
    const auto truth = [&](std::vector<double>& state, const float* x, int first, int end, double* out) {
        for (int t = first; t < end; ++t)
            for (int64_t c = 0; c < channels; ++c) {
                double y = bias[size_t(c)];
                for (int64_t j = 0; j < taps; ++j)
                    y += double(weight[size_t(c * taps + j)]) *
                         (j < taps - 1 ? state[size_t(j * channels + c)] : double(x[t * channels + c]));
                out[t * channels + c] = silu ? y * sigmoid(y) : y;
                for (int64_t j = 0; j + 1 < taps; ++j)
                    state[size_t(j * channels + c)] =
                        j + 2 < taps ? state[size_t((j + 1) * channels + c)] : double(x[t * channels + c]);
            }
    };
    Case{k, pool, check, "short_conv", (taps - 1) * channels, channels, channels, record, truth}.run();
}

// The inputs of a row: q, k, v, then decays, then beta.
void test_gated_delta(const Kernels& k, std::shared_ptr<Pool> pool, const Check& check, int64_t keys,
                      int64_t heads, int64_t dk, int64_t dv, bool per_channel) {
    const int64_t mixed = 2 * keys * dk + heads * dv, decays = per_channel ? heads * dk : heads;
    const int64_t width = mixed + decays + heads;
    std::vector<float> parts[3];  // as the op takes them
    const auto split = [&](const float* x, int rows) {
        const int64_t begins[] = {0, mixed, mixed + decays, width};
        for (int part = 0; part < 3; ++part) {
            parts[part].assign(size_t(kRows * (begins[part + 1] - begins[part])), 0);
            float* to = parts[part].data();
            for (int t = 0; t < rows; ++t)
                for (int64_t i = begins[part]; i < begins[part + 1]; ++i)
                    *to++ = part == 1 ? -10 * std::fabs(x[t * width + i]) : x[t * width + i];
        }
    };
    const bool tiled = !per_channel;
    int rows = kRows;
    const auto record = [&](Program& p, const States& states, const float* x, float* out) {
        split(x, rows);
        rows = 1;
        p.gated_delta({parts[0].data(), parts[1].data(), parts[2].data(), out, keys, heads, dk, dv,
                       per_channel, tiled, 1e-6f},
                      states);
    };
    const auto truth = [&](std::vector<double>& state, const float* x, int first, int end, double* out) {
        for (int t = first; t < end; ++t)
            for (int64_t h = 0; h < heads; ++h) {
                const float* row = x + t * width;
                const float* q = row + (tiled ? h % keys : h / (heads / keys)) * dk;
                const float *key = q + keys * dk, *v = row + 2 * keys * dk + h * dv;
                double qq = 1e-6, kk = 1e-6;
                for (int64_t i = 0; i < dk; ++i) qq += double(q[i]) * q[i], kk += double(key[i]) * key[i];
                const double beta = sigmoid(row[mixed + decays + h]);
                for (int64_t j = 0; j < dv; ++j) {
                    double* s = &state[size_t(h * dk * dv + j)];
                    double read = 0, sum = 0;
                    for (int64_t i = 0; i < dk; ++i) {
                        const float g = row[mixed + (per_channel ? h * dk + i : h)];
                        s[i * dv] *= std::exp(-10 * std::fabs(double(g)));
                        read += s[i * dv] * key[i] / std::sqrt(kk);
                    }
                    for (int64_t i = 0; i < dk; ++i) {
                        s[i * dv] += key[i] / std::sqrt(kk) * beta * (v[j] - read);
                        sum += s[i * dv] * q[i] / std::sqrt(qq * double(dk));
                    }
                    out[(t * heads + h) * dv + j] = sum;
                }
            }
    };
    Case{k, pool, check, "gated_delta", heads * dk * dv, width, heads * dv, record, truth}.run();
}

// The inputs of a row: x, B, C, then dt.
void test_ssm_scan(const Kernels& k, std::shared_ptr<Pool> pool, const Check& check, int64_t heads, int64_t p,
                   int64_t n, int64_t groups) {
    const int64_t mixed = heads * p + 2 * groups * n, width = mixed + heads;
    const auto bias = random_floats(heads), d = random_floats(heads);
    auto a = random_floats(heads);
    for (float& v : a) v = -std::fabs(v);
    std::vector<float> own, dt;
    int rows = kRows;
    const auto record = [&](Program& program, const States& states, const float* x, float* out) {
        own.assign(size_t(kRows * mixed), 0);
        dt.assign(size_t(kRows * heads), 0);
        for (int t = 0; t < rows; ++t) {
            std::copy(x + t * width, x + t * width + mixed, own.begin() + t * mixed);
            std::copy(x + t * width + mixed, x + (t + 1) * width, dt.begin() + t * heads);
        }
        rows = 1;
        program.ssm_scan({own.data(), dt.data(), bias.data(), a.data(), d.data(), out, heads, p, n, groups},
                         states);
    };
    const auto truth = [&](std::vector<double>& state, const float* x, int first, int end, double* out) {
        for (int t = first; t < end; ++t)
            for (int64_t h = 0; h < heads; ++h) {
                const float* row = x + t * width;
                const double step = softplus(double(row[mixed + h]) + bias[size_t(h)]);
                const float *b = row + heads * p + h / (heads / groups) * n, *c = b + groups * n;
                for (int64_t i = 0; i < p; ++i) {
                    double* s = &state[size_t((h * p + i) * n)];
                    double sum = double(d[size_t(h)]) * row[h * p + i];
                    for (int64_t j = 0; j < n; ++j) {
                        s[j] = std::exp(step * a[size_t(h)]) * s[j] + step * row[h * p + i] * b[j];
                        sum += s[j] * c[j];
                    }
                    out[(t * heads + h) * p + i] = sum;
                }
            }
    };
    Case{k, pool, check, "ssm_scan", heads * p * n, width, heads * p, record, truth}.run();
}

void test_gates(const Kernels& k, const Check& check, int64_t n) {
    const auto x = random_floats(n), gate = random_floats(n, 8), bias = random_floats(n);
    const auto factor = random_floats(n);
    std::vector<float> out(static_cast<size_t>(n));
    for (Gate kind : {kPlainGate, kSiluGate, kSigmoidGate}) {
        k.multiply(kind, x.data(), gate.data(), out.data(), n);
        for (size_t i = 0; i < size_t(n); ++i) {
            const double g = gate[i];
            const double act = kind == kPlainGate ? g : kind == kSiluGate ? g * sigmoid(g) : sigmoid(g);
            check("multiply", n, out[i], x[i] * act, 8);
        }
    }
    for (int64_t heads : {n, n / 4}) {
        k.decay({bias.data(), factor.data(), n, heads}, gate.data(), out.data());
        for (int64_t i = 0; i < n; ++i) {
            const auto at = size_t(i);
            check("decay", n, out[at],
                  factor[size_t(i / (n / heads))] * softplus(double(gate[at]) + bias[at]), 1);
        }
    }
}

}  // namespace

void test_states(const Kernels& k, std::shared_ptr<Pool> pool, const Check& check) {
    for (int64_t channels : {3, 70, 300})
        for (int64_t taps : {2, 3, 4, 7}) test_short_conv(k, pool, check, channels, taps, taps == 4);
    for (bool per_channel : {false, true}) {
        test_gated_delta(k, pool, check, 2, 4, 6, 10, per_channel);
        test_gated_delta(k, pool, check, 1, 3, 33, 64, per_channel);
        test_gated_delta(k, pool, check, 2, 2, 16, 77, per_channel);
    }
    test_ssm_scan(k, pool, check, 4, 8, 16, 2);
    test_ssm_scan(k, pool, check, 3, 7, 37, 1);
    for (int64_t n : {4, 36, 100}) test_gates(k, check, n);
}
