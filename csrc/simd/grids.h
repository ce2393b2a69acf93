// The grids of IQ1, IQ2 and IQ3, whose entries a block selects by number; compiled once.
#pragma once
#include <cstdint>

namespace hc {

template <class Word, int N> struct Grid {
    Word at[N];
};

// Four codes, or eight, a byte each.
extern const Grid<uint32_t, 256> kGridIQ3_XXS;
extern const Grid<uint32_t, 512> kGridIQ3_S;
extern const Grid<uint64_t, 256> kGridIQ2_XXS;
extern const Grid<uint64_t, 512> kGridIQ2_XS;
extern const Grid<uint64_t, 1024> kGridIQ2_S;
// Eight codes of -8, 0 or 8, plus 16.
extern const Grid<uint64_t, 2048> kGridIQ1;

}  // namespace hc
