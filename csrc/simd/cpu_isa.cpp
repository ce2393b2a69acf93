// Which kernels this processor can run, and how its memory is read best.
#include <cstring>
#include <stdexcept>

#include "simd/kernels.h"
#if defined(__x86_64__) || defined(_M_X64)
#if defined(_MSC_VER)
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#elif defined(__linux__) && defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(_M_ARM64)
#include <windows.h>
#endif

namespace hc {

namespace {

#if defined(__x86_64__) || defined(_M_X64)
struct CpuId {
    uint32_t a = 0, b = 0, c = 0, d = 0;
};
// All zero where the processor has no such leaf.
CpuId cpuid(uint32_t leaf, uint32_t subleaf = 0) {
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

#if defined(_MSC_VER)
[[maybe_unused]] bool has_avx2() {
    const CpuId one = cpuid(1);
    const bool os = (one.c >> 27 & 1) && (_xgetbv(0) & 6) == 6, fma = one.c >> 12 & 1, f16c = one.c >> 29 & 1;
    return os && fma && f16c && (cpuid(7).b >> 5 & 1);
}
[[maybe_unused]] bool has_avx512() {
    if (!has_avx2() || (_xgetbv(0) & 0xe6) != 0xe6) return false;
    const CpuId seven = cpuid(7);
    const uint32_t want = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
    return (seven.b & want) == want && (seven.c >> 11 & 1);           // VNNI
}
#else
[[maybe_unused]] bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
[[maybe_unused]] bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif
// __builtin_cpu_supports of older compilers does not know the name.
[[maybe_unused]] bool has_avxvnni() { return has_avx2() && (cpuid(7, 1).a >> 4 & 1); }
#endif

#ifdef HC_HAVE_DOTPROD
#if defined(__APPLE__)
[[maybe_unused]] bool has_feature(const char* name) {
    int has = 0;
    size_t size = sizeof has;
    return sysctlbyname(name, &has, &size, nullptr, 0) == 0 && has;
}
#endif
[[maybe_unused]] bool has_dotprod() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif defined(__APPLE__)
    return has_feature("hw.optional.arm.FEAT_DotProd");
#elif defined(_M_ARM64)
    return IsProcessorFeaturePresent(43);  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE, which older headers lack
#else
    return false;
#endif
}
#endif
#ifdef HC_HAVE_I8MM
[[maybe_unused]] bool has_i8mm() {
#if defined(__linux__)
    constexpr unsigned long i8mm = 1ul << 13;  // HWCAP2_I8MM, which older headers lack
    return has_dotprod() && (getauxval(AT_HWCAP2) & i8mm);
#elif defined(__APPLE__)
    return has_dotprod() && has_feature("hw.optional.arm.FEAT_I8MM");
#else
    return false;
#endif
}
#endif

// A table of its own for an instruction set that shares all but products of bytes.
[[maybe_unused]] Kernels with_products(Kernels shared, const ByteProducts& own) {
    static_cast<ByteProducts&>(shared) = own;
    return shared;
}

// How far ahead, by maker, family and range of models as CPUID gives them: what was measured with all threads
// (docs/results.md, docs/log.md).
struct Measured {
    const char* maker;
    uint32_t family, first_model, last_model;
    Fetching best;
};
constexpr Fetching kNear{3 << 10, false}, kFar{8 << 10, true};
[[maybe_unused]] constexpr Measured kMeasured[] = {
    {"AuthenticAMD", 0x19, 0x00, 0x0f, kNear},  // Zen 3; of desktops, the same core:
    {"AuthenticAMD", 0x19, 0x20, 0x5f, kNear},
    {"AuthenticAMD", 0x19, 0x10, 0xaf, kFar},  // Zen 4
    {"GenuineIntel", 6, 0x00, 0xff, kFar},     // a Xeon with 2 MiB of L2 a core
};
// The value that every processor had before there was this table; nobody measured another for these.
constexpr Fetching kUnknown = kNear;

Fetching fetching_here() {
#if defined(__x86_64__) || defined(_M_X64)
    const CpuId zero = cpuid(0);
    const uint32_t maker[3] = {zero.b, zero.d, zero.c}, one = cpuid(1).a;
    uint32_t family = one >> 8 & 15, model = one >> 4 & 15;
    if (family == 6 || family == 15) model |= one >> 12 & 0xf0;
    if (family == 15) family += one >> 20 & 0xff;
    for (const Measured& m : kMeasured)
        if (!std::memcmp(maker, m.maker, 12) && family == m.family && model >= m.first_model &&
            model <= m.last_model)
            return m.best;
#endif
    return kUnknown;
}

}  // namespace

Fetching fetching = fetching_here();

const Kernels* find_kernels(const char* name) {
    const auto wanted = [&](const char* isa) { return !*name || !std::strcmp(name, isa); };
#ifdef HC_HAVE_AVX512
    if (wanted("avx512") && has_avx512()) return &kernels_avx512;
#endif
#ifdef HC_HAVE_AVXVNNI
    if (wanted("avxvnni") && has_avxvnni()) {
        static const Kernels kernels = with_products(kernels_avx2, products_avxvnni);
        return &kernels;
    }
#endif
#ifdef HC_HAVE_AVXVNNI_EVEX
    if (!std::strcmp(name, "avxvnni_evex") && has_avx512()) {
        static const Kernels kernels = with_products(kernels_avx2, products_avxvnni_evex);
        return &kernels;
    }  // for tests alone
#endif
#ifdef HC_HAVE_AVX2
    if (wanted("avx2") && has_avx2()) return &kernels_avx2;
#endif
#ifdef HC_HAVE_I8MM
    if (wanted("i8mm") && has_i8mm()) {
        static const Kernels kernels = with_products(kernels_neon, products_i8mm);
        return &kernels;
    }
#endif
#ifdef HC_HAVE_DOTPROD
    if (wanted("dotprod") && has_dotprod()) {
        static const Kernels kernels = with_products(kernels_neon, products_dotprod);
        return &kernels;
    }
#endif
#ifdef HC_HAVE_NEON
    if (wanted("neon")) return &kernels_neon;
#endif
#ifdef HC_HAVE_SCALAR
    if (wanted("scalar")) return &kernels_scalar;
#endif
    return nullptr;
}

const Kernels& best_kernels() {
    const Kernels* best = find_kernels("");
    if (!best) throw std::runtime_error("HOTCOLD_ISAS left out what this processor runs when this was built");
    return *best;
}

}  // namespace hc
