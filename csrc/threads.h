// One persistent pool of threads that runs programs: lists of steps, each cut into pieces that any thread
// claims.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace hc {

// Scratch of a running program: one buffer that all threads see, one of the calling thread's own.
struct Scratch {
    uint8_t* shared;
    uint8_t* local;
};

struct Span {
    const uint8_t* at = nullptr;
    int64_t bytes = 0;
};

// One step: `pieces` is asked when the step or one before it starts; pieces run in any order on any thread.
// `reads`, where given, tells what pieces [first, end) read first, in one stretch of memory.
struct Step {
    std::function<int64_t()> pieces;
    std::function<void(int64_t piece, const Scratch&)> run;
    std::function<Span(int64_t first, int64_t end)> reads = {};
};

struct AlignedDelete {
    void operator()(uint8_t* p) const;
};
using AlignedBytes = std::unique_ptr<uint8_t[], AlignedDelete>;
AlignedBytes allocate_aligned(size_t bytes);  // 64-byte aligned, not cleared

// Each thread starts with a run of neighbouring pieces of its own, so that what it reads goes on in memory,
// and when these are done takes others' from their end. A step ends when all its pieces are done, whoever did
// them: a descheduled thread that holds no piece delays nobody. The thread that did the last one goes on with
// steps of one piece by itself. Waiting threads spin briefly, then sleep; meanwhile they bring what they will
// read next into their L2.
class Pool {
  public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return int(threads_.size()) + 1; }
    // Runs the steps in order on the pool and the calling thread; returns when all are done. One caller at a
    // time.
    void run(const std::vector<Step>& steps, uint8_t* shared);

  private:
    // The word that pieces of one thread's run are claimed from: step number (24 bits), end (20), next piece
    // (20). A thread that read a stale word fails its compare-exchange, because the step number has moved on.
    static constexpr int kBits = 20;
    static constexpr uint64_t kMask = (uint64_t(1) << kBits) - 1;
    struct alignas(64) Claim {
        std::atomic<uint64_t> word{0};
        // Where the thread's run of the next step that reads begins. Both are hints: they may belong to two
        // steps, or to a program that is gone.
        std::atomic<const uint8_t*> next{nullptr};
        std::atomic<int64_t> bytes{0};
    };
    // What a waiting thread has fetched of where its claim's `next` was `base`.
    struct Fetched {
        const uint8_t* base = nullptr;
        int64_t bytes = 0;
    };

    bool has_work() const;
    int64_t claim(int thread);
    bool work(int thread);  // claims and runs one piece; false when there was none
    void advance(size_t next, int thread);
    void announce(size_t next);
    void fetch_ahead(int thread);
    Scratch scratch(int thread) const { return {shared_, local_[size_t(thread)].get()}; }
    void loop(int thread);
    template <class Done> void wait(int thread, Done done);

    std::vector<Claim> claims_;
    std::vector<Fetched> fetched_;  // each used by its thread only
    size_t announced_ = 0;          // the step that the claims name as the next to read
    uint64_t step_ = 0;             // number of the current step
    int64_t pieces_ = 0;            // of it
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<bool> finished_{true};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    const std::vector<Step>* steps_ = nullptr;
    size_t current_ = 0;
    uint8_t* shared_ = nullptr;
    std::mutex run_mutex_, sleep_mutex_;
    std::condition_variable wake_;
    std::vector<AlignedBytes> local_;
    std::vector<std::thread> threads_;
};

}  // namespace hc
