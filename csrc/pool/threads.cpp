#include "pool/threads.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#if defined(__linux__)
#include <sched.h>
#elif defined(_WIN32)
#include <windows.h>
#endif
#if defined(_MSC_VER) && defined(_M_X64)
#include <immintrin.h>
#endif

#include "pool/local_bytes.h"
#include "pool/wait.h"

namespace hc {

namespace {

// Time that a waiting thread spins before it sleeps: longer than a barrier, shorter than a scheduler's time
// slice.
constexpr std::chrono::microseconds kSpin(50);

// Maximum time that a thread spins between two runs. Runs further apart gain little from threads that are
// awake, and an idle process should use no CPU.
constexpr std::chrono::microseconds kBridge(500);

// Pauses at a barrier before a yield, if cores are shared.
constexpr int kPausesBeforeYield = 8;

// Interval of interrupt checks: short for a user, and longer than a short step.
constexpr std::chrono::milliseconds kAskEvery(50);
// Pieces between two readings of the clock; a reading costs as much as the smallest pieces.
constexpr int kLookEvery = 16;

// Bits of the epoch that number a thread. With more threads, some sleep through a step.
constexpr uint64_t kThreads = 0xffff;

// Maximum bytes that a waiting thread prefetches of its next run: half of a usual L2.
constexpr int64_t kFetchAhead = 256 << 10;

void fetch(const uint8_t* at) {
#if defined(_MSC_VER) && defined(_M_X64)
    _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1);
#elif !defined(_MSC_VER)
    __builtin_prefetch(at, 0, 2);
#endif
}

// Processors that this process may use.
int processors() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#elif defined(_WIN32)
    DWORD_PTR process_mask = 0,
              system_mask = 0;  // of one group of at most 64, and 0 for a process in several
    if (GetProcessAffinityMask(GetCurrentProcess(), &process_mask, &system_mask) &&
        process_mask != system_mask) {
        int count = 0;
        for (; process_mask; process_mask &= process_mask - 1) ++count;
        return count;
    }
#endif
    return int(std::thread::hardware_concurrency());
}

}  // namespace

void AlignedDelete::operator()(uint8_t* p) const { ::operator delete[](p, std::align_val_t(64)); }

AlignedBytes allocate_aligned(size_t bytes) {
    return AlignedBytes(static_cast<uint8_t*>(::operator new[](bytes ? bytes : 64, std::align_val_t(64))));
}

Pool::Pool(int threads)
    : claims_(size_t(std::max(threads, 1))),
      fetched_(claims_.size()),
      crowded_(threads > processors()),
      process_(process_id()),
      threads_(std::make_unique<Threads>(claims_.size())) {
    if (threads < 1) throw std::invalid_argument("threads must be at least 1");
    try {
        start(threads);
    } catch (const std::exception& error) {
        const size_t started = threads_->started.size() + 1;  // with the calling thread
        const bool memory = dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
        stop();
        throw std::invalid_argument("threads " + std::to_string(threads) + ": only " +
                                    std::to_string(started) + " can run here (" +
                                    (memory ? "out of memory" : error.what()) + "): choose fewer (-t)");
    }
}

void Pool::start(int threads) {
    local_.reserve(size_t(threads));  // addresses must not change for threads that run already
    threads_->started.reserve(size_t(threads - 1));
    local_.push_back(allocate_aligned(kLocalBytes));
    for (int i = 1; i < threads; ++i) {
        local_.push_back(allocate_aligned(kLocalBytes));
        threads_->started.emplace_back([this, i] { loop(i); });
    }
}

void Pool::stop() {
    stop_.store(true, std::memory_order_relaxed);
    change_epoch(0, 0);
    for (size_t i = 0; i < threads_->started.size(); ++i) wake(int(i) + 1);
    for (std::thread& t : threads_->started) t.join();
}

Pool::~Pool() {
    if (process_ == process_id())
        stop();
    else
        static_cast<void>(threads_.release());  // see struct Threads
}

// Returns the next piece of a thread's run (with `last`: its last piece); -1 if none is left.
int64_t Pool::claim(int owner, bool last) {
    auto& claim = claims_[size_t(owner)].word;
    uint64_t c = claim.load(std::memory_order_acquire);
    while ((c & kMask) < c >> kBits) {
        const uint64_t taken = last ? c - (uint64_t(1) << kBits) : c + 1;
        if (claim.compare_exchange_weak(c, taken, std::memory_order_acq_rel))
            return int64_t(last ? taken >> kBits : c & kMask);
    }
    return -1;
}

int64_t Pool::steal(int thread) {
    for (int i = 1; i < threads(); ++i) {
        const int64_t piece = claim((thread + i) % threads(), true);
        if (piece >= 0) return piece;
    }
    return -1;
}

bool Pool::work(int thread, uint64_t seen) {
    int64_t piece = claim(thread, false);
    const bool own_run = piece >= 0;
    if (!own_run) piece = steal(thread);
    if (piece < 0) return false;
    // If a step was opened since, wake this thread's children now, not after its pieces.
    const uint64_t epoch = epoch_.load(std::memory_order_acquire);
    if (epoch != seen) wake_children(epoch, thread);
    // A claimed piece keeps its step current until it is counted, so steps_, current_, pieces_ and shared_
    // cannot change here. The pieces of the thread's own run are counted together: one write to shared
    // memory.
    const size_t step = current_;
    const int64_t pieces = pieces_;
    int64_t done = 0;
    do {
        if (!dropping_.load(std::memory_order_relaxed)) {
            try {
                (*steps_)[step].run(piece, scratch(thread));
            } catch (...) {
                fail();
            }
        }
        ++done;
        if (thread == 0) poll_interrupt();
        piece = own_run ? claim(thread, false) : -1;
    } while (piece >= 0);
    if (done_.fetch_add(done, std::memory_order_acq_rel) + done == pieces) advance(step + 1, thread);
    return true;
}

// Opens the next step that has several pieces, or ends the run. Called by one thread, while no piece is
// outstanding.
void Pool::advance(size_t next, int thread) {
    const int64_t threads = this->threads();
    for (;; ++next) {
        int64_t pieces = 0;
        if (next) clock(next - 1);
        try {
            pieces = run_single(next, thread);
            if (pieces && threads > 1 && next >= announced_) announce(next + 1);
        } catch (...) {
            fail();
        }
        current_ = next;
        pieces_ = pieces;
        // Other threads may finish every piece before this thread has published all: -1 counts this work as a
        // piece, so that the step stays open.
        done_.store(-1, std::memory_order_relaxed);
        for (int64_t i = 0; i < threads && pieces; ++i) {
            const auto first = uint64_t(pieces * i / threads), end = uint64_t(pieces * (i + 1) / threads);
            claims_[size_t(i)].word.store(end << kBits | first, std::memory_order_release);
        }
        change_epoch(pieces, thread);
        if (!pieces && thread) wake(0);
        if (!pieces || done_.fetch_add(1, std::memory_order_acq_rel) + 1 != pieces) return;
    }
}

// Called by one thread at a time. A thread about to sleep reads the new epoch, or wake() sees it asleep.
void Pool::change_epoch(int64_t pieces, int thread) {
    const auto wanted = uint64_t(std::min<int64_t>({pieces, threads(), int64_t(kThreads)}));
    const uint64_t number = (epoch_.load(std::memory_order_relaxed) >> 32) + 1;
    epoch_.store(number << 32 | (uint64_t(thread) & kThreads) << 16 | wanted, std::memory_order_seq_cst);
}

// Wakes this thread's children for a step. The threads form a binary tree, with the thread that opened the
// step as its root. Each wakes up to two sleeping threads, so that all are awake soon and none pays for all.
void Pool::wake_children(uint64_t epoch, int thread) {
    const int all = threads(), opener = int(epoch >> 16 & kThreads), wanted = int(epoch & kThreads);
    const int place = (thread - opener + all) % all;
    for (int next = 2 * place + 1; next <= 2 * place + 2 && next < wanted; ++next)
        wake((opener + next) % all);
}

void Pool::wake(int thread) {
    Seat& seat = threads_->seats[size_t(thread)];
    if (!seat.asleep.load(std::memory_order_seq_cst) || !seat.asleep.exchange(false)) return;
    std::unique_lock<std::mutex>(seat.mutex).unlock();  // the thread waits by now, or has read the new epoch
    seat.wake.notify_one();
}

// Runs steps of one piece, so that their data stay in this thread's cache, up to the next step with several.
// Returns its number of pieces; 0 at the end of the run.
int64_t Pool::run_single(size_t& next, int thread) {
    for (; next < steps_->size() && !dropping_.load(std::memory_order_relaxed); ++next) {
        const Step& step = (*steps_)[next];
        const int64_t pieces = step.pieces();
        if (pieces > int64_t(kMask))
            throw std::invalid_argument("a step has " + std::to_string(pieces) + " pieces; allowed: up to " +
                                        std::to_string(kMask) + "; run fewer rows at a time");
        if (pieces > 1) return pieces;
        if (pieces == 1) step.run(0, scratch(thread));
        clock(next);
        if (thread == 0) poll_interrupt();
    }
    return 0;
}

void Pool::clock(size_t step) {
    if (!nanoseconds_) return;
    const Clock::time_point now = Clock::now();
    nanoseconds_[step] += std::chrono::duration_cast<std::chrono::nanoseconds>(now - clocked_).count();
    clocked_ = now;
}

void Pool::fail() {
    if (!dropping_.exchange(true)) error_ = std::current_exception();
}

void Pool::poll_interrupt() {
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
        poll_interrupt();
    }
    return dropping_.load(std::memory_order_relaxed);
}

std::shared_ptr<uint8_t> Pool::shared_scratch(size_t bytes) {
    std::lock_guard<std::mutex> lock(scratch_mutex_);
    if (!shared_scratch_ || shared_bytes_ < bytes) {
        shared_scratch_ = std::shared_ptr<uint8_t>(allocate_aligned(bytes).release(), AlignedDelete());
        shared_bytes_ = bytes;
    }
    return shared_scratch_;
}

// Publishes the memory that waiting threads will read in the next step with `reads`. Called before the
// current step opens, because another thread may advance after that.
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

// Prefetches a few cache lines of what the thread reads next.
void Pool::fetch_ahead(int thread) {
    const Claim& claim = claims_[size_t(thread)];
    Fetched& done = fetched_[size_t(thread)];
    const uint8_t* next = claim.next.load(std::memory_order_relaxed);
    if (next != done.base) done = {next, 0};
    const int64_t bytes = next ? claim.bytes.load(std::memory_order_relaxed) : 0;
    for (const int64_t stop = std::min(done.bytes + 8 * 64, bytes); done.bytes < stop; done.bytes += 64)
        fetch(next + done.bytes);
}

// Waits until the epoch changes.
void Pool::wait(int thread, uint64_t seen) {
    const auto start = Clock::now();
    const bool shared = shares_cores_.load(std::memory_order_relaxed);
    const bool bridges = !(seen & kThreads) && !shared && !crowded_;
    const Clock::duration patience =
        bridges ? Clock::duration(patience_.load(std::memory_order_relaxed)) : kSpin;
    bool late = false;  // waited longer than kSpin: from then on each check yields the core
    for (int i = 0;; ++i) {
        if (epoch_.load(std::memory_order_acquire) != seen) return;
        fetch_ahead(thread);
        if (late || (i > kPausesBeforeYield && shared))
            std::this_thread::yield();
        else
            pause_briefly();
        if (!late && i % 64 != 63) continue;
        const Clock::duration waited = Clock::now() - start;
        if (waited > patience) break;
        late = waited > kSpin;
    }
    sleep(thread, seen);
}

void Pool::sleep(int thread, uint64_t seen) {
    Seat& seat = threads_->seats[size_t(thread)];
    std::unique_lock<std::mutex> lock(seat.mutex);
    for (;;) {
        seat.asleep.store(true, std::memory_order_seq_cst);
        if (epoch_.load(std::memory_order_seq_cst) != seen) break;
        if (thread) {
            seat.wake.wait(lock);
        } else if (seat.wake.wait_for(lock, kAskEvery) == std::cv_status::timeout) {
            look_in_ = 0;
            break;
        }
    }
    seat.asleep.store(false, std::memory_order_relaxed);
}

void Pool::loop(int thread) {
    uint64_t seen = 0;
    for (;;) {
        const uint64_t epoch = epoch_.load(std::memory_order_acquire);
        // Read after the epoch: the last epoch wakes no thread again, so a thread that has read it must see
        // stop_.
        if (stop_.load(std::memory_order_relaxed)) return;
        if (epoch != seen) wake_children(epoch, thread);
        seen = epoch;
        // work() finds pieces left of a step that was opened before; another step changes the epoch.
        if (!work(thread, epoch)) wait(thread, epoch);
    }
}

void Pool::run(const std::vector<Step>& steps, uint8_t* shared, const std::function<void()>& check_interrupt,
               int64_t* nanoseconds) {
    if (process_ != process_id())  // before the mutex, which a thread of the parent may hold for ever
        throw std::runtime_error(
            "this process was forked from the one that loaded the model, which has the pool's threads: load "
            "the model in this process");
    std::lock_guard<std::mutex> lock(run_mutex_);
    steps_ = &steps;
    shared_ = shared;
    caller_ = std::this_thread::get_id();
    announced_ = 0;
    check_interrupt_ = &check_interrupt;
    asked_ = Clock::now();
    nanoseconds_ = nanoseconds;
    clocked_ = asked_;
    look_in_ = kLookEvery;
    const Clock::duration gap = asked_ - ended_;
    const Clock::duration patience =
        gap < kBridge ? std::clamp<Clock::duration>(2 * gap, kSpin, kBridge) : kSpin;
    patience_.store(patience.count(), std::memory_order_relaxed);
    dropping_.store(false, std::memory_order_relaxed);
    advance(0, 0);
    for (uint64_t epoch, seen = 0; (epoch = epoch_.load(std::memory_order_acquire)) & kThreads;
         seen = epoch) {
        poll_interrupt();
        if (epoch != seen) wake_children(epoch, 0);
        if (!work(0, epoch)) wait(0, epoch);
    }
    ended_ = Clock::now();
    const std::exception_ptr error = std::exchange(error_, nullptr);
    const std::exception_ptr interrupt = std::exchange(interrupt_, nullptr);
    if (interrupt) std::rethrow_exception(interrupt);
    if (error) std::rethrow_exception(error);
}

}  // namespace hc
