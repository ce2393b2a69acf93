#include "disk/cold_rows.h"

#include <algorithm>
#include <bitset>

namespace hc {

// Maximum bytes of unneeded rows that are read with others to save a read.
static constexpr int64_t kGap = 8 << 10;

ColdRows::ColdRows(std::shared_ptr<Disk> disk, std::string name, int64_t neurons, std::vector<int64_t> hot,
                   int64_t neurons_at_once, bool gates)
    : LoadBatches(int64_t(hot.size())),
      disk_(std::move(disk)),
      name_(std::move(name)),
      neurons_(neurons),
      words_((neurons + 63) / 64),
      neurons_at_once_(neurons_at_once),
      hot_(std::move(hot)),
      gates_(gates),
      state_(hot_.size()) {
    for (const int64_t n : hot_)
        if (n < 0 || n > neurons)
            throw std::invalid_argument("an expert cannot have more hot neurons than neurons");
}

ColdRows::~ColdRows() {
    if (!disk_->forked()) settle({});
}

void ColdRows::fill(const Disk::GiveUp& give_up) {
    for (int64_t e = 0; e < experts(); ++e) {
        if (!hot_[size_t(e)]) continue;
        state_[size_t(e)].runs = {{0, hot_[size_t(e)]}};
        request(e);
        state_[size_t(e)].runs.clear();  // the hot rows stay
    }
    for (int64_t e = 0; e < experts(); ++e) take(e, give_up);
}

// Finds the runs of neurons to read: wanted ones that are not hot, and gaps.
void ColdRows::find_runs(int64_t expert, const uint64_t* wanted) {
    std::vector<Run>& runs = state_[size_t(expert)].runs;
    runs.clear();
    const int64_t hot = hot_[size_t(expert)];
    int64_t named = 0, cold = 0;
    const int64_t gap = kGap / (parts_.front().row_bytes * parts_.front().pitch);
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
    state_[size_t(expert)].rows = 0;
    for (const Run& run : runs) state_[size_t(expert)].rows += run.end - run.first;
    counts_.hits += named - cold;
    counts_.misses += cold;
}

// Bytes of memory that the rows of `neurons` neurons take.
int64_t ColdRows::bytes_of(int64_t neurons) const {
    return neurons * parts_.front().slot.rows.stride * parts_.front().each;
}

void ColdRows::request(int64_t expert) {
    Expert& state = state_[size_t(expert)];
    state.arrival = std::make_shared<Arrival>();
    std::vector<DiskRead> reads;
    for (const Run& run : state.runs)
        for (const CachePart& part : parts_)
            part.add_reads(expert, expert, run.first, run.end, state.arrival, reads);
    disk_->read(std::move(reads));
}

void ColdRows::request_next() {
    for (; requested_ < coming_.size(); ++requested_) {
        const int64_t rows = state_[size_t(coming_[requested_])].rows;
        if (rows_taken_ && rows_taken_ + rows > neurons_at_once_) return;
        rows_taken_ += rows;
        request(coming_[requested_]);
    }
}

void ColdRows::give_back(int64_t expert) {
    Expert& state = state_[size_t(expert)];
    if (state.runs.empty()) return;
    // Give back all cold rows at once: two runs may share a page at their ends, and returning each run's
    // whole pages would keep it.
    const int64_t first = expert * neurons_;
    parts_.front().memory->give_back(size_t(bytes_of(first + hot_[size_t(expert)])),
                                     size_t(bytes_of(first + neurons_)));
    state.runs.clear();
    rows_taken_ -= state.rows;
}

// Ends the reads that a step left: drops those not begun and waits for the others. Returns false if the wait
// was given up.
bool ColdRows::settle(const Disk::GiveUp& give_up) {
    for (Expert& state : state_)
        if (state.arrival) disk_->drop(*state.arrival);
    for (int64_t e = 0; e < experts(); ++e) {
        Expert& state = state_[size_t(e)];
        if (state.arrival && !disk_->wait(*state.arrival, give_up)) return false;
        state.arrival.reset();
        give_back(e);
    }
    return true;
}

void ColdRows::begin(const std::vector<int32_t>& experts, const uint64_t* wanted,
                     const Disk::GiveUp& give_up) {
    std::fill(load_batch_of_.begin(), load_batch_of_.end(), -1);
    load_batch_ = 0;
    coming_.clear();
    if (!settle(give_up)) return;
    for (const int32_t expert : experts) {
        find_runs(expert, wanted + expert * words_);
        if (state_[size_t(expert)].rows) coming_.push_back(expert);
        load_batch_of_[size_t(expert)] = state_[size_t(expert)].rows ? int64_t(coming_.size()) : 0;
    }
    requested_ = 0;
    rows_taken_ = 0;
    request_next();
}

void ColdRows::take(int64_t expert, const Disk::GiveUp& give_up) {
    std::shared_ptr<Arrival>& arrival = state_[size_t(expert)].arrival;
    if (!arrival || !disk_->wait(*arrival, give_up)) return;
    if (const int error = disk_->error_of(*arrival))
        throw DiskError(name_ + ": neurons of expert " + std::to_string(expert) +
                        " cannot be read: " + why_not_read(error));
    arrival.reset();
}

void ColdRows::turn() {
    end();
    ++load_batch_;
    request_next();
}

bool ColdRows::await(const Disk::GiveUp& give_up) {
    const int64_t expert = coming_[size_t(load_batch_) - 1];
    const bool waited = !disk_->arrived(*state_[size_t(expert)].arrival);
    take(expert, give_up);
    return waited;
}

void ColdRows::end() {
    if (load_batch_) give_back(coming_[size_t(load_batch_) - 1]);
}

}  // namespace hc
