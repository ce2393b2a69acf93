#include "disk/shelf.h"

#include <algorithm>

namespace hc {

namespace {

constexpr int64_t kTryEvery = 8;  // steps, where guesses do not pay: a router is computed once more each time

}  // namespace

void GuessRecord::add(int64_t guesses, int64_t right) {
    guesses_ += guesses;
    right_ += right;
    while (guesses_ >= kMany) {
        guesses_ /= 2;
        right_ /= 2;
    }
}

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
    for (Place& place : places_)
        if (place.guessed) call_off(place);
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
        if (place.arrival && !place.guessed) disk_->drop(*place.arrival);
    for (Place& place : places_) {
        if (!place.arrival || place.guessed) continue;
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
    judge_guesses(experts);
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
        if (place.guessed) {
            disk_->promote(*place.arrival);
            coming_.push_back(at);
        } else {
            wave_of_[size_t(expert)] = 0;
        }
    }
    const size_t read = absent_.size() + coming_.size();
    counts_.misses += int64_t(read);
    counts_.hits += int64_t(experts.size() - read);
    ask();
}

bool Shelf::wants_guess() {
    if (guessing_ == Guessing::kOff) return false;
    const bool tries = record_.few() || ++unguessed_ >= kTryEvery;
    if (guessing_ == Guessing::kAuto && !tries && !record_.pays()) return false;
    unguessed_ = 0;
    return true;
}

void Shelf::guess(const std::vector<int32_t>& experts) {
    guesses_.clear();
    for (Place& place : places_)  // of a step that did not come to this layer
        if (place.guessed) call_off(place);
    if (unfinished()) return;
    const bool reads = guessing_ == Guessing::kOn || record_.pays();
    likely_.assign(size_t(this->experts()), false);
    for (const int32_t expert : experts) likely_[size_t(expert)] = true;
    for (const int32_t expert : experts) {
        if (place_of_[size_t(expert)] >= 0) continue;
        if (reads) {
            const int64_t at = victim(true);
            if (at < 0) break;
            read_into(at, expert, true);
            ++counts_.guessed;
        }
        guesses_.push_back(expert);
    }
}

// Once the experts that a step names are known, ascending: counts those that were guessed, and drops the
// others.
void Shelf::judge_guesses(const std::vector<int32_t>& named) {
    const auto is_named = [&](int64_t expert) {
        return std::binary_search(named.begin(), named.end(), int32_t(expert));
    };
    record_.add(int64_t(guesses_.size()), std::count_if(guesses_.begin(), guesses_.end(), is_named));
    guesses_.clear();
    for (Place& place : places_) {
        if (!place.guessed) continue;
        if (is_named(place.expert))
            ++counts_.right;
        else
            call_off(place);
    }
}

// Empties the place of a wrong guess.
void Shelf::call_off(Place& place) {
    counts_.vain_bytes += expert_bytes() - disk_->call_off(*place.arrival);
    empty(place);
}

int64_t Shelf::expert_bytes() const {
    int64_t bytes = 0;
    for (const ShelfPart& part : parts_) bytes += part.rows / part.pitch * part.each * part.row_bytes;
    return bytes;
}

// The place for the next absent expert, or for one that is guessed; -1 where every one is needed.
int64_t Shelf::victim(bool for_guess) const {
    int64_t found = -1;
    for (int64_t i = 0; i < places(); ++i) {
        const Place& place = places_[size_t(i)];
        if (place.needed || place.kept) continue;
        if (place.expert < 0) return i;
        if (for_guess && (place.guessed || place.named == step_ || likely_[size_t(place.expert)])) continue;
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

void Shelf::read_into(int64_t at, int64_t expert, bool guess) {
    Place& place = places_[size_t(at)];
    empty(place);
    place = {expert, step_, !guess, std::make_shared<Arrival>(guess), false, guess};
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
        if (place.guessed && disk_->error_of(*place.arrival)) {  // only now it matters: it is read again
            read_into(at, expert);
            waited = true;
            if (!disk_->wait(*place.arrival, give_up)) break;
        }
        coming_.pop_front();
        place.guessed = false;
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
