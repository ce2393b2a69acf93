// Packs matrices by output: as panels, or floats transposed.
#include <stdexcept>
#include <string>

#include "pack/pack.h"
#include "pack/pack_types.h"

namespace hc {

namespace {

// Transposes the bits of eight bytes, for sixteen byte columns at once: bit i of row j becomes bit j of row
// i.
void transpose_bits(Bytes16 (&rows)[8]) {
    for (int i = 0; i < 4; ++i) exchange<4>(rows[i], rows[i + 4], 0x0f);
    for (int i = 0; i < 8; i += 4) {
        exchange<2>(rows[i], rows[i + 2], 0x33);
        exchange<2>(rows[i + 1], rows[i + 3], 0x33);
    }
    for (int i = 0; i < 8; i += 2) exchange<1>(rows[i], rows[i + 1], 0x55);
}

// The same for pairs of bits: pair i of row j becomes pair j of row i.
void transpose_pairs(Bytes16 (&rows)[4]) {
    exchange<4>(rows[0], rows[2], 0x0f);
    exchange<4>(rows[1], rows[3], 0x0f);
    exchange<2>(rows[0], rows[1], 0x33);
    exchange<2>(rows[2], rows[3], 0x33);
}

// The same for bytes within one vector: each of its four words is a row.
Bytes16 transpose_bytes(Bytes16 a) {
    const Bytes16 even = zip_low<1>(a, zip_high<8>(a, a));
    return zip_low<1>(even, zip_high<8>(even, even));
}

constexpr int kColumn = 16;  // neurons whose codes fill 16 bytes of a file block, or one nibble of each

// Units of sixteen neurons before their lanes are interleaved: a word per neuron.
template <int Units> struct Column {
    alignas(64) uint8_t words[Units][kLanes][4 * kColumn];
};

// Four vectors with one byte of each neuron become words of four bytes.
void put_words(Bytes16 (&bytes)[4], uint8_t* to) {
    const Bytes16 low[2] = {zip_low<1>(bytes[0], bytes[1]), zip_low<1>(bytes[2], bytes[3])};
    const Bytes16 high[2] = {zip_high<1>(bytes[0], bytes[1]), zip_high<1>(bytes[2], bytes[3])};
    store(to, zip_low<2>(low[0], low[1]));
    store(to + 16, zip_high<2>(low[0], low[1]));
    store(to + 32, zip_low<2>(high[0], high[1]));
    store(to + 48, zip_high<2>(high[0], high[1]));
}

// Position of a group of outputs in a panel: row `k` starts at codes + k * row.
struct Group {
    const uint8_t* from;
    int64_t stride;
    int lanes;
    uint8_t* codes;
    int64_t row;
    const uint8_t* block(int lane, int output) const { return from + (lane * kBlock + output) * stride; }
};

// Stores the units of sixteen neurons, from `unit` on, into their rows.
template <int Units> void put_column(const Column<Units>& column, const Group& g, int neuron, int unit) {
    for (int k = 0; k < kColumn; k += 4)
        for (int u = 0; u < Units; ++u) {
            uint8_t* to = g.codes + (neuron + k) * g.row + (unit + u) * 4 * g.lanes;
            const auto& words = column.words[u];
            int l = 0;
            for (; l + 4 <= g.lanes; l += 4) {
                Bytes16 lanes[4];
                for (int i = 0; i < 4; ++i) lanes[i] = load(words[l + i] + 4 * k);
                transpose<4>(lanes);
                for (int i = 0; i < 4; ++i) store(to + i * g.row + 4 * l, lanes[i]);
            }
            for (; l < g.lanes; ++l)
                for (int i = 0; i < 4; ++i) std::memcpy(to + i * g.row + 4 * l, words[l] + 4 * (k + i), 4);
        }
}

// Packs sixteen bytes of nibbles from byte `at` of each block: neurons from `low` on and from `high` on.
void put_nibbles(const Group& g, int at, int low, int high) {
    Column<4> columns[2];
    for (int l = 0; l < g.lanes; ++l)
        for (int u = 0; u < 4; ++u) {
            Bytes16 bytes[2][4];
            for (int c = 0; c < 4; ++c) {
                const Bytes16 a = load(g.block(l, 4 * u + c) + at), b = load(g.block(l, 16 + 4 * u + c) + at);
                bytes[0][c] = low_nibbles(a, b);
                bytes[1][c] = high_nibbles(a, b);
            }
            put_words(bytes[0], columns[0].words[u][l]);
            put_words(bytes[1], columns[1].words[u][l]);
        }
    put_column(columns[0], g, low, 0);
    put_column(columns[1], g, high, 0);
}

// Packs sixteen neurons' bytes from byte `at` of each block.
void put_bytes(const Group& g, int at, int neuron) {
    Column<8> column;
    for (int l = 0; l < g.lanes; ++l)
        for (int u = 0; u < 8; ++u) {
            Bytes16 bytes[4];
            for (int c = 0; c < 4; ++c) bytes[c] = load(g.block(l, 4 * u + c) + at);
            put_words(bytes, column.words[u][l]);
        }
    put_column(column, g, neuron, 0);
}

// Packs the fifth bits of 32 neurons, a word from byte `at` of each block.
void put_fifth_words(const Group& g, int at) {
    Column<1> columns[2];
    for (int l = 0; l < g.lanes; ++l) {
        Bytes16 bits[8];
        for (int w = 0; w < 8; ++w) {
            const auto word = [&](int c) { return word_at(g.block(l, 4 * w + c) + at); };
            bits[w] = words_of(word(0), word(1), word(2), word(3));
        }
        transpose_bits(bits);  // now row i has neurons i, 8 + i, 16 + i and 24 + i: bytes [output, neuron]
        for (int i = 0; i < 8; i += 4) {
            Bytes16 words[4];
            for (int n = 0; n < 4; ++n) words[n] = transpose_bytes(bits[i + n]);
            transpose<4>(words);
            for (int j = 0; j < 4; ++j) store(columns[j / 2].words[0][l] + 4 * (j % 2 * 8 + i), words[j]);
        }
    }
    put_column(columns[0], g, 0, 4);
    put_column(columns[1], g, kColumn, 4);
}

// Packs the fifth bits of the neurons from `first` on in all eight runs, from byte `at` of each block.
void put_fifth_bits(const Group& g, int at, int first) {
    Column<1> columns[8];
    for (int l = 0; l < g.lanes; ++l) {
        Bytes16 runs[8][4];
        for (int c = 0; c < 4; ++c) {
            Bytes16 bits[8];
            for (int w = 0; w < 8; ++w) bits[w] = load(g.block(l, 4 * w + c) + at);
            transpose_bits(bits);
            for (int b = 0; b < 8; ++b) runs[b][c] = bits[b];
        }
        for (int b = 0; b < 8; ++b) put_words(runs[b], columns[b].words[0][l]);
    }
    for (int b = 0; b < 8; ++b) put_column(columns[b], g, b * kBlock + first, 4);
}

// Packs two high bits of the neurons from `first` on in four runs of Q6_K, from byte `at` of each block.
void put_sixth_bits(const Group& g, int at, int first) {
    Column<2> columns[4];
    for (int l = 0; l < g.lanes; ++l)
        for (int u = 0; u < 2; ++u) {
            Bytes16 runs[4][4];
            for (int c = 0; c < 4; ++c) {
                Bytes16 bits[4];
                for (int w = 0; w < 4; ++w) bits[w] = load(g.block(l, 16 * u + 4 * w + c) + at);
                transpose_pairs(bits);
                for (int q = 0; q < 4; ++q) runs[q][c] = bits[q];
            }
            for (int q = 0; q < 4; ++q) put_words(runs[q], columns[q].words[u][l]);
        }
    for (int q = 0; q < 4; ++q) put_column(columns[q], g, q * kBlock + first, 4);
}

// The bytes of a super-block besides its scale and minimum: one for each of sixteen runs (Q6_K), or eight of
// low nibbles and four of high bits.
template <Type T> Bytes16 super_scales(const uint8_t* block) {
    if constexpr (T == Q6_K) return load(block + 192);
    const KScales scales = k_scales(block + 4);
    return words_of(scales.low[0], scales.low[1], scales.high, 0);
}

// Packs the scales of a group in the order of its codes, from output `at` of `count` on.
template <Type T> void put_panel_scales(const Group& g, int64_t at, int64_t count, uint8_t* to) {
    constexpr Layout in = layout_of(T);
    for (int e = 0; e < kBlock; ++e) {
        uint8_t* scales = to + (at + e * g.lanes) * in.scale;
        for (int l = 0; l < g.lanes; ++l)
            std::memcpy(scales + l * in.scale, g.block(l, e) + in.scale_at, in.scale);
        if constexpr (in.minimum > 0) {
            uint8_t* minima = scales + count * in.scale;
            for (int l = 0; l < g.lanes; ++l)
                std::memcpy(minima + l * in.minimum, g.block(l, e) + in.scale, in.minimum);
        }
        if constexpr (is_super(T)) {
            constexpr int regions = T == Q6_K ? 16 : 12;
            Bytes16 bytes[kLanes];
            for (int l = 0; l < kLanes; ++l)
                bytes[l] = l < g.lanes ? super_scales<T>(g.block(l, e)) : fill(0);
            transpose<1>(bytes);
            uint8_t* regional = to + (in.scale + in.minimum) * count + at + e * g.lanes;
            for (int r = 0; r < regions; ++r) {
                uint8_t lanes[kLanes];
                store(lanes, bytes[r]);
                std::memcpy(regional + r * count, lanes, size_t(g.lanes));
            }
        }
    }
}

template <Type T> void pack_panel_of(const Outputs& o, int64_t dim, uint8_t* to) {
    constexpr Layout at = layout_of(T);
    const Panels panels = panels_of(T, dim);
    const int lanes = (o.count + kBlock - 1) / kBlock;
    const Group g{o.from, o.stride, lanes, to + panels.header + o.first / kBlock * 4 * at.units, panels.row};
    put_panel_scales<T>(g, o.first, (dim + kBlock - 1) / kBlock * kBlock, to);
    if constexpr (T == Q8_0) {
        put_bytes(g, at.codes, 0);
        put_bytes(g, at.codes + kColumn, kColumn);
    } else if constexpr (T == Q6_K) {
        for (int half = 0; half < 2; ++half)
            for (int i = 0; i < 4; ++i)  // low nibbles: runs 0 and 1; high nibbles: runs 2 and 3
                put_nibbles(g, at.codes + half * 64 + i * kColumn, half * 128 + i * kColumn,
                            half * 128 + 64 + i * kColumn);
        for (int half = 0; half < 2; ++half)
            for (int i = 0; i < 2; ++i)
                put_sixth_bits(g, at.high + half * 32 + i * kColumn, half * 128 + i * kColumn);
    } else if constexpr (is_super(T)) {
        for (int pair = 0; pair < 4; ++pair)
            for (int i = 0; i < 2; ++i)
                put_nibbles(g, at.codes + pair * 32 + i * kColumn, pair * 64 + i * kColumn,
                            pair * 64 + 32 + i * kColumn);
        for (int i = 0; i < 2 && T == Q5_K; ++i) put_fifth_bits(g, at.high + i * kColumn, i * kColumn);
    } else {
        put_nibbles(g, at.codes, 0, kColumn);
        if constexpr (at.units == 5) put_fifth_words(g, at.high);
    }
}

template <int Size> void transpose_of(const Outputs& o, int64_t columns, uint8_t* to, int64_t stride) {
    constexpr int n = 16 / Size;
    const auto copy_one = [&](int output, int64_t column) {
        std::memcpy(to + column * stride + output * Size, o.from + output * o.stride + column * Size, Size);
    };
    int64_t column = 0;
    for (; column + n <= columns; column += n) {
        int output = 0;
        for (; output + n <= o.count; output += n) {
            Bytes16 tile[n];
            for (int i = 0; i < n; ++i) tile[i] = load(o.from + (output + i) * o.stride + column * Size);
            transpose<Size>(tile);
            for (int i = 0; i < n; ++i) store(to + (column + i) * stride + output * Size, tile[i]);
        }
        for (; output < o.count; ++output)
            for (int i = 0; i < n; ++i) copy_one(output, column + i);
    }
    for (; column < columns; ++column)
        for (int output = 0; output < o.count; ++output) copy_one(output, column);
}

}  // namespace

Panels panels_of(Type type, int64_t dim) {
    if (!is_quantised(type) || is_opened(type))
        throw std::invalid_argument("block type " + std::to_string(int(type)) + " has no panels");
    const BlockSize size = block_size(type);
    const int64_t outputs = (dim + kBlock - 1) / kBlock * kBlock, code_bits = layout_of(type).units;
    return {size.weights, outputs * (size.bytes - size.weights / 8 * code_bits), outputs / 8 * code_bits};
}

void pack_panel(Type type, const Outputs& outputs, int64_t dim, uint8_t* to) {
    with_constant(type, [&](auto constant) { pack_panel_of<decltype(constant)::value>(outputs, dim, to); });
}

void transpose_floats(int bytes, const Outputs& outputs, int64_t columns, uint8_t* to, int64_t stride) {
    if (bytes == 4) return transpose_of<4>(outputs, columns, to, stride);
    transpose_of<2>(outputs, columns, to, stride);
}

}  // namespace hc
