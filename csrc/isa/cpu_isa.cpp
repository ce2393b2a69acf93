// Picks the kernels that this processor can run.
#include <cstring>
#include <string>

#include "isa/processor.h"
#include "isa/table.h"

namespace hc {

namespace {

// The kernels of `isa`. It shares the kernels of `shared`, except byte products. `built`: 1, or 0 if this
// build lacks them.
#define HC_KERNELS_0(isa, shared) nullptr
#define HC_KERNELS_1(isa, shared)                                                                     \
    [] {                                                                                              \
        static const Kernels k{products_##isa, row_sums_##shared, ffn_sums_##shared, floats_##shared, \
                               states_##shared};                                                      \
        return &k;                                                                                    \
    }
#define HC_CONCAT(a, b) a##b
#define HC_KERNELS(built, isa, shared) HC_CONCAT(HC_KERNELS_, built)(isa, shared)

// The instruction sets that this compiler knows.
struct Known {
    const char* name;
    const Kernels* (*kernels)();
};
constexpr Known kKnown[] = {
// For tests: known_isas() leaves them out.
#ifdef HC_AMX_AVX2
    {"avx2+amx", HC_KERNELS(1, amx_avx2, avx2)},
#endif
#ifdef HC_LOOPS_NEON
    {"neon+loops", HC_KERNELS(1, loops_neon, neon)},
#endif
#ifdef HC_LOOPS_SCALAR
    {"scalar+loops", HC_KERNELS(1, loops_scalar, scalar)},
#endif
#ifdef HC_HAVE_AMX
    {"amx", HC_KERNELS(HC_HAVE_AMX, amx, avx512)},
#endif
#ifdef HC_HAVE_AVX512
    {"avx512", HC_KERNELS(HC_HAVE_AVX512, avx512, avx512)},
#endif
#ifdef HC_HAVE_AVXVNNI
    {"avxvnni", HC_KERNELS(HC_HAVE_AVXVNNI, avxvnni, avx2)},
#endif
#ifdef HC_HAVE_AVXVNNI_EVEX
    {"avxvnni_evex", HC_KERNELS(HC_HAVE_AVXVNNI_EVEX, avxvnni_evex, avx2)},
#endif
#ifdef HC_HAVE_AVX2
    {"avx2", HC_KERNELS(HC_HAVE_AVX2, avx2, avx2)},
#endif
#ifdef HC_HAVE_I8MM
    {"i8mm", HC_KERNELS(HC_HAVE_I8MM, i8mm, neon)},
#endif
#ifdef HC_HAVE_DOTPROD
    {"dotprod", HC_KERNELS(HC_HAVE_DOTPROD, dotprod, neon)},
#endif
#ifdef HC_HAVE_NEON
    {"neon", HC_KERNELS(HC_HAVE_NEON, neon, neon)},
#endif
#ifdef HC_HAVE_SCALAR
    {"scalar", HC_KERNELS(HC_HAVE_SCALAR, scalar, scalar)},
#endif
};

std::string find_tile_fault() {
#if defined(__x86_64__) || defined(_M_X64)
    if (!lists_amx()) return "";
    if (const int error = request_tiles())
        return std::string("Linux refuses AMX's tiles to this process: ") + std::strerror(error);
    for (const Known& known : kKnown)
        if (!std::strcmp(known.name, "amx") && known.kernels && !known.kernels()->tiles_agree())
            return "AMX's tiles and plain loops multiply with different results";
#endif
    return "";
}

}  // namespace

const std::string& tile_fault() {
    static const std::string fault = find_tile_fault();
    return fault;
}

const std::vector<KnownIsa>& known_isas() {
    static const std::vector<KnownIsa> all = [] {
        std::vector<KnownIsa> isas;
        for (const InstructionSet& isa : kInstructionSets)
            for (const Known& known : kKnown)
                if (!std::strcmp(known.name, isa.name)) {
                    const bool runs = isa.runs() && (std::strcmp(isa.name, "amx") || tile_fault().empty());
                    isas.push_back({isa.name, runs, known.kernels ? known.kernels() : nullptr});
                }
        return isas;
    }();
    return all;
}

const Kernels* find_kernels(const char* name) {
    const std::string base(name, std::strcspn(name, "+"));
    for (const KnownIsa& isa : known_isas()) {
        if (!isa.runs || !isa.kernels || (*name && base != isa.name)) continue;
        if (base == name) return isa.kernels;
        for (const Known& loops : kKnown)
            if (!std::strcmp(loops.name, name)) return loops.kernels();
    }
    return nullptr;
}

}  // namespace hc
