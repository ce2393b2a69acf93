// Weights of every block type in the device layout of packing.py, and their dot products with quantised
// input.
//
// A row is cut into blocks of 32 weights, and the blocks into chunks of equally many consecutive ones. A dot
// product sums each chunk in order, then the chunks. An invocation takes a chunk. Neighbouring invocations
// must read neighbouring units of 16 bytes. So the blocks of a row are ordered by their number in the chunk
// first, then by chunk (place_in_chunk()); each such run stores all first units first. The codes of all rows
// come first, then their fifth and sixth bits, then the scales.
//
// A shader binds a matrix twice at one binding, as uvec4 NAME4[] and uint NAME[], and reads it through the
// macros below with NAME as an argument. So one shader can read several matrices of different types. `type`
// is ggml's number, a specialisation constant: comparisons with it cost nothing. The rarer types are opened
// on the host: numbers from OPENED on select the table of code values, and a block has two scales.
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_spirv_intrinsics : require
#include "half.glsl"

const uint F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8;
const uint Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20, BF16 = 30, MXFP4 = 39;
const uint OPENED = 64, OPENED_Q2_K = 71;

// OpSDotKHR of four signed bytes each; 0: they are packed into 32 bits.
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6019, 6018], id = 4450)
int sdot(uint a, uint b, spirv_literal int packed4x8);

bool is_quantised(uint type) { return type != F32 && type != F16 && type != BF16; }
bool is_k(uint type) { return type == Q4_K || type == Q5_K; }
bool is_opened(uint type) { return type >= OPENED; }
bool is_table(uint type) { return type == IQ4_NL || type == MXFP4 || is_opened(type); }
// True if the two halves of a block have small scales, in Block.scale.y, besides factors().
bool has_small_scales(uint type) { return type == Q6_K || type == OPENED_Q2_K; }
bool has_minimum(uint type) {
    return type == Q4_1 || type == Q5_1 || is_k(type) || type == OPENED_Q2_K;
}
bool has_fifth_bits(uint type) { return type == Q5_0 || type == Q5_1 || type == Q5_K; }
// 16-byte units of a block's codes.
uint units_of(uint type) {
    return type == F32 ? 8 : type == F16 || type == BF16 ? 4 : type == Q8_0 ? 2 : 1;
}
// Words of a block's fifth or sixth bits.
uint high_words(uint type) { return type == Q6_K ? 2 : has_fifth_bits(type) ? 1 : 0; }

// --- positions in memory ---

struct Layout {
    uint rows;    // of the range that is bound
    uint blocks;  // of a row
    uint chunk;   // blocks of a chunk
    uint chunks;  // of a row: at most 32
    uint last;    // blocks of the last chunk
};

Layout layout_of(uint rows, uint columns) {
    Layout m;
    m.rows = rows;
    m.blocks = (columns + 31) / 32;
    m.chunk = (m.blocks + 31) / 32;
    m.chunks = (m.blocks + m.chunk - 1) / m.chunk;
    m.last = m.blocks - (m.chunks - 1) * m.chunk;
    return m;
}

// The position of a block in any row.
struct Place {
    uint block;  // its number in the row
    uint start;  // blocks stored before the blocks with its number in their chunk
    uint width;  // chunks that have a block of this number: the distance of units
    uint chunk;
};

Place place_in_chunk(Layout m, uint chunk, uint i) {
    Place at;
    at.block = chunk * m.chunk + i;
    at.start = i * m.chunks - (i > m.last ? i - m.last : 0);
    at.width = i < m.last ? m.chunks : m.chunks - 1;
    at.chunk = chunk;
    return at;
}

Place place_of(Layout m, uint block) { return place_in_chunk(m, block / m.chunk, block % m.chunk); }

uint chunk_blocks(Layout m, uint chunk) {
    return chunk + 1 < m.chunks ? m.chunk : chunk + 1 == m.chunks ? m.last : 0;
}

// Invocations can share a row by quads: four weights each (4 q to 4 q + 3). An invocation takes `count` (1, 2
// or 4) quads of a unit: consecutive ones, or in a unit of 32 codes the quads whose codes share words.
//
// Returns the first quad of the i-th share in storage order, so that neighbours read neighbouring bytes.
// After a row's last unit: a quad after its last.
uint stored_quad(uint type, Layout m, uint i, uint count) {
    const uint units = units_of(type), shares = 8 / units / count;  // of a block; of a unit
    uint unit = i / shares;
    if (unit >= units * m.blocks) return 8 * m.blocks;
    const uint whole = m.last * m.chunks * units;  // units of the block numbers that all chunks have
    const bool beyond = unit >= whole;
    const uint width = units * (beyond ? m.chunks - 1 : m.chunks);
    if (beyond) unit -= whole;
    const uint number = unit / width + (beyond ? m.last : 0), within = unit % width;
    const uint chunk = within % (width / units), step = units == 1 && count > 1 ? count / 2 : count;
    return 8 * (chunk * m.chunk + number) + within / (width / units) * (8 / units) + i % shares * step;
}
// The k-th quad of a share after its first.
uint shared_quad(uint type, uint k, uint count) {
    return units_of(type) == 1 && count > 1 ? k / (count / 2) * 4 + k % (count / 2) : k;
}

// Index of unit u of a block's codes in NAME4.
uint unit_at(uint type, Layout m, uint row, Place at, uint u) {
    return units_of(type) * (row * m.blocks + at.start) + u * at.width + at.chunk;
}
// Number of a block among the blocks of all rows, in storage order.
uint slot_of(Layout m, uint row, Place at) { return row * m.blocks + at.start + at.chunk; }
// Words before the fifth and sixth bits, and before the scales.
uint high_at(uint type, Layout m) { return 4 * units_of(type) * m.rows * m.blocks; }
uint scales_at(uint type, Layout m) { return high_at(type, m) + high_words(type) * m.rows * m.blocks; }
// Number of a block's 256 weights of a K type among those of all rows.
uint super_of(Layout m, uint row, Place at) { return row * m.blocks + at.block >> 3; }
// The half of a word that holds the 16 bits of this number.
uint half_bits(uint word, uint half_number) { return word >> 16 * (half_number & 1) & 0xffff; }

// --- a block in memory ---

struct Block {
    uvec4 codes[2];
    uvec2 high;   // fifth or sixth bits
    // `scale`: all four words for Q4_K and Q5_K; for Q6_K the scale's bits, then two signed bytes. Opened
    // types: two floats; Q2_K: two halves, then bytes (two scales and two minima).
    uvec4 scale;
    uint number;  // in the row
};

// Loads block `at` of `row` of a quantised type into a variable of type Block.
#define LOAD_BLOCK(OUT, NAME, TYPE, LAYOUT, ROW, AT)                                                      \
    {                                                                                                     \
        const uint slot_ = slot_of(LAYOUT, ROW, AT), scales_ = scales_at(TYPE, LAYOUT);                   \
        OUT.codes[0] = NAME##4[unit_at(TYPE, LAYOUT, ROW, AT, 0)];                                        \
        if (TYPE == Q8_0) OUT.codes[1] = NAME##4[unit_at(TYPE, LAYOUT, ROW, AT, 1)];                      \
        LOAD_SCALES_(OUT, NAME, TYPE, LAYOUT, ROW, AT)                                                    \
        LOAD_HIGH_(OUT, NAME, TYPE, LAYOUT)                                                               \
    }

#define LOAD_HIGH_(OUT, NAME, TYPE, LAYOUT)                                                               \
    if (has_fifth_bits(TYPE)) OUT.high.x = NAME[high_at(TYPE, LAYOUT) + slot_];                           \
    if (TYPE == Q6_K) {                                                                                   \
        OUT.high.x = NAME[high_at(TYPE, LAYOUT) + 2 * slot_];                                             \
        OUT.high.y = NAME[high_at(TYPE, LAYOUT) + 2 * slot_ + 1];                                         \
    }

#define LOAD_SCALES_(OUT, NAME, TYPE, LAYOUT, ROW, AT)                                                    \
    OUT.number = AT.block;                                                                                \
    if (is_k(TYPE)) {                                                                                     \
        OUT.scale = NAME##4[scales_ / 4 + super_of(LAYOUT, ROW, AT)];                                     \
    } else if (TYPE == Q4_1 || TYPE == Q5_1) {                                                            \
        OUT.scale.x = NAME[scales_ + slot_];                                                              \
    } else if (TYPE == MXFP4) {                                                                           \
        OUT.scale.x = NAME[scales_ + slot_ / 4] >> 8 * (slot_ & 3) & 0xff;                                \
    } else if (TYPE == Q6_K) {                                                                            \
        const uint super_ = super_of(LAYOUT, ROW, AT);                                                    \
        OUT.scale.x = half_bits(NAME[scales_ + (LAYOUT.rows * LAYOUT.blocks + super_) / 2], super_);      \
        OUT.scale.y = half_bits(NAME[scales_ + slot_ / 2], slot_);                                        \
    } else if (is_opened(TYPE)) {                                                                         \
        OUT.scale.x = NAME[scales_ + 2 * slot_];                                                          \
        OUT.scale.y = NAME[scales_ + 2 * slot_ + 1];                                                      \
    } else {                                                                                              \
        OUT.scale.x = half_bits(NAME[scales_ + slot_ / 2], slot_);                                        \
    }

// --- numbers ---

// 2^(exponent - 128), because the table of MXFP4 holds doubled values; the two smallest are denormal.
float half_power(uint exponent) {
    return uintBitsToFloat(exponent < 2 ? (1u << 21) << exponent : exponent - 1 << 23);
}

// Values of the codes as signed bytes, one table after another: first for IQ4_NL and MXFP4, then for opened
// types in order.
const uint CODE_VALUES[32] = uint[32](
    0xbfad9881, 0xf6eaddcf, 0x26190d01, 0x71594535,  // IQ4_NL, IQ4_XS
    0x03020100, 0x0c080604, 0xfdfeff00, 0xf4f8fafc,  // MXFP4, NVFP4
    0xfbfaf9f8, 0xfffefdfc, 0x03020100, 0x07060504,  // Q3_K, TQ1_0, TQ2_0, Q1_0
    0xf7f5f3f1, 0xfffdfbf9, 0x07050301, 0x0f0d0b09,  // IQ3_S
    0x1c140c04, 0x3e342c24, 0xe4ecf4fc, 0xc2ccd4dc,  // IQ3_XXS
    0x002b1908, 0x00000000, 0x00d5e7f8, 0x00000000,  // IQ2
    0x00090701, 0x00000000, 0x00f7f9ff, 0x00000000,  // IQ1
    0x03020100, 0x07060504, 0x0b0a0908, 0x0f0e0d0c);  // Q2_K
int code_value(uint type, uint code) {
    const uint table = type >= OPENED ? type - OPENED : type == MXFP4 ? 1 : 0;
    const uint word = CODE_VALUES[4 * table + (code >> 2)];
    return int(word << 24 - 8 * (code & 3)) >> 24;
}

// For each byte the value of its low code, and 16 bits higher of its high code. A shader whose matrix may
// have a type with a table fills this first, with all invocations.
shared uint code_pairs[256];
void fill_code_pairs(uint type, uint invocation, uint invocations) {
    if (is_table(type)) {
        for (uint byte = invocation; byte < 256; byte += invocations) {
            const uint low = uint(code_value(type, byte & 15)), high = uint(code_value(type, byte >> 4));
            code_pairs[byte] = low & 0xff | (high & 0xff) << 16;
        }
        barrier();
    }
}

// --- dot products with quantised input ---

// A block's codes as signed bytes: of weights 0 to 15, and 16 to 31.
struct Codes {
    uvec4 low, high;
};

uvec2 table_codes(uint word) {
    const uint a = code_pairs[word & 0xff], b = code_pairs[word >> 8 & 0xff];
    const uint c = code_pairs[word >> 16 & 0xff], d = code_pairs[word >> 24];
    const uint even = a | b << 8, odd = c | d << 8;  // weights 0 and 1, then 2 and 3, of both halves
    return uvec2(even & 0xffff | odd << 16, even >> 16 | odd & 0xffff0000);
}

// Bit i of the low four goes to bit 4 of byte i.
uvec4 fifth_bits(uint bits, uvec4 shifts) {
    return ((uvec4(bits) >> shifts & 15u) * 0x204081u & 0x01010101u) << 4;
}

Codes codes_of(uint type, Block w) {
    const uvec4 packed = w.codes[0];
    if (type == Q8_0) return Codes(packed, w.codes[1]);
    if (is_table(type)) {
        const uvec2 a = table_codes(packed.x), b = table_codes(packed.y);
        const uvec2 c = table_codes(packed.z), d = table_codes(packed.w);
        return Codes(uvec4(a.x, b.x, c.x, d.x), uvec4(a.y, b.y, c.y, d.y));
    }
    Codes codes = Codes(packed & 0x0f0f0f0fu, packed >> 4 & 0x0f0f0f0fu);
    if (has_fifth_bits(type)) {
        codes.low |= fifth_bits(w.high.x, uvec4(0, 4, 8, 12));
        codes.high |= fifth_bits(w.high.x, uvec4(16, 20, 24, 28));
    }
    if (type == Q6_K) {
        codes.low |= (uvec4(w.high.x) >> uvec4(0, 2, 4, 6) & 0x03030303u) << 4;
        codes.high |= (uvec4(w.high.y) >> uvec4(0, 2, 4, 6) & 0x03030303u) << 4;
    }
    return codes;
}

// Dot products of the two halves of a block, whose scales differ in Q6_K and opened types.
ivec2 dot_halves(Codes w, uvec4 x_low, uvec4 x_high) {
    ivec2 dots = ivec2(sdot(w.low.x, x_low.x, 0), sdot(w.high.x, x_high.x, 0));
    dots += ivec2(sdot(w.low.y, x_low.y, 0), sdot(w.high.y, x_high.y, 0));
    dots += ivec2(sdot(w.low.z, x_low.z, 0), sdot(w.high.z, x_high.z, 0));
    return dots + ivec2(sdot(w.low.w, x_low.w, 0), sdot(w.high.w, x_high.w, 0));
}

// Sums of the codes of x: of the first 16 and the last 16, which quantise.comp packs into a word.
ivec2 halves_sums(uint packed) { return ivec2(int(packed << 16) >> 16, int(packed) >> 16); }

// The factor of the codes, and the addend of each weight; for opened types except Q2_K, the factors of both
// halves.
vec2 factors(uint type, Block w) {
    if (is_opened(type) && type != OPENED_Q2_K) return uintBitsToFloat(w.scale.xy);
    if (type == MXFP4) return vec2(half_power(w.scale.x), 0);
    const float d = half_value(w.scale.x & 0xffff);
    if (!has_minimum(type)) return vec2(d, 0);
    const float m = half_value(w.scale.x >> 16);
    if (type == OPENED_Q2_K) return vec2(d, -m);
    if (!is_k(type)) return vec2(d, m);
    const uint shift = 8 * (w.number & 3);
    const uint low = w.scale.y >> shift, high = w.scale.z >> shift, mixed = w.scale.w >> shift;
    const bool first = (w.number & 7) < 4;
    const uint scale = first ? low & 63 : mixed & 15 | low >> 2 & 48;
    const uint minimum = first ? high & 63 : mixed >> 4 & 15 | high >> 2 & 48;
    precise const float dx = d * float(scale), mx = m * float(minimum);
    return vec2(dx, -mx);
}

// One block's part of a dot product, from dot_halves(): x_scale and x_sums belong to the block of x.
float block_dot(uint type, Block w, vec2 f, ivec2 dots, float x_scale, uint x_sums) {
    const ivec2 sums = halves_sums(x_sums);
    int dot = dots.x + dots.y;
    if (type == Q4_0) dot -= 8 * (sums.x + sums.y);
    if (type == Q5_0) dot -= 16 * (sums.x + sums.y);
    if (type == Q6_K) {
        const ivec2 scales = ivec2(int(w.scale.y << 24) >> 24, int(w.scale.y << 16) >> 24);
        dot = scales.x * (dots.x - 32 * sums.x) + scales.y * (dots.y - 32 * sums.y);
    }
    int sum = sums.x + sums.y;
    if (type == OPENED_Q2_K) {
        const uvec4 small = uvec4(w.scale.y) >> uvec4(0, 8, 16, 24) & 0xffu;
        dot = int(small.x) * dots.x + int(small.y) * dots.y;
        sum = int(small.z) * sums.x + int(small.w) * sums.y;
    }
    precise float v = f.x * float(is_opened(type) && type != OPENED_Q2_K ? dots.x : dot);
    if (is_opened(type) && type != OPENED_Q2_K) v = v + f.y * float(dots.y);
    if (has_minimum(type)) v = v + f.y * float(sum);
    v = v * x_scale;
    return v;
}

// --- values ---

// Float types: weights 4 q to 4 q + 3 of a block are unit unit_of(q) in F32, half of it in the others.
uint unit_of(uint type, uint q) { return type == F32 ? q : q / 2; }
vec4 unit_values(uint type, uvec4 unit, uint q) {
    if (type == F32) return uintBitsToFloat(unit);
    const uvec2 pair = (q & 1) == 0 ? unit.xy : unit.zw;
    const uvec4 bits = uvec4(pair.x & 0xffff, pair.x >> 16, pair.y & 0xffff, pair.y >> 16);
    if (type == BF16) return uintBitsToFloat(bits << 16);
    return vec4(half_value(bits.x), half_value(bits.y), half_value(bits.z), half_value(bits.w));
}

// Four codes as floats, without the offset of their type.
vec4 code_floats(uint type, uint codes) {
    if (type == Q8_0 || is_table(type)) return vec4(ivec4(codes) << ivec4(24, 16, 8, 0) >> 24);
    const float offset = type == Q4_0 ? 8 : type == Q5_0 ? 16 : type == Q6_K ? 32 : 0;
    precise vec4 values = vec4(uvec4(codes) >> uvec4(0, 8, 16, 24) & 0xffu);  // one instruction a code on AMD
    if (offset != 0) values = values - offset;
    return values;
}

// The file's values of a quad, from its block and its codes, exactly as in blocks.py. `upper`: of weights 16
// to 31.
vec4 quad_values(uint type, Block w, uint codes, bool upper) {
    vec2 f = factors(type, w);
    if (type == Q6_K) {
        const int scale = int(w.scale.y << (upper ? 16 : 24)) >> 24;
        precise const float d = f.x * float(scale);
        f.x = d;
    }
    if (type == OPENED_Q2_K) {
        const uint small = w.scale.y >> (upper ? 8 : 0);
        precise const vec2 dm = f * vec2(small & 0xff, small >> 16 & 0xff);
        f = dm;
    } else if (is_opened(type) && upper) {
        f.x = f.y;
    }
    precise vec4 values = f.x * code_floats(type, codes);
    if (has_minimum(type)) values = values + f.y;
    return values;
}

// The values of four codes of a table, as signed bytes.
uint table_bytes(uint type, uint codes) {
    uint values = 0;
    [[unroll]] for (uint shift = 0; shift < 32; shift += 8)
        values |= (uint(code_value(type, codes >> shift & 15)) & 0xff) << shift;
    return values;
}

// Codes of a quad as four bytes. `upper`: of weights 16 to 31; `place`: among these or the first 16.
uint quad_codes(uint type, uint word, uvec2 high, uint place, bool upper) {
    if (type == Q8_0) return word;
    uint codes = word >> (upper ? 4 : 0) & 0x0f0f0f0fu;
    if (is_table(type)) return table_bytes(type, codes);
    if (has_fifth_bits(type)) codes |= fifth_bits(high.x >> (upper ? 16 : 0), uvec4(4 * place)).x;
    if (type == Q6_K) codes |= ((upper ? high.y : high.x) >> 2 * place & 0x03030303u) << 4;
    return codes;
}

// Loads the values of weights 4 q to 4 q + 3 of block `at` of `row` into a vec4, exactly as in the file.
#define LOAD_VALUES(OUT, NAME, TYPE, LAYOUT, ROW, AT, Q)                                                  \
    if (is_quantised(TYPE)) {                                                                             \
        const uint slot_ = slot_of(LAYOUT, ROW, AT), scales_ = scales_at(TYPE, LAYOUT);                   \
        Block block_;                                                                                     \
        LOAD_SCALES_(block_, NAME, TYPE, LAYOUT, ROW, AT)                                                 \
        if (has_fifth_bits(TYPE)) block_.high.x = NAME[high_at(TYPE, LAYOUT) + slot_];                    \
        if (TYPE == Q6_K) block_.high = uvec2(NAME[high_at(TYPE, LAYOUT) + 2 * slot_ + ((Q) >> 2)]);      \
        const uint unit_ = TYPE == Q8_0 ? (Q) >> 2 : 0;                                                   \
        const uint word_ = NAME[4 * unit_at(TYPE, LAYOUT, ROW, AT, unit_) + ((Q) & 3)];                   \
        const bool upper_ = ((Q) & 4) != 0;                                                               \
        OUT = quad_values(TYPE, block_, quad_codes(TYPE, word_, block_.high, (Q) & 3, upper_), upper_);   \
    } else {                                                                                              \
        const uint unit_ = unit_at(TYPE, LAYOUT, ROW, AT, unit_of(TYPE, Q));                           \
        OUT = unit_values(TYPE, NAME##4[unit_], Q);                                                       \
    }
