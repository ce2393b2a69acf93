// The instruction sets that this processor runs, even without kernels in this build.
#pragma once
#include "os/cpuid.h"
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
// Defined only by tests/native/emulated_tiles.c: true if it runs the instructions that the processor lacks.
extern "C" __attribute__((weak, visibility("default"))) int hotcold_emulates_tiles();
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
// Not by __builtin_cpu_supports: in builds by Zig its answer was always no.
// The registers that the system saves. Only for processors with the instruction (OSXSAVE).
uint64_t saved_registers() {
#if defined(_MSC_VER)
    return _xgetbv(0);
#else
    uint32_t low, high;
    asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t(high) << 32 | low;
#endif
}
bool has_avx2() {
    const CpuId one = cpuid(1);
    const uint32_t want = 1u << 12 | 1u << 27 | 1u << 29;  // FMA, OSXSAVE, F16C
    return (one.c & want) == want && (saved_registers() & 6) == 6 && (cpuid(7).b >> 5 & 1);
}
bool has_avx512() {
    if (!has_avx2() || (saved_registers() & 0xe6) != 0xe6) return false;
    const CpuId seven = cpuid(7);
    const uint32_t want = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
    return (seven.b & want) == want && (seven.c >> 11 & 1);           // VNNI
}
#if defined(__linux__)
bool lists_amx() {
    constexpr uint32_t want = 1u << 22 | 1u << 24 | 1u << 25;  // BF16, tiles, INT8
    const bool tiles = (cpuid(7).d & want) == want || (hotcold_emulates_tiles && hotcold_emulates_tiles());
    return tiles && has_avx512();
}
// Linux saves the state of tiles only for processes that ask for it. Returns 0, or the error of its refusal.
int request_tiles() {
    constexpr int request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0 ? 0 : errno;
}
#else
bool lists_amx() { return false; }
int request_tiles() { return 0; }
#endif
bool has_amx() { return lists_amx() && request_tiles() == 0; }
bool has_avxvnni() { return has_avx2() && (cpuid(7, 1).a >> 4 & 1); }

#elif defined(__aarch64__) || defined(_M_ARM64)
#if defined(__APPLE__)
bool has_feature(const char* name) {
    int has = 0;
    size_t size = sizeof has;
    return sysctlbyname(name, &has, &size, nullptr, 0) == 0 && has;
}
#endif
bool has_dotprod() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif defined(__APPLE__)
    return has_feature("hw.optional.arm.FEAT_DotProd");
#elif defined(_M_ARM64)
    return IsProcessorFeaturePresent(43);  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE; older headers lack it
#else
    return false;
#endif
}
bool has_i8mm() {
#if defined(__linux__)
    constexpr unsigned long i8mm = 1ul << 13;  // HWCAP2_I8MM; older headers lack it
    return has_dotprod() && (getauxval(AT_HWCAP2) & i8mm);
#elif defined(__APPLE__)
    return has_dotprod() && has_feature("hw.optional.arm.FEAT_I8MM");
#else
    return false;
#endif
}
#endif

bool has_always() { return true; }

struct InstructionSet {
    const char* name;
    bool (*runs)();
};
// Best first.
constexpr InstructionSet kInstructionSets[] = {
#if defined(__x86_64__) || defined(_M_X64)
    // avxvnni_evex is only for native tests, so it follows the set whose kernels it shares
    {"amx", has_amx},   {"avx512", has_avx512},       {"avxvnni", has_avxvnni},
    {"avx2", has_avx2}, {"avxvnni_evex", has_avx512}, {"scalar", has_always},
#elif defined(__aarch64__) || defined(_M_ARM64)
    {"i8mm", has_i8mm},
    {"dotprod", has_dotprod},
    {"neon", has_always},
#else
    {"scalar", has_always},
#endif
};

}  // namespace
}  // namespace hc
