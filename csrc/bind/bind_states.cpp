// The ops that keep a state, and other ops of such layers.
#include "bind/bind.h"
#include "ops/scratch.h"

namespace hc {
namespace {

States states_of(const Floats& state, const char* op, size_t axes) {
    if (state.ndim() != axes)
        refuse(std::string(op) + ": a state of " + std::to_string(state.ndim()) + " axes; " +
               std::to_string(axes) + " are needed");
    for (size_t i = 1; i < axes; ++i)
        if (state.shape(i) < 1) refuse(std::string(op) + ": a state without values");
    return {state.data(), int64_t(state.shape(0)), width_of(state)};
}

void check_shared(const char* name, int64_t whole, int64_t parts) {
    if (parts < 1 || whole % parts)
        refuse(std::string(name) + ": " + std::to_string(whole) + " of them cannot be shared evenly by " +
               std::to_string(parts));
}

void bind_short_conv(BoundProgram& p, const Floats& x, const Array<const float>& weight,
                     const Maybe<const float>& bias, const Floats& state, const Floats& out, bool silu) {
    const States states = states_of(state, "short_conv", 3);
    const int64_t rows = p.rows(kTokens), channels = axis(state, 2), taps = axis(weight, 1);
    if (taps < 2 || taps > kMostTaps)
        refuse("short_conv: a weight of " + std::to_string(taps) + " columns; 2 to " +
               std::to_string(kMostTaps) + " are allowed");
    if (weight.ndim() != 2 || axis(weight, 0) != channels || axis(state, 1) != taps - 1)
        refuse("short_conv: weight [C, k] and state [slots, k - 1, C] do not fit");
    const ShortConv c{data_of(x, "short_conv: x", rows, channels),
                      weight.data(),
                      vector_of(bias, "short_conv: bias", channels),
                      data_of(out, "short_conv: out", rows, channels),
                      channels,
                      taps,
                      silu};
    if (c.x == c.out) refuse("short_conv: out is x; it must be another buffer");
    p.program.short_conv(c, states);
}

void bind_gated_delta(BoundProgram& p, const Floats& mixed, const Floats& decay, const Floats& beta,
                      const Floats& state, const Floats& out, int64_t keys, int64_t key_dim, bool tiled,
                      float eps) {
    const States states = states_of(state, "gated_delta", 4);
    const int64_t rows = p.rows(kTokens), heads = axis(state, 1), value_dim = axis(state, 3);
    check_shared("gated_delta: v heads", heads, keys);
    if (axis(state, 2) != key_dim)
        refuse("gated_delta: a state of " + std::to_string(axis(state, 2)) + " keys and a key_dim of " +
               std::to_string(key_dim));
    GatedDelta g{};
    g.keys = keys;
    g.heads = heads;
    g.key_dim = key_dim;
    g.value_dim = value_dim;
    g.tiled = tiled;
    g.eps = eps;
    g.per_channel = width_of(decay) != heads;
    check_scratch(g.scratch() * 4,
                  "gated_delta: states of " + std::to_string(key_dim) + " x " + std::to_string(value_dim));
    g.mixed = data_of(mixed, "gated_delta: mixed", rows, g.width());
    g.decay = data_of(decay, "gated_delta: decay", rows, g.per_channel ? heads * key_dim : heads);
    g.beta = data_of(beta, "gated_delta: beta", rows, heads);
    g.out = data_of(out, "gated_delta: out", rows, heads * value_dim);
    p.program.gated_delta(g, states);
}

void bind_decay(BoundProgram& p, const Floats& x, const Array<const float>& bias,
                const Array<const float>& factor, const Floats& out) {
    const int64_t rows = p.rows(kTokens), channels = int64_t(bias.size()), heads = int64_t(factor.size());
    check_shared("decay: channels", channels, heads);
    p.program.decay({bias.data(), factor.data(), channels, heads}, data_of(x, "decay: x", rows, channels),
                    data_of(out, "decay: out", rows, channels));
}

void bind_ssm_scan(BoundProgram& p, const Floats& mixed, const Floats& dt, const Array<const float>& dt_bias,
                   const Array<const float>& a, const Array<const float>& d, const Floats& state,
                   const Floats& out, int64_t groups) {
    const States states = states_of(state, "ssm_scan", 4);
    const int64_t rows = p.rows(kTokens), heads = axis(state, 1);
    check_shared("ssm_scan: heads", heads, groups);
    SsmScan s{};
    s.heads = heads;
    s.width = axis(state, 2);
    s.size = axis(state, 3);
    s.groups = groups;
    check_scratch(s.scratch() * 4,
                  "ssm_scan: states of " + std::to_string(s.width) + " x " + std::to_string(s.size));
    s.mixed = data_of(mixed, "ssm_scan: mixed", rows, s.mixed_width());
    s.dt = data_of(dt, "ssm_scan: dt", rows, heads);
    s.dt_bias = data_of(dt_bias, "ssm_scan: dt_bias", heads, 1);
    s.a = data_of(a, "ssm_scan: a", heads, 1);
    s.d = data_of(d, "ssm_scan: d", heads, 1);
    s.out = data_of(out, "ssm_scan: out", rows, heads * s.width);
    p.program.ssm_scan(s, states);
}

void bind_multiply(BoundProgram& p, const Floats& x, const Floats& gate, const Floats& out, int kind) {
    const int64_t rows = p.rows(kTokens), dim = width_of(x);
    if (kind < kPlainGate || kind > kReluGate)
        refuse("multiply: activation " + std::to_string(kind) +
               ": choose 0 (none), 1 (silu), 2 (sigmoid), 3 (relu)");
    p.program.multiply(Gate(kind), data_of(x, "multiply: x", rows, dim),
                       data_of(gate, "multiply: gate", rows, dim), data_of(out, "multiply: out", rows, dim),
                       dim);
}

void bind_activate(BoundProgram& p, const Floats& x, const Floats& out, int kind) {
    const int64_t rows = p.rows(kTokens), dim = width_of(x);
    if (kind != kSigmoidGate && kind != kTanhGate)
        refuse("activate: activation " + std::to_string(kind) + ": choose 2 (sigmoid), 4 (tanh)");
    p.program.multiply(Gate(kind), nullptr, data_of(x, "activate: x", rows, dim),
                       data_of(out, "activate: out", rows, dim), dim);
}

void bind_token_shift(BoundProgram& p, const Floats& x, const Array<const float>& mixes, const Floats& state,
                      const std::vector<Floats>& outs) {
    const States states = states_of(state, "token_shift", 2);
    const int64_t rows = p.rows(kTokens), channels = axis(state, 1), count = int64_t(outs.size());
    if (count < 1 || count > kMostMixes)
        refuse("token_shift: " + std::to_string(count) + " outs; 1 to " + std::to_string(kMostMixes) +
               " are allowed");
    if (mixes.ndim() != 2 || axis(mixes, 0) != count || axis(mixes, 1) != channels)
        refuse("token_shift: mixes [outs, C] and state [slots, C] do not fit");
    TokenShift shift{};
    shift.x = data_of(x, "token_shift: x", rows, channels);
    shift.mixes = mixes.data();
    shift.channels = channels;
    shift.count = int(count);
    for (int64_t i = 0; i < count; ++i) {
        shift.outs[i] = data_of(outs[size_t(i)], "token_shift: out", rows, channels);
        if (shift.outs[i] == shift.x) refuse("token_shift: an out is x; it must be another buffer");
    }
    p.program.token_shift(shift, states);
}

void bind_wkv7(BoundProgram& p, const Floats& r, const Floats& k, const Floats& v, const Floats& decay,
               const Floats& rate, const Maybe<const float>& first, const Maybe<const float>& share,
               const Array<const float>& vectors, const Floats& state, const Floats& out, float eps) {
    const States states = states_of(state, "wkv7", 4);
    const int64_t rows = p.rows(kTokens), heads = axis(state, 1), dim = axis(state, 2), row = heads * dim;
    if (axis(state, 3) != dim) refuse("wkv7: a state [slots, H, d, d] is needed");
    if (bool(first) != bool(share)) refuse("wkv7: first and share are needed together, or neither");
    Wkv w{};
    w.heads = heads;
    w.dim = dim;
    w.eps = eps;
    check_scratch(w.scratch() * 4, "wkv7: states of " + std::to_string(dim) + " x " + std::to_string(dim));
    w.r = data_of(r, "wkv7: r", rows, row);
    w.k = data_of(k, "wkv7: k", rows, row);
    w.v = data_of(v, "wkv7: v", rows, row);
    w.decay = data_of(decay, "wkv7: decay", rows, row);
    w.rate = data_of(rate, "wkv7: rate", rows, row);
    w.first = first ? data_of(*first, "wkv7: first", rows, row) : nullptr;
    w.share = share ? data_of(*share, "wkv7: share", rows, row) : nullptr;
    if (axis(vectors, 0) != 5) refuse("wkv7: vectors [5, H * d] are needed");
    w.vectors = data_of(vectors, "wkv7: vectors", 5, row);
    w.out = data_of(out, "wkv7: out", rows, row);
    p.program.wkv7(w, states);
}

}  // namespace

void bind_states(nb::class_<BoundProgram>& program) {
    program
        .def("short_conv", &bind_short_conv, "x"_exact, "weight"_exact, "bias"_maybe, "state"_exact,
             "out"_exact, "silu"_a)
        .def("gated_delta", &bind_gated_delta, "mixed"_exact, "decay"_exact, "beta"_exact, "state"_exact,
             "out"_exact, "keys"_a, "key_dim"_a, "tiled"_a, "eps"_a)
        .def("decay", &bind_decay, "x"_exact, "bias"_exact, "factor"_exact, "out"_exact)
        .def("ssm_scan", &bind_ssm_scan, "mixed"_exact, "dt"_exact, "dt_bias"_exact, "a"_exact, "d"_exact,
             "state"_exact, "out"_exact, "groups"_a)
        .def("multiply", &bind_multiply, "x"_exact, "gate"_exact, "out"_exact, "activation"_a)
        .def("activate", &bind_activate, "x"_exact, "out"_exact, "activation"_a)
        .def("token_shift", &bind_token_shift, "x"_exact, "mixes"_exact, "state"_exact, "outs"_exact)
        .def("wkv7", &bind_wkv7, "r"_exact, "k"_exact, "v"_exact, "decay"_exact, "rate"_exact, "first"_maybe,
             "share"_maybe, "vectors"_exact, "state"_exact, "out"_exact, "eps"_a);
}

}  // namespace hc
