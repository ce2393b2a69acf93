// Helpers for waiting on another thread.
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

// Orders earlier stores before later ones, for devices too. Memory that the host writes for a device is often
// write-combined, and a release store does not order that.
inline void order_writes() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_sfence();
#elif defined(__aarch64__) && !defined(_MSC_VER)
    __asm__ __volatile__("dmb oshst" ::: "memory");
#else
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

// Returns true if `done` became true within `patience`. Spins for 1 us, then yields the core, perhaps to the
// threads that it waits for. Callers sleep after a longer wait than a layer of a small model takes.
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
