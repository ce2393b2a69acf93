#include "program/batch.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace hc {

namespace {

void check_range(const char* what, int64_t seen, int64_t limit) {
    if (seen < 0 || seen > limit)
        throw std::invalid_argument(std::string("batch: ") + what + " " + std::to_string(seen) +
                                    " is out of range; allowed: 0 to " + std::to_string(limit));
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

}  // namespace hc
