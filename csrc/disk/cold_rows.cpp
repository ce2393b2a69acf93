#include "disk/cold_rows.h"

#include <algorithm>
#include <bitset>
#include <chrono>

namespace hc {

// Bytes of rows that nobody needs and that are read along, where that saves a read.
static constexpr int64_t kGap = 8 << 10;

ColdRows::ColdRows(std::shared_ptr<Disk> disk, std::string name, int64_t neurons, std::vector<int64_t> hot,
                   int64_t room)
    : disk_(std::move(disk)),
      name_(std::move(name)),
      neurons_(neurons),
      words_((neurons + 63) / 64),
      room_(room),
      hot_(std::move(hot)),
      state_(hot_.size()),
      wave_of_(hot_.size(), -1) {
    for (const int64_t n : hot_)
        if (n < 0 || n > neurons) throw std::invalid_argument("no expert has so many hot neurons");
}

ColdRows::~ColdRows() {
    if (!disk_->forked()) settle({});
}

void ColdRows::fill(const Disk::GiveUp& give_up) {
    for (int64_t e = 0; e < experts(); ++e) {
        if (!hot_[size_t(e)]) continue;
        state_[size_t(e)].runs = {{0, hot_[size_t(e)]}};
        ask(e);
        state_[size_t(e)].runs.clear();  // they stay
    }
    for (int64_t e = 0; e < experts(); ++e) take(e, give_up);
}

// Neurons of an expert that are read: those that are wanted and not hot, and gaps. Returns how many.
int64_t ColdRows::find_runs(int64_t expert, const uint64_t* wanted) {
    std::vector<Run>& runs = state_[size_t(expert)].runs;
    runs.clear();
    const int64_t hot = hot_[size_t(expert)];
    int64_t named = 0, cold = 0, read = 0;
    const int64_t gap = kGap / std::max<int64_t>(1, parts_.front().row_bytes);
    for (int64_t word = 0; word < words_; ++word) {
        uint64_t bits = wanted[word];
        if (const int64_t left = neurons_ - word * 64; left < 64) bits &= (uint64_t(1) << left) - 1;
        named += int64_t(std::bitset<64>(bits).count());
        for (int64_t i = word * 64; bits; ++i, bits >>= 1) {
            if (!(bits & 1) || i < hot) continue;
            ++cold;
            if (!runs.empty() && i - runs.back().end <= gap)
                runs.back().end = i + 1;
            else
                runs.push_back({i, i + 1});
        }
    }
    for (const Run& run : runs) read += run.end - run.first;
    counts_.hits += named - cold;
    counts_.misses += cold;
    return read;
}

void ColdRows::ask(int64_t expert) {
    Expert& own = state_[size_t(expert)];
    own.arrival = std::make_shared<Arrival>();
    std::vector<DiskRead> reads;
    for (const Run& run : own.runs)
        for (const ShelfPart& part : parts_)
            part.add_reads(expert, expert, run.first, run.end, own.arrival, reads);
    disk_->read(std::move(reads));
}

void ColdRows::ask_wave() {
    for (const int32_t expert : named_)
        if (in_wave(expert)) ask(expert);
}

void ColdRows::give_back(int64_t expert) {
    Expert& own = state_[size_t(expert)];
    if (own.runs.empty()) return;
    // All that is cold: a page that two runs' ends share would stay if each run's whole pages were given
    // back.
    const int64_t stride = parts_.front().place.rows.stride, first = expert * neurons_;
    parts_.front().memory->give_back(size_t((first + hot_[size_t(expert)]) * stride),
                                     size_t((first + neurons_) * stride));
    own.runs.clear();
}

// Ends what a step left that did not end: reads that nobody began are dropped, others are waited for. False
// where that was given up.
bool ColdRows::settle(const Disk::GiveUp& give_up) {
    for (Expert& own : state_)
        if (own.arrival) disk_->drop(*own.arrival);
    for (int64_t e = 0; e < experts(); ++e) {
        Expert& own = state_[size_t(e)];
        if (own.arrival && !disk_->wait(*own.arrival, give_up)) return false;
        own.arrival.reset();
        give_back(e);
    }
    return true;
}

void ColdRows::begin(const std::vector<int32_t>& experts, const uint64_t* wanted,
                     const Disk::GiveUp& give_up) {
    std::fill(wave_of_.begin(), wave_of_.end(), -1);
    wave_ = last_ = 0;
    named_.clear();
    if (!settle(give_up)) return;
    named_ = experts;
    int64_t rows = 0;
    for (const int32_t expert : named_) {
        const int64_t more = find_runs(expert, wanted + expert * words_);
        if (more && (!last_ || rows + more > room_)) {
            ++last_;
            rows = 0;
        }
        rows += more;
        wave_of_[size_t(expert)] = more ? last_ : 0;
    }
    if (!last_) return;
    wave_ = 1;
    ask_wave();
    wave_ = 0;  // while these are read
}

void ColdRows::take(int64_t expert, const Disk::GiveUp& give_up) {
    std::shared_ptr<Arrival>& arrival = state_[size_t(expert)].arrival;
    if (!arrival || !disk_->wait(*arrival, give_up)) return;
    if (const int error = disk_->error_of(*arrival))
        throw DiskError(name_ + ": neurons of expert " + std::to_string(expert) +
                        " cannot be read: " + why_not_read(error));
    arrival.reset();
}

void ColdRows::next(const Disk::GiveUp& give_up) {
    if (wave_) {
        end();
        ++wave_;
        ask_wave();
    } else {
        wave_ = 1;  // what begin() asked for
    }
    const auto start = std::chrono::steady_clock::now();
    bool waited = false;
    for (const int32_t expert : named_) {
        if (!in_wave(expert)) continue;
        waited = waited || !disk_->arrived(*state_[size_t(expert)].arrival);
        take(expert, give_up);
    }
    if (!waited) return;
    ++counts_.stalls;
    counts_.stall_ns +=
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start)
            .count();
}

void ColdRows::end() {
    for (const int32_t expert : named_)
        if (in_wave(expert)) give_back(expert);
}

}  // namespace hc
