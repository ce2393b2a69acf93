// Ops that keep a state for each sequence. Work is cut by sequence and by head or channel, never by token: a
// state is read and written once a step and stays in its core's cache.
#include <algorithm>

#include "program/program_parts.h"

namespace hc {

void Program::by_sequence(const States& states, int64_t parts,
                          std::function<void(const StateRows&, int64_t, const Scratch&)> run,
                          std::function<Span(int64_t, int64_t)> reads) {
    bounds_.keep_states(states.slots);
    const auto state = [states](int32_t slot) {
        return slot < 0 ? nullptr : states.base + slot * states.floats;
    };
    step([this, parts] { return int64_t(active_.size()) * parts; },
         [this, parts, state, run](int64_t piece, const Scratch& s) {
             const int32_t sequence = active_[size_t(piece / parts)];
             int64_t first = batch_.first_rows[sequence];
             const int64_t end = first + batch_.row_counts[sequence];
             const float* from = state(batch_.state_from[sequence]);
             // Run up to the next row whose state is kept, then continue from there.
             for (int64_t row = first; row < end; ++row) {
                 float* to = state(batch_.state_to[row]);
                 if (!to && row + 1 < end) continue;
                 run(StateRows{first, row + 1 - first, from, to}, piece % parts, s);
                 first = row + 1;
                 from = to;
             }
         },
         reads);
}

// The memory of the states of pieces [piece, end), if it is contiguous.
Span Program::stretch_of(const States& states, int64_t parts, int64_t piece, int64_t end) const {
    const int32_t slot = batch_.state_from[active_[size_t(piece / parts)]];
    if (slot < 0) return {};
    const int64_t part_floats = states.floats / parts, first = piece % parts;
    const int64_t count = std::min(end - piece, parts - first);
    const float* at = states.base + slot * states.floats + first * part_floats;
    return {reinterpret_cast<const uint8_t*>(at), count * part_floats * 4};
}

void Program::short_conv(const ShortConv& c, const States& states) {
    by_sequence(states, ceil_div(c.channels, kConvChannels),
                [this, c](const StateRows& rows, int64_t piece, const Scratch& s) {
                    const int64_t first = piece * kConvChannels;
                    const int64_t count = std::min(kConvChannels, c.channels - first);
                    k_.short_conv(c, rows, first, count, s.local);
                });
}

void Program::gated_delta(const GatedDelta& g, const States& states) {
    by_sequence(
        states, g.heads,
        [this, g](const StateRows& rows, int64_t head, const Scratch& s) {
            k_.gated_delta(g, rows, head, s.local);
        },
        [this, states, g](int64_t piece, int64_t end) { return stretch_of(states, g.heads, piece, end); });
}

void Program::ssm_scan(const SsmScan& scan, const States& states) {
    by_sequence(
        states, scan.heads,
        [this, scan](const StateRows& rows, int64_t head, const Scratch& s) {
            k_.ssm_scan(scan, rows, head, s.local);
        },
        [this, states, scan](int64_t piece, int64_t end) {
            return stretch_of(states, scan.heads, piece, end);
        });
}

void Program::decay(const Decay& d, const float* x, float* out) {
    step([this] { return count(kTokens); },
         [this, d, x, out](int64_t t, const Scratch&) {
             k_.decay(d, x + t * d.channels, out + t * d.channels);
         });
}

void Program::multiply(Gate kind, const float* x, const float* gate, float* out, int64_t dim) {
    const int64_t parts = ceil_div(dim, kGateValues);
    step([this, parts] { return count(kTokens) * parts; },
         [this, parts, kind, x, gate, out, dim](int64_t piece, const Scratch&) {
             const int64_t first = piece % parts * kGateValues, at = piece / parts * dim + first;
             const int64_t values = std::min(kGateValues, dim - first);
             k_.multiply(kind, x ? x + at : nullptr, gate + at, out + at, values);
         });
}

void Program::token_shift(const TokenShift& shift, const States& states) {
    by_sequence(states, ceil_div(shift.channels, kShiftChannels),
                [this, shift](const StateRows& rows, int64_t piece, const Scratch& s) {
                    const int64_t first = piece * kShiftChannels;
                    const int64_t count = std::min(kShiftChannels, shift.channels - first);
                    k_.token_shift(shift, rows, first, count, s.local);
                });
}

void Program::wkv7(const Wkv& w, const States& states) {
    by_sequence(
        states, w.heads,
        [this, w](const StateRows& rows, int64_t head, const Scratch& s) { k_.wkv7(w, rows, head, s.local); },
        [this, states, w](int64_t piece, int64_t end) { return stretch_of(states, w.heads, piece, end); });
}

}  // namespace hc
