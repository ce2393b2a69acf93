// What those who wait for another thread share.
#pragma once
#include <cstdint>
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

inline int64_t process_id() {
#if defined(_WIN32)
    return _getpid();
#else
    return getpid();
#endif
}

}  // namespace hc
