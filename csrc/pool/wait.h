// Shared by all that wait for another thread.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#if defined(_WIN32)
#include <process.h>
#else
#include <unistd.h>
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace hc {

inline void pause_briefly() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__) && !defined(_MSC_VER)
    __asm__ __volatile__("yield");
#endif
}

// Earlier stores are seen before later ones, by a device too: memory that the host writes
// for one is often write-combined, and a release store does not order that.
inline void order_writes() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_sfence();
#elif defined(__aarch64__) && !defined(_MSC_VER)
    __asm__ __volatile__("dmb oshst" ::: "memory");
#else
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

// Whether it was done soon. Spins for what is about to come; then the core is offered to others, the other
// side's threads perhaps. Whoever waits longer than for a layer of a small model, for the next step perhaps,
// sleeps.
template <class Done>
bool spin_until(Done done, std::chrono::microseconds patience = std::chrono::microseconds(200)) {
    constexpr std::chrono::microseconds kSpin(1);
    using Clock = std::chrono::steady_clock;
    const Clock::time_point start = Clock::now();
    for (int i = 0;; ++i) {
        if (done()) return true;
        const auto waited = i % 16 == 15 ? Clock::now() - start : Clock::duration(0);
        if (waited > patience) return false;
        if (waited > kSpin)
            std::this_thread::yield();
        else
            pause_briefly();
    }
}

inline int64_t process_id() {
#if defined(_WIN32)
    return _getpid();
#else
    return getpid();
#endif
}

}  // namespace hc
