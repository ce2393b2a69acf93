#include "program/batch.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace hc {

namespace {

[[noreturn]] void refuse(const std::string& problem) { throw std::invalid_argument("batch: " + problem); }

void check_range(const char* name, int64_t seen, int64_t limit, int64_t least = 0) {
    if (seen < least || seen > limit)
        refuse(std::string(name) + " " + std::to_string(seen) +
               " is out of range; allowed: " + std::to_string(least) + " to " + std::to_string(limit));
}

// Checks the rows of one sequence.
void check_rows(const Batch& b, int32_t sequence) {
    const int64_t first = b.first_rows[sequence], end = first + b.row_counts[sequence], all = b.counts[0];
    const std::string name = "sequence " + std::to_string(sequence);
    if (first < 0 || end < first || end > all)
        refuse("rows " + std::to_string(first) + " to " + std::to_string(end) + " of " + name +
               " are out of range; allowed: 0 to " + std::to_string(all));
    for (int64_t t = first; t < end; ++t)
        if (b.sequence[t] != sequence)
            refuse("rows from " + std::to_string(first) + " on are not all of " + name);
    if (first < b.counts[1] && b.counts[1] < end)
        refuse(name + " has decode rows and prompt rows in one step");
}

}  // namespace

void check_batch(const Batch& b, const BatchBounds& bounds) {
    check_range("n_tokens", b.counts[0], bounds.tokens);
    check_range("n_decode", b.counts[1], std::min<int64_t>(b.counts[0], bounds.max_decode()));
    check_range("n_logits", b.counts[2], bounds.logits);
    for (int r = 0; r < b.counts[2]; ++r) check_range("logits row", b.logits_rows[r], b.counts[0] - 1);
    for (int t = 0; t < b.counts[0]; ++t) {
        check_range("token", b.tokens[t], bounds.vocab - 1);
        check_range("position", b.positions[t],
                    std::min<int64_t>(bounds.positions, b.pages_per_sequence * kPage) - 1);
        check_range("sequence", b.sequence[t], bounds.sequences - 1);
        check_range("slot", b.slots[t], bounds.pages * kPage - 1);
        if (t && b.sequence[t] == b.sequence[t - 1] && b.positions[t] / kPage <= b.positions[t - 1] / kPage)
            continue;
        for (int p = 0; p <= b.positions[t] / kPage; ++p)
            check_range("page", b.pages[b.sequence[t] * b.pages_per_sequence + p], bounds.pages - 1);
    }
}

void check_states(const Batch& b, const BatchBounds& bounds, std::vector<int32_t>& sequences) {
    sequences.clear();
    int64_t missing = b.counts[0];
    if (!missing) return;
    std::vector<std::pair<int32_t, int32_t>> written;  // slots, and the sequences that write them
    for (int32_t s = 0; s < bounds.sequences; ++s) {
        if (!b.row_counts[s]) continue;
        check_rows(b, s);
        check_range("state_from", b.state_from[s], bounds.states - 1, -1);
        missing -= b.row_counts[s];
        sequences.push_back(s);
        const int32_t end = b.first_rows[s] + b.row_counts[s];
        for (int32_t t = b.first_rows[s]; t < end; ++t) {
            check_range("state_to", b.state_to[t], bounds.states - 1, -1);
            if (b.state_to[t] < 0) continue;
            if (t >= b.counts[1] && t + 1 < end)
                refuse("row " + std::to_string(t) +
                       " of a prompt keeps a state, which only its last one may");
            written.push_back({b.state_to[t], s});
        }
    }
    if (missing) refuse(std::to_string(missing) + " rows belong to no sequence that has rows");
    std::sort(written.begin(), written.end());
    for (size_t i = 1; i < written.size(); ++i)
        if (written[i].first == written[i - 1].first)
            refuse("two rows write the state in slot " + std::to_string(written[i].first));
    for (const int32_t s : sequences) {
        const std::pair<int32_t, int32_t> read{b.state_from[s], 0};
        const auto at = std::lower_bound(written.begin(), written.end(), read);
        if (at != written.end() && at->first == read.first && at->second != s)
            refuse("slot " + std::to_string(read.first) + " is read by one sequence and written by another");
    }
}

}  // namespace hc
