// The cpuid instruction of x86 processors.
#pragma once
#if defined(__x86_64__) || defined(_M_X64)
#include <cstdint>
#if defined(_MSC_VER)
#include <intrin.h>
#else
#include <cpuid.h>
#endif

namespace hc {

struct CpuId {
    uint32_t a = 0, b = 0, c = 0, d = 0;
};
// All zero if the processor lacks this leaf.
inline CpuId cpuid(uint32_t leaf, uint32_t subleaf = 0) {
    CpuId r;
#if defined(_MSC_VER)
    int v[4];
    __cpuid(v, 0);
    if (uint32_t(v[0]) < leaf) return r;
    __cpuidex(v, int(leaf), int(subleaf));
    r = {uint32_t(v[0]), uint32_t(v[1]), uint32_t(v[2]), uint32_t(v[3])};
#else
    __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
#endif
    return r;
}

}  // namespace hc
#endif
