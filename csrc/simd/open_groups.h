// The source of a row's groups: the packed row, or for opened types bytes and floats in L1, written by one
// short function for each type. So all kernels are compiled once for all opened types, and memory only
// delivers their few bits.
#pragma once
#include <type_traits>

#include "simd/block_types.h"
#include "simd/stream.h"

namespace hc {

// An opened group: word w of block l is words[w][l], four codes of BlockOpened. A block's halves have
// separate scales, and minima if the type has any.
struct Opened {
    alignas(64) uint32_t words[kBlock / 4][kLanes];
    float scale[2][kLanes], minimum[2][kLanes];
};

// Opens the group of `lanes` blocks that starts at `block` of a row of `blocks`.
struct Opening {
    void (*open)(const uint8_t* row, int64_t blocks, int64_t block, int lanes, Opened& to);
    int bytes;  // of 256 weights
    bool has_minimum;
    // The dot product of a row with token t without opening it, if it pays; or null.
    void (*dot)(const uint8_t* row, const Input& in, int t, float& dot, Stream& stream) = nullptr;
};
const Opening* HC_OWN(opening_of)(Type);  // defined in isa/other_dots.cpp by open_types.h

namespace {

// A row as the kernels take it, and the factor of its scales.
struct OpenedRow {
    const uint8_t* at;
    const Opening* opening;
    float factor;
};
template <class B> using RowOf = std::conditional_t<B::opened, OpenedRow, const uint8_t*>;
// Row `number` of `rows`, stored at `at`.
template <class B> HC_INLINE RowOf<B> row_of(const Rows& rows, int64_t number, const uint8_t* at) {
    if constexpr (B::opened)
        return {at, HC_OWN(opening_of)(rows.type), rows.factors ? rows.factors[number] : 1};
    else
        return (void)number, at;
}
template <class B> HC_INLINE RowOf<B> row_of(const Rows& rows, int64_t number) {
    return row_of<B>(rows, number, rows.row(number));
}

// Opens the group at `block` of a row.
HC_NOINLINE inline void open_group(const OpenedRow& row, int64_t blocks, int64_t block, int lanes,
                                   Opened& to) {
    row.opening->open(row.at, blocks, block, lanes, to);
    if (row.factor == 1) return;
    for (int half = 0; half < 2; ++half)
        for (int l = 0; l < lanes; ++l) {
            to.scale[half][l] *= row.factor;
            if (row.opening->has_minimum) to.minimum[half][l] *= row.factor;
        }
}

// Bytes of `blocks` blocks of a row.
template <class B> HC_INLINE int bytes_of(const RowOf<B>& row, int blocks) {
    if constexpr (B::opened)
        return blocks * row.opening->bytes / 8;
    else
        return blocks * (B::header_quarters + 16 * B::units) / 4;
}

// load_unit(): unit k of some lanes, from a group of `lanes` blocks whose codes start at `codes`.
// load_units(): all units.
HC_INLINE I load_unit(const uint8_t* codes, int k, int lanes, int n) {
    const uint8_t* at = codes + k * 4 * lanes;
    return n == Vec::width ? Vec::load_i(at) : Vec::load_i(at, n);
}
template <int Units> HC_INLINE void load_units(const uint8_t* codes, int lanes, int n, I (&unit)[Units]) {
    unroll<0, Units>([&](auto k) HC_INLINE_LAMBDA {
        constexpr int K = decltype(k)::value;
        unit[K] = load_unit(codes, K, lanes, n);
    });
}
// Calls fn(load); load(p) loads the n words at p, at most `Most`. Each n that needs no mask has a separate
// copy.
template <class V, int Most = V::width, class Fn> HC_INLINE void with_load(int n, Fn&& fn) {
    if constexpr (Most == V::width)
        if (n == V::width) return fn([](const uint8_t* p) HC_INLINE_LAMBDA { return V::load_i(p); });
    if constexpr (V::loads_first) {
        if (n == 2) return fn([](const uint8_t* p) HC_INLINE_LAMBDA { return V::template load_first<2>(p); });
        if (n == 4) return fn([](const uint8_t* p) HC_INLINE_LAMBDA { return V::template load_first<4>(p); });
        if constexpr (Most == V::width)
            if (n == 6)
                return fn([](const uint8_t* p) HC_INLINE_LAMBDA { return V::template load_first<6>(p); });
    }
    fn([n](const uint8_t* p) HC_INLINE_LAMBDA { return V::load_i(p, n); });
}

template <class B> inline int64_t codes_of(int64_t blocks, int64_t block) {
    return blocks * B::header_quarters / 4 + block * B::units * 4;
}

// A group's units and heads: of lanes [l, l + n).
template <class B, bool = B::opened> struct Group {
    const uint8_t* row;
    int64_t blocks, block;
    int lanes;

    static constexpr bool has_minimum() { return B::has_minimum; }
    HC_INLINE const uint8_t* codes(int l) const { return row + codes_of<B>(blocks, block) + 4 * l; }
    HC_INLINE I unit(int k, int l, int n) const { return load_unit(codes(l), k, lanes, n); }
    HC_INLINE void load(int l, int n, I (&unit)[B::units]) const {
        with_load<Vec>(n, [&](auto load) HC_INLINE_LAMBDA {
            unroll<0, B::units>([&](auto k) HC_INLINE_LAMBDA {
                constexpr int K = decltype(k)::value;
                unit[K] = load(codes(l) + K * 4 * lanes);
            });
        });
    }
    HC_INLINE Head head(int l, int n) const { return B::head({row, blocks, block + l, n}); }
};
template <class B> struct Group<B, true> {
    const Opened* opened;
    bool minima;

    HC_INLINE bool has_minimum() const { return minima; }
    HC_INLINE I unit(int k, int l, int n) const {
        return load_unit(reinterpret_cast<const uint8_t*>(opened->words[0] + l), k, kLanes, n);
    }
    HC_INLINE void load(int l, int n, I (&unit)[B::units]) const {
        load_units<B::units>(reinterpret_cast<const uint8_t*>(opened->words[0] + l), kLanes, n, unit);
    }
    HC_INLINE Head head(int l, int n) const {
        const auto lanes = [&](const float* from) HC_INLINE_LAMBDA {
            return n == Vec::width ? Vec::load(from + l) : Vec::load(from + l, n);
        };
        Head head{lanes(opened->scale[0]), lanes(opened->scale[1]), Vec::zero()};
        if (B::has_minimum && minima) {
            head.minimum = lanes(opened->minimum[0]);
            head.high_minimum = lanes(opened->minimum[1]);
        }
        return head;
    }
};

// The last blocks of two rows, at most half a vector of each: one row's in the low lanes, the other's in the
// high lanes.
template <class B, class V> struct GroupOfTwo {
    Group<B> a, b;

    static constexpr bool has_minimum() { return B::has_minimum; }
    HC_INLINE void load(int l, int n, I (&unit)[B::units]) const {
        with_load<V, V::width / 2>(n, [&](auto load) HC_INLINE_LAMBDA {
            unroll<0, B::units>([&](auto k) HC_INLINE_LAMBDA {
                constexpr int K = decltype(k)::value;
                const int at = K * 4 * a.lanes;
                unit[K] = V::low_halves(load(a.codes(l) + at), load(b.codes(l) + at));
            });
        });
    }
    HC_INLINE Head head(int l, int n) const {
        const Head low = a.head(l, n), high = b.head(l, n);
        return {V::low_halves(low.scale, high.scale), V::low_halves(low.high_scale, high.high_scale),
                V::low_halves(low.minimum, high.minimum)};
    }
};

// Buffers for the opened groups of N rows.
template <class B, int N, bool = B::opened> struct GroupScratch {};
template <class B, int N> struct GroupScratch<B, N, true> {
    Opened opened[N];
};

// The group at `block` of row k for the lanes from l on; opens it if l is 0.
template <class B, int N> HC_INLINE Group<B> group_of(const RowOf<B>& row, int64_t blocks, int64_t block,
                                                      int lanes, int l, GroupScratch<B, N>& scratch,
                                                      int k = 0) {
    if constexpr (B::opened) {
        if (l == 0) open_group(row, blocks, block, lanes, scratch.opened[k]);
        return {&scratch.opened[k], row.opening->has_minimum};
    } else {
        (void)l, (void)scratch, (void)k;
        return {row, blocks, block, lanes};
    }
}

}  // namespace
}  // namespace hc
