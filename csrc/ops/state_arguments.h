// The arguments of ops that keep a state for each sequence, and of other ops of such layers.
#pragma once
#include "simd/types.h"

namespace hc {

constexpr int kMostTaps = 8;             // columns that a short convolution sees
constexpr int64_t kConvChannels = 128;   // of one piece
constexpr int64_t kGateValues = 2048;    // of one piece of a row
constexpr int kMostMixes = 8;            // of a token shift
constexpr int64_t kShiftChannels = 512;  // of one piece
constexpr int kWkvVectors = 6;           // decays, keys and similar vectors of a token
constexpr int kDeltaTokens = 16;         // tokens whose keys and queries are prepared at a time
constexpr int kScanTokens = 64;          // tokens whose steps are prepared at a time
constexpr int kDeltaVectors = 4;         // keys, queries and factors of a token
constexpr int64_t kStateRow = 16;        // floats; rows of scratch are whole multiples

HC_SMALL int64_t state_row(int64_t n) { return (n + kStateRow - 1) / kStateRow * kStateRow; }

// One sequence's rows of a step, and its state before and after them.
struct StateRows {
    int64_t first, count;
    const float* from;  // null: zeros
    float* to;          // null: the state is not kept; may be `from`
};

struct ShortConv {
    const float *x, *weight, *bias;  // [T, channels], [channels, taps], [channels] or null
    float* out;
    int64_t channels, taps;
    bool silu;
};

struct GatedDelta {
    const float *mixed, *decay, *beta;  // [T, width()], [T, heads] or [T, heads, key_dim], [T, heads]
    float* out;                         // [T, heads, value_dim]
    int64_t keys, heads, key_dim, value_dim;
    bool per_channel, tiled;
    float eps;
    HC_SMALL int64_t width() const { return 2 * keys * key_dim + heads * value_dim; }
    HC_SMALL int64_t key_head(int64_t head) const { return tiled ? head % keys : head / (heads / keys); }
    HC_SMALL int64_t state() const { return key_dim * value_dim; }  // of a head
    // Floats of a thread's scratch: prepared tokens, and a state that is not kept.
    HC_SMALL int64_t scratch() const {
        return kDeltaTokens * (kDeltaVectors * state_row(key_dim) + kStateRow) + state_row(state());
    }
};

struct SsmScan {
    const float *mixed, *dt, *dt_bias, *a, *d;  // [T, mixed_width()], [T, heads], then [heads]
    float* out;                                 // [T, heads, width]
    int64_t heads, width, size, groups;
    HC_SMALL int64_t mixed_width() const { return heads * width + 2 * groups * size; }
    HC_SMALL int64_t state() const { return width * size; }  // of a head
    HC_SMALL int64_t scratch() const { return 2 * kScanTokens + state_row(state()); }
};

struct Decay {
    const float *bias, *factor;  // [channels], [heads]
    int64_t channels, heads;
};

struct TokenShift {
    const float *x, *mixes;   // [T, channels], [count, channels]
    float* outs[kMostMixes];  // [T, channels] each
    int64_t channels;
    int count;
};

struct Wkv {
    const float *r, *k, *v, *decay, *rate;  // [T, heads, dim]
    const float *first, *share;             // the same shape, or null
    const float* vectors;                   // [5, heads, dim]
    float* out;                             // [T, heads, dim]
    int64_t heads, dim;
    float eps;
    HC_SMALL int64_t state() const { return dim * dim; }  // of a head
    HC_SMALL int64_t scratch() const {
        return kDeltaTokens * (kWkvVectors * state_row(dim) + kStateRow) + state_row(state());
    }
};

enum Gate : int { kPlainGate = 0, kSiluGate = 1, kSigmoidGate = 2, kReluGate = 3, kTanhGate = 4 };

}  // namespace hc
