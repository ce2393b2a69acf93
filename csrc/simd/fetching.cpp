#include "simd/fetching.h"

#include <cstring>

#include "os/cpuid.h"

namespace hc {

namespace {

// By maker, family and range of models, from CPUID.
struct Processors {
    const char* maker;
    uint32_t family, first_model, last_model;
    Fetching best;
};
constexpr Fetching kNear{3 << 10, false, true}, kFar{8 << 10, true, true}, kFarIntoL1{8 << 10, false, true};
// For processors like a measured one, for example the desktop's of a server's core.
constexpr Fetching like(Fetching measured) { return {measured.ahead, measured.into_l2, false}; }
// Measured with all threads on a server of each kind (docs/results.md, docs/log.md). The first row that fits
// counts.
[[maybe_unused]] constexpr Processors kProcessors[] = {
    {"AuthenticAMD", 0x19, 0x00, 0x0f, kNear},             // Zen 3, servers
    {"AuthenticAMD", 0x19, 0x20, 0x5f, like(kNear)},       // Zen 3, desktops
    {"AuthenticAMD", 0x19, 0x10, 0x1f, kFar},              // Zen 4, servers
    {"AuthenticAMD", 0x19, 0x60, 0xaf, like(kFar)},        // Zen 4, desktops and Zen 4c
    {"AuthenticAMD", 0x1a, 0x00, 0x1f, kFarIntoL1},        // Zen 5, servers, whose L1 has 48 KiB
    {"AuthenticAMD", 0x1a, 0x20, 0x7f, like(kFarIntoL1)},  // Zen 5, desktops
    {"GenuineIntel", 6, 0xcf, 0xcf, kFar},                 // Emerald Rapids
    {"GenuineIntel", 6, 0x00, 0xff, like(kFar)},           // with smaller L2 caches too
};
// The value of all processors before this table existed.
constexpr Fetching kUnknown = like(kNear);

Fetching default_fetching() {
#if defined(__x86_64__) || defined(_M_X64)
    const CpuId zero = cpuid(0);
    const uint32_t maker[3] = {zero.b, zero.d, zero.c}, one = cpuid(1).a;
    uint32_t family = one >> 8 & 15, model = one >> 4 & 15;
    if (family == 6 || family == 15) model |= one >> 12 & 0xf0;
    if (family == 15) family += one >> 20 & 0xff;
    for (const Processors& p : kProcessors)
        if (!std::memcmp(maker, p.maker, 12) && family == p.family && model >= p.first_model &&
            model <= p.last_model)
            return p.best;
#endif
    return kUnknown;
}

}  // namespace

Fetching fetching = default_fetching();

}  // namespace hc
