#include "disk/expert_cache.h"

#include <algorithm>

namespace hc {

void CachePart::add_reads(int64_t at, int64_t expert, int64_t first, int64_t end,
                          const std::shared_ptr<Arrival>& arrival, std::vector<DiskRead>& reads) const {
    Target to = slot;
    to.rows.base += at * stride;
    Source from;
    from.file = file;
    from.offset = offsets[size_t(expert)];
    from.rows = rows;
    from.row_bytes = row_bytes;
    if (each == pitch) {
        const int64_t step = Disk::rows_at_once(row_bytes, to.by_output);
        for (first *= each, end *= each; first < end; first += step)
            reads.push_back({to, from, first, std::min(first + step, end), arrival});
        return;
    }
    // Only some rows of each neuron: one read a neuron. Memory does not have the rows that are left out.
    for (; first < end; ++first) {
        Target row_target = to;
        row_target.rows.base += (each - pitch) * first * to.rows.stride;
        reads.push_back({row_target, from, first * pitch, first * pitch + each, arrival});
    }
}

ExpertCache::ExpertCache(std::shared_ptr<Disk> disk, std::string name, int64_t experts, int64_t slots)
    : LoadBatches(experts),
      disk_(std::move(disk)),
      name_(std::move(name)),
      slots_(size_t(slots)),
      slot_of_(size_t(experts), -1) {
    if (slots < 2 || slots > experts)
        throw std::invalid_argument(std::to_string(slots) + " places for " + std::to_string(experts) +
                                    " experts; allowed: 2 to as many as experts");
}

ExpertCache::~ExpertCache() {
    if (disk_->forked()) return;
    settle({});
}

int64_t ExpertCache::loads_in_batch() const { return std::min(kMostLoads, (slots() - pinned_) / 2); }

// The first batch, and as many as all experts fill: each takes waves_of() experts until none is left.
int64_t ExpertCache::most_load_batches() const {
    return 1 + (experts() + loads_in_batch() - 1) / loads_in_batch();
}

void ExpertCache::empty(Slot& slot) {
    if (slot.expert >= 0) slot_of_[size_t(slot.expert)] = -1;
    pinned_ -= slot.pinned;
    slot = {};
}

void ExpertCache::fill(const std::vector<int32_t>& experts, int64_t pinned, const Disk::GiveUp& give_up) {
    if (pinned < 0 || pinned > slots() - 2 || pinned > int64_t(experts.size()) ||
        experts.size() > slots_.size())
        throw std::invalid_argument("at least two slots must be free for experts that are not pinned");
    for (size_t i = 0; i < experts.size(); ++i) {
        if (experts[i] < 0 || experts[i] >= this->experts() || slot_of_[size_t(experts[i])] >= 0)
            throw std::invalid_argument("experts that are read at loading must be there, once each");
        read_into(int64_t(i), experts[i]);
        Slot& slot = slots_[i];
        slot.named = -1 - int64_t(i);  // the least wanted expert is evicted first
        slot.needed = false;
        slot.pinned = int64_t(i) < pinned;
        pinned_ += slot.pinned;
    }
    for (size_t i = 0; i < experts.size(); ++i) {
        if (!disk_->wait(*slots_[i].arrival, give_up)) return;
        if (const int error = disk_->error_of(*slots_[i].arrival)) {
            empty(slots_[i]);
            raise(experts[i], error);
        }
        slots_[i].arrival.reset();
    }
}

// Ends the reads that a step left: drops those not begun and waits for the others. Returns false if the wait
// was given up.
bool ExpertCache::settle(const Disk::GiveUp& give_up) {
    for (Slot& slot : slots_)
        if (slot.arrival) disk_->drop(*slot.arrival);
    for (Slot& slot : slots_) {
        if (!slot.arrival) continue;
        if (!disk_->wait(*slot.arrival, give_up)) return false;
        if (disk_->error_of(*slot.arrival))
            empty(slot);
        else
            slot.arrival.reset();
    }
    coming_.clear();
    return true;
}

void ExpertCache::begin(const std::vector<int32_t>& experts, const uint64_t*, const Disk::GiveUp& give_up) {
    absent_.clear();
    requested_ = 0;
    load_batch_ = 0;
    std::fill(load_batch_of_.begin(), load_batch_of_.end(), -1);
    if (!settle(give_up)) return;
    ++step_;
    for (Slot& slot : slots_) slot.needed = false;
    for (const int32_t expert : experts) {
        const int64_t at = slot_of_[size_t(expert)];
        if (at < 0) {
            absent_.push_back(expert);
            continue;
        }
        Slot& slot = slots_[size_t(at)];
        slot.named = step_;
        slot.needed = true;
        load_batch_of_[size_t(expert)] = 0;
    }
    counts_.misses += int64_t(absent_.size());
    counts_.hits += int64_t(experts.size() - absent_.size());
    request_absent();
}

// Returns the slot for the next absent expert; -1 if all slots are needed.
int64_t ExpertCache::victim() const {
    int64_t oldest = -1;
    for (int64_t i = 0; i < slots(); ++i) {
        const Slot& slot = slots_[size_t(i)];
        if (slot.needed || slot.pinned) continue;
        if (slot.expert < 0) return i;
        if (oldest < 0) {
            oldest = i;
            continue;
        }
        const Slot& best = slots_[size_t(oldest)];
        if (slot.named < best.named || (slot.named == best.named && slot.expert < best.expert)) oldest = i;
    }
    return oldest;
}

void ExpertCache::request_absent() {
    for (; requested_ < absent_.size(); ++requested_) {
        const int64_t at = victim();
        if (at < 0) return;
        read_into(at, absent_[requested_]);
        coming_.push_back(at);
    }
}

void ExpertCache::read_into(int64_t at, int64_t expert) {
    Slot& slot = slots_[size_t(at)];
    empty(slot);
    slot = {expert, step_, true, std::make_shared<Arrival>(), false};
    slot_of_[size_t(expert)] = at;
    std::vector<DiskRead> reads;
    for (const CachePart& part : parts_)
        part.add_reads(at, expert, 0, part.rows / part.pitch, slot.arrival, reads);
    disk_->read(std::move(reads));
}

void ExpertCache::turn() {
    for (Slot& slot : slots_)
        if (slot.needed && slot.expert >= 0 && in_load_batch(slot.expert)) slot.needed = false;
    ++load_batch_;
    request_absent();  // into slots that the last batch has released
}

bool ExpertCache::await(const Disk::GiveUp& give_up) {
    bool waited = false;
    for (int64_t i = 0; i < loads_in_batch() && !coming_.empty(); ++i) {
        const int64_t at = coming_.front();
        Slot& slot = slots_[size_t(at)];
        if (!disk_->arrived(*slot.arrival)) {
            waited = true;
            if (!disk_->wait(*slot.arrival, give_up)) break;
        }
        const int64_t expert = slot.expert;
        coming_.pop_front();
        if (const int error = disk_->error_of(*slot.arrival)) {
            empty(slot);
            raise(expert, error);
        }
        slot.arrival.reset();
        load_batch_of_[size_t(expert)] = load_batch_;
    }
    return waited;
}

void ExpertCache::raise(int64_t expert, int error) const {
    throw DiskError(name_ + ": expert " + std::to_string(expert) + " cannot be read: " + why_not_read(error));
}

}  // namespace hc
