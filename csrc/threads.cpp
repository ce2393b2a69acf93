#include "threads.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>
#include <stdexcept>
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace hc {

namespace {

void pause() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__) && !defined(_MSC_VER)
    __asm__ __volatile__("yield");
#endif
}

// How long a waiting thread spins before it sleeps: longer than a barrier, shorter than a scheduler's slice.
constexpr std::chrono::microseconds kSpin(50);

// What a waiting thread fetches of its next run, at most: half of a usual L2.
constexpr int64_t kFetchAhead = 256 << 10;

void fetch(const uint8_t* at) {
#if defined(_MSC_VER) && defined(_M_X64)
    _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1);
#elif !defined(_MSC_VER)
    __builtin_prefetch(at, 0, 2);
#endif
}

}  // namespace

void AlignedDelete::operator()(uint8_t* p) const { ::operator delete[](p, std::align_val_t(64)); }

AlignedBytes allocate_aligned(size_t bytes) {
    return AlignedBytes(static_cast<uint8_t*>(::operator new[](bytes ? bytes : 64, std::align_val_t(64))));
}

Pool::Pool(int threads) : claims_(size_t(threads < 1 ? 1 : threads)), fetched_(claims_.size()) {
    if (threads < 1) throw std::invalid_argument("threads must be at least 1");
    for (int i = 0; i < threads; ++i) local_.push_back(allocate_aligned(kLocalBytes));
    for (int i = 1; i < threads; ++i) threads_.emplace_back([this, i] { loop(i); });
}

Pool::~Pool() {
    stop_ = true;
    {
        std::lock_guard<std::mutex> lock(sleep_mutex_);
        wake_.notify_all();
    }
    for (auto& t : threads_) t.join();
}

bool Pool::has_work() const {
    for (const Claim& c : claims_) {
        const uint64_t word = c.word.load(std::memory_order_seq_cst);
        if ((word & kMask) < (word >> kBits & kMask)) return true;
    }
    return false;
}

// The next piece of the thread's own run, or the last of another's; -1 when none is left.
int64_t Pool::claim(int thread) {
    for (size_t i = 0; i < claims_.size(); ++i) {
        auto& claim = claims_[(size_t(thread) + i) % claims_.size()].word;
        uint64_t c = claim.load(std::memory_order_acquire);
        while ((c & kMask) < (c >> kBits & kMask)) {
            const uint64_t taken = i ? c - (uint64_t(1) << kBits) : c + 1;
            if (claim.compare_exchange_weak(c, taken, std::memory_order_acq_rel))
                return int64_t(i ? taken >> kBits & kMask : c & kMask);
        }
    }
    return -1;
}

bool Pool::work(int thread) {
    const int64_t piece = claim(thread);
    if (piece < 0) return false;
    // The claimed piece keeps its step current, so steps_, current_, pieces_ and shared_ cannot change under
    // us.
    const size_t step = current_;
    const int64_t pieces = pieces_;
    (*steps_)[step].run(piece, scratch(thread));
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == pieces) advance(step + 1, thread);
    return true;
}

// Opens the next step that has several pieces, or ends the run. Called by one thread, while no piece is
// outstanding; it runs steps of one piece by itself, whose data then stay in its cache.
void Pool::advance(size_t next, int thread) {
    int64_t pieces = 0;
    for (; next < steps_->size(); ++next) {
        if ((pieces = (*steps_)[next].pieces()) > 1) break;
        if (pieces == 1) (*steps_)[next].run(0, scratch(thread));
    }
    const bool finished = next == steps_->size();
    current_ = next, pieces_ = pieces, ++step_;
    done_.store(0, std::memory_order_relaxed);
    const auto threads = int64_t(claims_.size());
    if (!finished && threads > 1 && next >= announced_) announce(next + 1);
    for (int64_t i = 0; i < threads && !finished; ++i) {
        const auto first = uint64_t(pieces * i / threads), end = uint64_t(pieces * (i + 1) / threads);
        claims_[size_t(i)].word.store(step_ << (2 * kBits) | end << kBits | first, std::memory_order_seq_cst);
    }
    if (finished) finished_.store(true, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
        std::lock_guard<std::mutex> lock(sleep_mutex_);
        wake_.notify_all();
    }
}

// Tells waiting threads what they will read in the next step that says so. Called before the current step
// opens: after that, another thread may be the one that advances.
void Pool::announce(size_t next) {
    while (next < steps_->size() && !(*steps_)[next].reads) ++next;
    announced_ = next;
    const auto threads = int64_t(claims_.size());
    const int64_t pieces = next < steps_->size() ? (*steps_)[next].pieces() : 0;
    for (int64_t i = 0; i < threads; ++i) {
        const int64_t first = pieces * i / threads, end = pieces * (i + 1) / threads;
        const Span span = first < end ? (*steps_)[next].reads(first, end) : Span{};
        claims_[size_t(i)].bytes.store(std::min(span.bytes, kFetchAhead), std::memory_order_relaxed);
        claims_[size_t(i)].next.store(span.at, std::memory_order_relaxed);
    }
}

// A few lines of what the thread will read next.
void Pool::fetch_ahead(int thread) {
    const Claim& claim = claims_[size_t(thread)];
    Fetched& done = fetched_[size_t(thread)];
    const uint8_t* next = claim.next.load(std::memory_order_relaxed);
    if (next != done.base) done = {next, 0};
    const int64_t bytes = next ? claim.bytes.load(std::memory_order_relaxed) : 0;
    for (const int64_t stop = std::min(done.bytes + 8 * 64, bytes); done.bytes < stop; done.bytes += 64)
        fetch(next + done.bytes);
}

template <class Done> void Pool::wait(int thread, Done done) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0;; ++i) {
        if (done()) return;
        fetch_ahead(thread);
        pause();
        if (i % 64 == 63 && std::chrono::steady_clock::now() - start > kSpin) break;
    }
    std::unique_lock<std::mutex> lock(sleep_mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, done);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

void Pool::loop(int thread) {
    while (!stop_.load(std::memory_order_relaxed)) {
        if (work(thread)) continue;
        wait(thread, [this] { return has_work() || stop_.load(std::memory_order_seq_cst); });
    }
}

void Pool::run(const std::vector<Step>& steps, uint8_t* shared) {
    std::lock_guard<std::mutex> one(run_mutex_);
    steps_ = &steps;
    shared_ = shared;
    announced_ = 0;
    finished_.store(false, std::memory_order_seq_cst);
    advance(0, 0);
    while (!finished_.load(std::memory_order_acquire)) {
        if (work(0)) continue;
        wait(0, [this] { return has_work() || finished_.load(std::memory_order_seq_cst); });
    }
}

}  // namespace hc
