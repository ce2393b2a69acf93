#include "disk/shelf.h"

#include <algorithm>

namespace hc {

void ShelfPart::add_reads(int64_t at, int64_t expert, int64_t first, int64_t end,
                          const std::shared_ptr<Arrival>& arrival, std::vector<DiskRead>& reads) const {
    Target to = place;
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
    // Not all rows of a neuron: a read for each. In memory they lie without what is left out.
    for (; first < end; ++first) {
        Target one = to;
        one.rows.base += (each - pitch) * first * to.rows.stride;
        reads.push_back({one, from, first * pitch, first * pitch + each, arrival});
    }
}

Shelf::Shelf(std::shared_ptr<Disk> disk, std::string name, int64_t experts, int64_t places)
    : Waves(experts),
      disk_(std::move(disk)),
      name_(std::move(name)),
      places_(size_t(places)),
      place_of_(size_t(experts), -1) {
    if (places < 2 || places > experts)
        throw std::invalid_argument(std::to_string(places) + " places for " + std::to_string(experts) +
                                    " experts; allowed: 2 to as many as experts");
}

Shelf::~Shelf() {
    if (disk_->forked()) return;
    settle({});
}

int64_t Shelf::waves_of() const { return std::min(kWave, (places() - kept_) / 2); }

// The first wave, and as many as all experts make: each takes waves_of() until none is left.
int64_t Shelf::most_waves() const { return 1 + (experts() + waves_of() - 1) / waves_of(); }

void Shelf::empty(Place& place) {
    if (place.expert >= 0) place_of_[size_t(place.expert)] = -1;
    kept_ -= place.kept;
    place = {};
}

void Shelf::fill(const std::vector<int32_t>& experts, int64_t kept, const Disk::GiveUp& give_up) {
    if (kept < 0 || kept > places() - 2 || kept > int64_t(experts.size()) || experts.size() > places_.size())
        throw std::invalid_argument("two places at least must be free for experts that are not kept");
    for (size_t i = 0; i < experts.size(); ++i) {
        if (experts[i] < 0 || experts[i] >= this->experts() || place_of_[size_t(experts[i])] >= 0)
            throw std::invalid_argument("experts that are read at loading must be there, once each");
        read_into(int64_t(i), experts[i]);
        Place& place = places_[i];
        place.named = -1 - int64_t(i);  // whoever is wanted least makes room first
        place.needed = false;
        place.kept = int64_t(i) < kept;
        kept_ += place.kept;
    }
    for (size_t i = 0; i < experts.size(); ++i) {
        if (!disk_->wait(*places_[i].arrival, give_up)) return;
        if (const int error = disk_->error_of(*places_[i].arrival)) {
            empty(places_[i]);
            raise(experts[i], error);
        }
        places_[i].arrival.reset();
    }
}

// Ends what a step left that did not end: reads that nobody began are dropped, others are waited for. False
// where that was given up.
bool Shelf::settle(const Disk::GiveUp& give_up) {
    for (Place& place : places_)
        if (place.arrival) disk_->drop(*place.arrival);
    for (Place& place : places_) {
        if (!place.arrival) continue;
        if (!disk_->wait(*place.arrival, give_up)) return false;
        if (disk_->error_of(*place.arrival))
            empty(place);
        else
            place.arrival.reset();
    }
    coming_.clear();
    return true;
}

void Shelf::begin(const std::vector<int32_t>& experts, const uint64_t*, const Disk::GiveUp& give_up) {
    absent_.clear();
    asked_ = 0;
    wave_ = 0;
    std::fill(wave_of_.begin(), wave_of_.end(), -1);
    if (!settle(give_up)) return;
    ++step_;
    for (Place& place : places_) place.needed = false;
    for (const int32_t expert : experts) {
        const int64_t at = place_of_[size_t(expert)];
        if (at < 0) {
            absent_.push_back(expert);
            continue;
        }
        Place& place = places_[size_t(at)];
        place.named = step_;
        place.needed = true;
        wave_of_[size_t(expert)] = 0;
    }
    counts_.misses += int64_t(absent_.size());
    counts_.hits += int64_t(experts.size() - absent_.size());
    ask();
}

// The place for the next absent expert; -1 where every one is needed.
int64_t Shelf::victim() const {
    int64_t found = -1;
    for (int64_t i = 0; i < places(); ++i) {
        const Place& place = places_[size_t(i)];
        if (place.needed || place.kept) continue;
        if (place.expert < 0) return i;
        if (found < 0) {
            found = i;
            continue;
        }
        const Place& best = places_[size_t(found)];
        if (place.named < best.named || (place.named == best.named && place.expert < best.expert)) found = i;
    }
    return found;
}

void Shelf::ask() {
    for (; asked_ < absent_.size(); ++asked_) {
        const int64_t at = victim();
        if (at < 0) return;
        read_into(at, absent_[asked_]);
        coming_.push_back(at);
    }
}

void Shelf::read_into(int64_t at, int64_t expert) {
    Place& place = places_[size_t(at)];
    empty(place);
    place = {expert, step_, true, std::make_shared<Arrival>(), false};
    place_of_[size_t(expert)] = at;
    std::vector<DiskRead> reads;
    for (const ShelfPart& part : parts_)
        part.add_reads(at, expert, 0, part.rows / part.pitch, place.arrival, reads);
    disk_->read(std::move(reads));
}

void Shelf::turn() {
    for (Place& place : places_)
        if (place.needed && place.expert >= 0 && in_wave(place.expert)) place.needed = false;
    ++wave_;
    ask();  // into places that the last wave has left
}

bool Shelf::await(const Disk::GiveUp& give_up) {
    bool waited = false;
    for (int64_t i = 0; i < waves_of() && !coming_.empty(); ++i) {
        const int64_t at = coming_.front();
        Place& place = places_[size_t(at)];
        if (!disk_->arrived(*place.arrival)) {
            waited = true;
            if (!disk_->wait(*place.arrival, give_up)) break;
        }
        const int64_t expert = place.expert;
        coming_.pop_front();
        if (const int error = disk_->error_of(*place.arrival)) {
            empty(place);
            raise(expert, error);
        }
        place.arrival.reset();
        wave_of_[size_t(expert)] = wave_;
    }
    return waited;
}

void Shelf::raise(int64_t expert, int error) const {
    throw DiskError(name_ + ": expert " + std::to_string(expert) + " cannot be read: " + why_not_read(error));
}

}  // namespace hc
