#include "program/routing.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace hc {

Experts::Experts(std::vector<int64_t> neuron_ends, int64_t choices)
    : ends(std::move(neuron_ends)), chosen(choices) {
    words.push_back(0);
    for (int64_t e = 0; e < count(); ++e) words.push_back(words.back() + (neurons(e) + 63) / 64);
}

int64_t Experts::most_neurons() const {
    int64_t most = 0;
    for (int64_t e = 0; e < count(); ++e) most = std::max(most, neurons(e));
    return most;
}

Routing::Routing(const Experts& experts, int64_t most)
    : experts_(experts),
      tokens_(size_t(most * experts.chosen)),
      pair_of_(tokens_.size()),
      part_of_(tokens_.size()),
      begins_(experts.ends.size() + 1) {
    parts_.reserve(std::min(tokens_.size(), experts.ends.size()));
}

void Routing::check(int t0, int t1) const {
    const int64_t k = experts_.chosen;
    const auto refuse = [&](int64_t i, const std::string& why) {
        throw std::invalid_argument("expert " + std::to_string(experts_.ids[i]) + " of row " +
                                    std::to_string(i / k) + why);
    };
    for (int64_t i = t0 * k; i < t1 * k; ++i) {
        if (experts_.ids[i] < 0 || experts_.ids[i] >= experts_.count())
            refuse(i, " is out of range; allowed: 0 to " + std::to_string(experts_.count() - 1));
        if (i % k && experts_.ids[i] <= experts_.ids[i - 1])
            refuse(i, " follows " + std::to_string(experts_.ids[i - 1]) + ": a row's experts must ascend");
    }
}

void Routing::sort(int t0, int t1) {
    check(t0, t1);
    const int64_t k = experts_.chosen;
    t0_ = t0;
    pairs_ = int((t1 - t0) * k);
    std::fill(begins_.begin(), begins_.end(), 0);
    for (int64_t i = t0 * k; i < t1 * k; ++i) ++begins_[size_t(experts_.ids[i]) + 1];
    for (size_t e = 1; e < begins_.size(); ++e) begins_[e] += begins_[e - 1];
    parts_.clear();
    for (int64_t e = 0; e < experts_.count(); ++e) {
        const int begin = begins_[size_t(e)], end = begins_[size_t(e) + 1];
        std::fill(part_of_.begin() + begin, part_of_.begin() + end, int32_t(parts_.size()));
        if (begin < end) parts_.push_back({e, begin, end, 0, true});
    }
    for (int64_t i = t0 * k; i < t1 * k; ++i) {
        const int32_t pair = begins_[size_t(experts_.ids[i])]++;
        tokens_[size_t(pair)] = int32_t(i / k);
        pair_of_[size_t(i - t0 * k)] = pair;
    }
    scattered_ = false;
    for (Part& part : parts_) {
        part.token = tokens_[size_t(part.begin)];
        part.neighbours = tokens_[size_t(part.end) - 1] == part.token + part.rows() - 1;
        scattered_ |= !part.neighbours;
    }
}

size_t Cut::part(int64_t& piece) const {
    const auto after = std::upper_bound(begins_.begin(), begins_.end(), piece);
    piece -= after[-1];
    return size_t(after - begins_.begin()) - 1;
}

}  // namespace hc
