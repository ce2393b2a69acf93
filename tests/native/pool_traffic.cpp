// Counts, and does not time, what the pool's threads do to each other's cache lines:
//     hotcold_pool_traffic      exit 0: no more than the design allows; 1: more
// This is the pool's own source, with atomics and condition variables that count.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "expect.h"

namespace std {

template <class T> class counted_atomic : public atomic<T> {
  public:
    using atomic<T>::atomic;
    using atomic<T>::operator=;
    T load(memory_order order = memory_order_seq_cst) const {
        ++loads;
        return atomic<T>::load(order);
    }
    T fetch_add(T by, memory_order order = memory_order_seq_cst) {
        ++additions;
        return atomic<T>::fetch_add(by, order);
    }
    mutable atomic<int64_t> loads{0}, additions{0};
};

class counted_condition_variable : public condition_variable {
  public:
    void notify_one() {
        ++notified;
        condition_variable::notify_one();
    }
    static inline atomic<int64_t> notified{0};
};

}  // namespace std

#define private public
#define atomic counted_atomic
#define condition_variable counted_condition_variable
#include "pool/threads.cpp"

using namespace hc;

namespace {

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

Step step_of(int64_t pieces, int ms = 0) {
    return {[=] { return pieces; },
            [=](int64_t, const Scratch&) {
                if (ms) sleep_ms(ms);
            }};
}

int64_t claim_loads(const Pool& pool) {
    int64_t all = 0;
    for (const auto& claim : pool.claims_) all += claim.word.loads;
    return all;
}

// Twice, since a thread may say so for a moment and then see that there is work.
void wait_until_asleep(const Pool& pool) {
    for (int twice = 0; twice < 2; ++twice) {
        for (size_t i = 1; i < pool.claims_.size(); ++i)
            while (!pool.threads_->seats[i].asleep.load()) sleep_ms(1);
        sleep_ms(5);
    }
}

// A waiting thread looks at one word: how often claims are read does not depend on how long it waits.
void test_waiting_reads_no_claims() {
    Pool pool(8);
    constexpr int kSteps = 50;
    pool.run(std::vector<Step>(kSteps, step_of(2, 2)), nullptr);
    // A thread reads its own claim twice and each other's once where it finds nothing, and that at most twice
    // a step: when the step opens and, if it had a piece, after that.
    const int64_t most = kSteps * 8 * (2 * 9 + 2), seen = claim_loads(pool);
    expect(seen <= most, std::to_string(seen) + " reads of claims, at most " + std::to_string(most));
}

// A thread counts the pieces of its own run at once; opening a step is the other addition.
void test_pieces_are_counted_together() {
    Pool pool(1);
    pool.run(std::vector<Step>(10, step_of(1000)), nullptr);
    const int64_t seen = pool.done_.additions;
    expect(seen == 20, std::to_string(seen) + " additions in 10 steps of 1000 pieces, not 20");
}

// As many are woken as there are pieces for; another one may be the calling thread, at the end.
void test_few_pieces_wake_few() {
    Pool pool(8);
    for (int64_t pieces : {1, 2, 3, 8}) {
        wait_until_asleep(pool);
        const int64_t before = std::condition_variable::notified;
        pool.run({step_of(pieces, 20)}, nullptr);  // so long that who is woken could wake others
        const int64_t seen = std::condition_variable::notified - before;
        expect(seen <= pieces, std::to_string(pieces) + " pieces woke " + std::to_string(seen));
    }
}

// No thread spins while there is nothing to do, and what threads write for themselves shares no line.
void test_rest_and_lines() {
    Pool pool(4);
    for (int i = 0; i < 20; ++i) pool.run({step_of(4)}, nullptr);
    wait_until_asleep(pool);
    const int64_t before = pool.epoch_.loads;
    sleep_ms(50);
    const int64_t seen = pool.epoch_.loads - before;
    expect(seen == 0, "threads at rest looked " + std::to_string(seen) + " times whether a run has begun");
    const auto line = [](const void* p) { return reinterpret_cast<uintptr_t>(p) / Pool::kLine; };
    expect(line(&pool.claims_[0]) != line(&pool.claims_[1]), "two threads' claims share a line");
    expect(line(&pool.fetched_[0]) != line(&pool.fetched_[1]), "two threads' notes share a line");
    expect(line(&pool.epoch_) != line(&pool.done_) && line(&pool.done_) != line(&pool.steps_) &&
               line(&pool.steps_) != line(&pool.look_in_) && line(&pool.threads_) != line(&pool.epoch_),
           "what threads wait for shares a line with what they count or read");
}

}  // namespace

int main() {
    test_waiting_reads_no_claims();
    test_pieces_are_counted_together();
    test_few_pieces_wake_few();
    test_rest_and_lines();
    std::printf("%d failed\n", failures);
    return failures ? 1 : 0;
}
