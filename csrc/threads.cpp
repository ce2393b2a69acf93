#include "threads.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#if defined(_MSC_VER) && defined(_M_X64)
#include <immintrin.h>
#endif

#include "kernels.h"
#include "wait.h"

namespace hc {

namespace {

// How long a waiting thread spins before it sleeps: longer than a barrier, shorter than a scheduler's slice.
constexpr std::chrono::microseconds kSpin(50);

// Where cores are shared: pauses of a barrier that is about to open.
constexpr int kPausesBeforeYield = 8;

// How often a run asks whether it shall go on: soon for a person, and no short step ever asks.
constexpr std::chrono::milliseconds kAskEvery(50);
// Pieces between two looks at the clock, which costs as much as the smallest pieces.
constexpr int kLookEvery = 16;

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

Pool::Pool(int threads)
    : claims_(size_t(std::max(threads, 1))),
      fetched_(claims_.size()),
      process_(process_id()),
      threads_(std::make_unique<Threads>()) {
    if (threads < 1) throw std::invalid_argument("threads must be at least 1");
    try {
        start(threads);
    } catch (const std::exception& error) {
        const size_t started = threads_->started.size() + 1;  // with the calling one
        const bool memory = dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
        stop();
        throw std::invalid_argument("threads " + std::to_string(threads) + ": only " +
                                    std::to_string(started) + " can run here (" +
                                    (memory ? "out of memory" : error.what()) + "): choose fewer (-t)");
    }
}

void Pool::start(int threads) {
    local_.reserve(size_t(threads));  // so that threads that run already see no address change
    threads_->started.reserve(size_t(threads - 1));
    local_.push_back(allocate_aligned(kLocalBytes));
    for (int i = 1; i < threads; ++i) {
        local_.push_back(allocate_aligned(kLocalBytes));
        threads_->started.emplace_back([this, i] { loop(i); });
    }
}

void Pool::stop() {
    stop_ = true;
    {
        std::lock_guard<std::mutex> lock(threads_->mutex);
        threads_->wake.notify_all();
    }
    for (std::thread& t : threads_->started) t.join();
}

Pool::~Pool() {
    if (process_ == process_id())
        stop();
    else
        static_cast<void>(threads_.release());  // see struct Threads
}

bool Pool::has_work() const {
    for (const Claim& c : claims_) {
        const uint64_t word = c.word.load(std::memory_order_seq_cst);
        if ((word & kMask) < word >> kBits) return true;
    }
    return false;
}

// The next piece of the thread's own run, or the last of another's; -1 when none is left.
int64_t Pool::claim(int thread) {
    for (size_t i = 0; i < claims_.size(); ++i) {
        auto& claim = claims_[(size_t(thread) + i) % claims_.size()].word;
        uint64_t c = claim.load(std::memory_order_acquire);
        while ((c & kMask) < c >> kBits) {
            const uint64_t taken = i ? c - (uint64_t(1) << kBits) : c + 1;
            if (claim.compare_exchange_weak(c, taken, std::memory_order_acq_rel))
                return int64_t(i ? taken >> kBits : c & kMask);
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
    if (!dropping_.load(std::memory_order_relaxed)) {
        try {
            (*steps_)[step].run(piece, scratch(thread));
        } catch (...) {
            fail();
        }
    }
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == pieces) advance(step + 1, thread);
    return true;
}

// Opens the next step that has several pieces, or ends the run. Called by one thread, while no piece is
// outstanding.
void Pool::advance(size_t next, int thread) {
    const auto threads = int64_t(claims_.size());
    int64_t pieces = 0;
    try {
        pieces = run_single(next, thread);
        if (pieces && threads > 1 && next >= announced_) announce(next + 1);
    } catch (...) {
        fail();
    }
    current_ = next;
    pieces_ = pieces;
    done_.store(0, std::memory_order_relaxed);
    for (int64_t i = 0; i < threads && pieces; ++i) {
        const auto first = uint64_t(pieces * i / threads), end = uint64_t(pieces * (i + 1) / threads);
        claims_[size_t(i)].word.store(end << kBits | first, std::memory_order_seq_cst);
    }
    if (!pieces) finished_.store(true, std::memory_order_seq_cst);
    wake_sleepers();
}

// Runs steps of one piece, whose data then stay in the thread's cache, up to the next step that has several;
// returns how many, 0 at the end of the run.
int64_t Pool::run_single(size_t& next, int thread) {
    for (; next < steps_->size() && !dropping_.load(std::memory_order_relaxed); ++next) {
        const Step& step = (*steps_)[next];
        const int64_t pieces = step.pieces();
        if (pieces > int64_t(kMask))
            throw std::invalid_argument("a step has " + std::to_string(pieces) + " pieces; allowed: up to " +
                                        std::to_string(kMask) + "; run fewer rows at a time");
        if (pieces > 1) return pieces;
        if (pieces == 1) step.run(0, scratch(thread));
        if (thread == 0) ask();
    }
    return 0;
}

void Pool::wake_sleepers() {
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    std::lock_guard<std::mutex> lock(threads_->mutex);
    threads_->wake.notify_all();
}

void Pool::fail() {
    if (!dropping_.exchange(true)) error_ = std::current_exception();
}

void Pool::ask() {
    if (!*check_interrupt_ || --look_in_ > 0) return;
    look_in_ = kLookEvery;
    const Clock::time_point now = Clock::now();
    if (now - asked_ < kAskEvery) return;
    asked_ = now;
    try {
        (*check_interrupt_)();
    } catch (...) {
        interrupt_ = std::current_exception();
        dropping_ = true;
    }
}

bool Pool::ending() {
    if (std::this_thread::get_id() == caller_) {
        look_in_ = 0;
        ask();
    }
    return dropping_.load(std::memory_order_relaxed);
}

std::shared_ptr<uint8_t> Pool::shared_scratch(size_t bytes) {
    std::lock_guard<std::mutex> one(scratch_mutex_);
    if (!shared_scratch_ || shared_bytes_ < bytes) {
        shared_scratch_ = std::shared_ptr<uint8_t>(allocate_aligned(bytes).release(), AlignedDelete());
        shared_bytes_ = bytes;
    }
    return shared_scratch_;
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
    const auto start = Clock::now();
    for (int i = 0;; ++i) {
        if (done()) return;
        fetch_ahead(thread);
        if (i > kPausesBeforeYield && shares_cores_.load(std::memory_order_relaxed))
            std::this_thread::yield();
        else
            pause_briefly();
        if (i % 64 == 63 && Clock::now() - start > kSpin) break;
    }
    std::unique_lock<std::mutex> lock(threads_->mutex);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    if (thread == 0) {
        threads_->wake.wait_for(lock, kAskEvery, done);
        look_in_ = 0;
    } else {
        threads_->wake.wait(lock, done);
    }
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

void Pool::loop(int thread) {
    while (!stop_.load(std::memory_order_relaxed)) {
        if (work(thread)) continue;
        wait(thread, [this] { return has_work() || stop_.load(std::memory_order_seq_cst); });
    }
}

void Pool::run(const std::vector<Step>& steps, uint8_t* shared,
               const std::function<void()>& check_interrupt) {
    if (process_ != process_id())  // before the mutex, which a thread of the parent may hold for ever
        throw std::runtime_error(
            "this process was forked from the one that loaded the model, which has the pool's threads: load "
            "the model in this process");
    std::lock_guard<std::mutex> one(run_mutex_);
    steps_ = &steps;
    shared_ = shared;
    caller_ = std::this_thread::get_id();
    announced_ = 0;
    check_interrupt_ = &check_interrupt;
    asked_ = Clock::now();
    look_in_ = kLookEvery;
    dropping_.store(false, std::memory_order_relaxed);
    finished_.store(false, std::memory_order_seq_cst);
    advance(0, 0);
    while (!finished_.load(std::memory_order_acquire)) {
        ask();
        if (work(0)) continue;
        wait(0, [this] { return has_work() || finished_.load(std::memory_order_seq_cst); });
    }
    const std::exception_ptr error = std::exchange(error_, nullptr);
    const std::exception_ptr interrupt = std::exchange(interrupt_, nullptr);
    if (interrupt) std::rethrow_exception(interrupt);
    if (error) std::rethrow_exception(error);
}

}  // namespace hc
