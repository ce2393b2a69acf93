// Down weights by neuron: rows of blocks or, with PANELS, panels. In panels, blocks are along the neurons,
// and blocks that share scales are stored together: first the scales of all outputs, then each neuron's
// codes. The including shader defines QUADS before: the number of quads (blocks.glsl) of an invocation.
#include "blocks.glsl"
layout(constant_id = 2) const uint TYPE = F32;
layout(std430, binding = 3) readonly buffer WeightBuffer { uint weights[]; };
layout(std430, binding = 3) readonly buffer WeightBuffer2 { uvec2 weights2[]; };
layout(std430, binding = 3) readonly buffer WeightBuffer4 { uvec4 weights4[]; };

#ifdef PANELS
// Neurons of a panel.
const uint PANEL = TYPE == Q4_K || TYPE == Q5_K || TYPE == Q6_K ? 256 : 32;
const uint CODE_BITS =
    TYPE == Q8_0 ? 8 : TYPE == Q6_K ? 6 : TYPE == Q5_0 || TYPE == Q5_1 || TYPE == Q5_K ? 5 : 4;

// Words for all outputs, `wide` of them; 32 outputs share words of high bits. scale_words(): scales of a
// panel. code_words(): codes of a neuron. Scales begin with float16 values (two planes for types with
// minima), then bytes.
uint panel_halves() { return TYPE == MXFP4 ? 0 : has_minimum(TYPE) ? 2 : 1; }
uint panel_bytes() { return TYPE == MXFP4 ? 1 : is_k(TYPE) ? 12 : TYPE == Q6_K ? 16 : 0; }
uint scale_words(uint wide) { return wide / 4 * (2 * panel_halves() + panel_bytes()); }
uint code_words(uint wide) { return wide / 32 * CODE_BITS; }

vec4 half_floats(uvec2 words) {
    return vec4(half_value(words.x & 0xffff), half_value(words.x >> 16), half_value(words.y & 0xffff),
                half_value(words.y >> 16));
}
vec4 bytes_of(uint word) { return vec4(word & 0xff, word >> 8 & 0xff, word >> 16 & 0xff, word >> 24); }
ivec4 signed_bytes(uint word) { return ivec4(word) << ivec4(24, 16, 8, 0) >> 24; }

// The first quad of an invocation, and the distance of its i-th from the first.
uint first_quad(Layout rows_layout, uint invocation) { return QUADS * invocation; }
uint further_quad(uint i) { return i; }

// An invocation's quads of a neuron, as stored.
struct Quads {
    uvec2 codes;                        // a word of each
    uvec4 factors, minima;              // halves: two words of each
    uvec2 factor_bytes, minimum_bytes;  // small scales: a word of each
};

// A word of each quad, and two words.
uvec2 words_at(uint at) { return QUADS == 2 ? weights2[at / 2] : uvec2(weights[at], 0); }
uvec4 pairs_at(uint at) { return QUADS == 2 ? weights4[at / 4] : uvec4(weights2[at / 2], 0, 0); }

uvec2 load_codes(uint at, uint wide, uint quad) {
    if (TYPE == Q8_0) return words_at(at + quad);
    const uint word = weights[at + quad / 2], high = at + wide / 8;
    uvec2 codes = (QUADS == 2 ? uvec2(word, word >> 4) : uvec2(word >> 4 * (quad & 1))) & 0x0f0f0f0fu;
    if (CODE_BITS == 5) codes |= fifth_bits(weights[high + quad / 8] >> 4 * (quad & 7), uvec4(0, 4, 0, 0)).xy;
    if (CODE_BITS == 6) {
        const uint bits = weights[high + quad / 4] >> 2 * (quad & 3);
        codes |= (uvec2(bits, bits >> 2) & 0x03030303u) << 4;
    }
    return codes;
}

Quads load_down(Layout rows_layout, Place at, uint neuron, uint quad) {
    const uint number = neuron - first / PANEL * PANEL, wide = (dim + 31) / 32 * 32, plane = wide / 4;
    const uint panel = number / PANEL * (scale_words(wide) + PANEL * code_words(wide));
    const uint bytes = panel + wide / 2 * panel_halves() + quad;
    const uint run = number % PANEL / (TYPE == Q6_K ? 16 : 32);  // of neurons that share scales
    Quads w;
    w.codes = load_codes(panel + scale_words(wide) + number % PANEL * code_words(wide), wide, quad);
    if (panel_halves() > 0) w.factors = pairs_at(panel + 2 * quad);
    if (panel_halves() > 1) w.minima = pairs_at(panel + wide / 2 + 2 * quad);
    if (TYPE == MXFP4) w.factor_bytes = words_at(bytes);
    if (TYPE == Q6_K) w.factor_bytes = words_at(bytes + run * plane);
    if (is_k(TYPE)) {  // without a branch, which would end the loads that are made ahead
        const uvec2 low = words_at(bytes + (run & 3) * plane);
        const uvec2 high = words_at(bytes + (4 + (run & 3)) * plane);
        const uvec2 mixed = words_at(bytes + (4 + max(run, 4)) * plane);
        const bvec2 small = bvec2(run < 4);
        w.factor_bytes = mix(mixed & 0x0f0f0f0fu | low >> 2 & 0x30303030u, low & 0x3f3f3f3fu, small);
        w.minimum_bytes = mix(mixed >> 4 & 0x0f0f0f0fu | high >> 2 & 0x30303030u, high & 0x3f3f3f3fu, small);
    }
    return w;
}

// The quads, or finite values in their place.
Quads read_if(Quads w, bool needed) {
    w.factors = mix(uvec4(0), w.factors, bvec4(needed));
    w.minima = mix(uvec4(0), w.minima, bvec4(needed));
    if (TYPE == MXFP4) w.factor_bytes = mix(uvec2(0), w.factor_bytes, bvec2(needed));
    return w;
}

// Values of an invocation's i-th quad, exactly as in blocks.py.
vec4 down_values(Quads w, uint quad, uint i) {
    const uint bytes = w.factor_bytes[i];
    precise vec4 factor;
    if (TYPE == MXFP4) {
        factor = vec4(half_power(bytes & 0xff), half_power(bytes >> 8 & 0xff), half_power(bytes >> 16 & 0xff),
                      half_power(bytes >> 24));
    } else {
        factor = half_floats(i == 0 ? w.factors.xy : w.factors.zw);
    }
    if (TYPE == Q6_K) factor = factor * vec4(signed_bytes(bytes));
    if (is_k(TYPE)) factor = factor * bytes_of(bytes);
    const uint codes = is_table(TYPE) ? table_bytes(TYPE, w.codes[i]) : w.codes[i];
    precise vec4 values = factor * code_floats(TYPE, codes);
    if (!has_minimum(TYPE)) return values;
    precise vec4 minimum = half_floats(i == 0 ? w.minima.xy : w.minima.zw);
    if (is_k(TYPE)) minimum = -(minimum * bytes_of(w.minimum_bytes[i]));
    values = values + minimum;
    return values;
}
#else
#define Quads Block
uint first_quad(Layout rows_layout, uint invocation) {
    return stored_quad(TYPE, rows_layout, invocation, QUADS);
}
uint further_quad(uint i) { return shared_quad(TYPE, i, QUADS); }

// Loads an invocation's quads of a neuron, from `quad` on; `codes[0]` begins with their words.
Quads load_down(Layout rows_layout, Place at, uint neuron, uint quad) {
    const uint row = neuron - first, q = quad & 7, words = TYPE == F32 ? 4 : is_quantised(TYPE) ? 1 : 2;
    Quads w;
    if (is_quantised(TYPE)) {
        const uint slot_ = slot_of(rows_layout, row, at), scales_ = scales_at(TYPE, rows_layout);
        LOAD_SCALES_(w, weights, TYPE, rows_layout, row, at)
        LOAD_HIGH_(w, weights, TYPE, rows_layout)
    }
    const uint unit = unit_at(TYPE, rows_layout, row, at, q * units_of(TYPE) / 8), word = words * q & 3;
    const uint taken = units_of(TYPE) == 1 ? QUADS / 2 : words * QUADS;
    if (taken == 4) w.codes[0] = weights4[unit];
    else if (taken == 2) w.codes[0].xy = weights2[2 * unit + word / 2];
    else w.codes[0].x = weights[4 * unit + word];
    return w;
}

// The quads, or finite values in their place.
Quads read_if(Quads w, bool needed) {
    if (is_quantised(TYPE)) w.scale.xy = mix(uvec2(0), w.scale.xy, bvec2(needed));
    else w.codes[0] = mix(uvec4(0), w.codes[0], bvec4(needed));
    return w;
}

// Values of an invocation's i-th quad.
vec4 down_values(Quads w, uint quad, uint i) {
    if (!is_quantised(TYPE)) return unit_values(TYPE, w.codes[0], i);
    const uint further = further_quad(i), place = quad + further & 3;
    const bool upper = QUADS == 1 ? (quad & 4) != 0 : further >= 4;
    return quad_values(TYPE, w, quad_codes(TYPE, w.codes[0][further & 3], w.high, place, upper), upper);
}
#endif
