// Which kernels this processor can run.
#include <cstring>

#include "kernels.h"
#if defined(__x86_64__) || defined(_M_X64)
#if defined(_MSC_VER)
#include <intrin.h>
#endif
#elif defined(__linux__) && defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace hc {

namespace {

#if defined(_MSC_VER) && defined(_M_X64)
bool has_avx2() {
    int r[4];
    __cpuid(r, 1);
    const bool os = (r[2] >> 27 & 1) && (_xgetbv(0) & 6) == 6, fma = r[2] >> 12 & 1, f16c = r[2] >> 29 & 1;
    __cpuidex(r, 7, 0);
    return os && fma && f16c && (r[1] >> 5 & 1);
}
bool has_avx512() {
    if (!has_avx2() || (_xgetbv(0) & 0xe6) != 0xe6) return false;
    int r[4];
    __cpuidex(r, 7, 0);
    const int want = 1 << 16 | 1 << 17 | 1 << 30 | int(1u << 31);  // F, DQ, BW, VL
    return (r[1] & want) == want && (r[2] >> 11 & 1);              // VNNI
}
#elif defined(__x86_64__)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif

#ifdef HC_HAVE_NEON
bool has_dotprod() {
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) && (getauxval(AT_HWCAP) & HWCAP_ASIMDHP);
#else
    return true;  // every 64-bit Apple and Windows machine on Arm that is still supported
#endif
}
#endif

}  // namespace

const Kernels* find_kernels(const char* name) {
    const auto wanted = [&](const char* isa) { return !*name || !std::strcmp(name, isa); };
#ifdef HC_HAVE_AVX512
    if (wanted("avx512") && has_avx512()) return &kernels_avx512;
#endif
#ifdef HC_HAVE_AVX2
    if (wanted("avx2") && has_avx2()) return &kernels_avx2;
#endif
#ifdef HC_HAVE_NEON
    if (wanted("neon") && has_dotprod()) return &kernels_neon;
#endif
    return wanted("scalar") ? &kernels_scalar : nullptr;
}

}  // namespace hc
