#include "threads.h"

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

}  // namespace

void AlignedDelete::operator()(uint8_t* p) const { ::operator delete[](p, std::align_val_t(64)); }

AlignedBytes allocate_aligned(size_t bytes) {
    return AlignedBytes(static_cast<uint8_t*>(::operator new[](bytes ? bytes : 64, std::align_val_t(64))));
}

Pool::Pool(int threads) {
    if (threads < 1) throw std::invalid_argument("threads must be at least 1");
    for (int i = 0; i < threads; ++i) local_.push_back(allocate_aligned(kLocalBytes));
    for (int i = 1; i < threads; ++i) threads_.emplace_back([this, i] { loop(local_[size_t(i)].get()); });
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
    const uint64_t c = claim_.load(std::memory_order_seq_cst);
    return (c & kMask) < (c >> kBits & kMask);
}

bool Pool::work(uint8_t* local) {
    uint64_t c = claim_.load(std::memory_order_acquire);
    while ((c & kMask) < (c >> kBits & kMask)) {
        if (!claim_.compare_exchange_weak(c, c + 1, std::memory_order_acq_rel)) continue;
        // The claimed piece keeps its step current, so steps_, current_ and shared_ cannot change under us.
        const size_t step = current_;
        (*steps_)[step].run(int64_t(c & kMask), Scratch{shared_, local});
        if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == int64_t(c >> kBits & kMask))
            advance(step + 1);
        return true;
    }
    return false;
}

// Opens the next step that has pieces, or ends the run. Called by one thread, while no piece is outstanding.
void Pool::advance(size_t next) {
    int64_t pieces = 0;
    for (; next < steps_->size(); ++next)
        if ((pieces = (*steps_)[next].pieces()) > 0) break;
    const uint64_t id = (claim_.load(std::memory_order_relaxed) >> (2 * kBits)) + 1;
    const bool finished = pieces == 0;
    current_ = next;
    done_.store(0, std::memory_order_relaxed);
    claim_.store(id << (2 * kBits) | uint64_t(pieces) << kBits, std::memory_order_seq_cst);
    if (finished) finished_.store(true, std::memory_order_seq_cst);
    // A step of one piece needs no one else: the thread that opened it will run it.
    if ((pieces > 1 || finished) && sleepers_.load(std::memory_order_seq_cst) > 0) {
        std::lock_guard<std::mutex> lock(sleep_mutex_);
        wake_.notify_all();
    }
}

template <class Done> void Pool::wait(Done done) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0;; ++i) {
        if (done()) return;
        pause();
        if (i % 64 == 63 && std::chrono::steady_clock::now() - start > kSpin) break;
    }
    std::unique_lock<std::mutex> lock(sleep_mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, done);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

void Pool::loop(uint8_t* local) {
    while (!stop_.load(std::memory_order_relaxed)) {
        if (work(local)) continue;
        wait([this] { return has_work() || stop_.load(std::memory_order_seq_cst); });
    }
}

void Pool::run(const std::vector<Step>& steps, uint8_t* shared) {
    std::lock_guard<std::mutex> one(run_mutex_);
    steps_ = &steps;
    shared_ = shared;
    finished_.store(false, std::memory_order_seq_cst);
    advance(0);
    uint8_t* local = local_[0].get();
    while (!finished_.load(std::memory_order_acquire)) {
        if (work(local)) continue;
        wait([this] { return has_work() || finished_.load(std::memory_order_seq_cst); });
    }
}

}  // namespace hc
