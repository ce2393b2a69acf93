// Down weights by neuron: rows of blocks or, with PANELS, panels. In panels, blocks are along the neurons,
// and blocks that share scales are stored together: first the scales of all outputs, then each neuron's
// codes.
#include "blocks.glsl"
layout(constant_id = 2) const uint TYPE = F32;
layout(std430, binding = 3) readonly buffer WeightBuffer { uint weights[]; };
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

vec4 half_floats(uint at) {
    const uint a = weights[at], b = weights[at + 1];
    return vec4(half_value(a & 0xffff), half_value(a >> 16), half_value(b & 0xffff), half_value(b >> 16));
}
vec4 bytes_of(uint word) { return vec4(word & 0xff, word >> 8 & 0xff, word >> 16 & 0xff, word >> 24); }
ivec4 signed_bytes(uint word) { return ivec4(word) << ivec4(24, 16, 8, 0) >> 24; }

// The values of outputs 4 quad to 4 quad + 3, exactly as in blocks.py.
vec4 panel_values(uint neuron, uint quad) {
    const uint wide = (dim + 31) / 32 * 32;
    const uint scales = neuron / PANEL * (scale_words(wide) + PANEL * code_words(wide));
    const uint codes_at = scales + scale_words(wide) + neuron % PANEL * code_words(wide);
    const uint bytes_at = scales + wide / 2 * panel_halves() + quad;
    const uint run = neuron % PANEL / (TYPE == Q6_K ? 16 : 32);
    uint codes;
    if (TYPE == Q8_0) {
        codes = weights[codes_at + quad];
    } else {
        codes = weights[codes_at + quad / 2] >> 4 * (quad & 1) & 0x0f0f0f0fu;
        const uint high = codes_at + wide / 8;
        if (CODE_BITS == 5) codes |= fifth_bits(weights[high + quad / 8], uvec4(4 * (quad & 7))).x;
        if (CODE_BITS == 6) codes |= (weights[high + quad / 4] >> 2 * (quad & 3) & 0x03030303u) << 4;
    }
    ivec4 values = signed_bytes(codes);
    if (is_table(TYPE))
        values = ivec4(code_value(TYPE, values.x), code_value(TYPE, values.y), code_value(TYPE, values.z),
                       code_value(TYPE, values.w));
    precise vec4 scale;
    if (TYPE == MXFP4) {
        const uint powers = weights[bytes_at];
        scale = vec4(half_power(powers & 0xff), half_power(powers >> 8 & 0xff),
                     half_power(powers >> 16 & 0xff), half_power(powers >> 24));
    } else {
        scale = half_floats(scales + 2 * quad);
    }
    precise vec4 minimum = vec4(0);
    if (has_minimum(TYPE)) minimum = half_floats(scales + wide / 2 + 2 * quad);
    if (is_k(TYPE)) {
        const uint plane = wide / 4, low = weights[bytes_at + (run & 3) * plane];
        const uint high = weights[bytes_at + (4 + (run & 3)) * plane];
        uint sixes = low & 0x3f3f3f3fu, least = high & 0x3f3f3f3fu;
        if (run >= 4) {
            const uint mixed = weights[bytes_at + (4 + run) * plane];
            sixes = mixed & 0x0f0f0f0fu | low >> 2 & 0x30303030u;
            least = mixed >> 4 & 0x0f0f0f0fu | high >> 2 & 0x30303030u;
        }
        scale = scale * bytes_of(sixes);
        minimum = -(minimum * bytes_of(least));
    }
    if (TYPE == Q6_K) scale = scale * vec4(signed_bytes(weights[bytes_at + run * (wide / 4)]));
    const int offset = TYPE == Q4_0 ? 8 : TYPE == Q5_0 ? 16 : TYPE == Q6_K ? 32 : 0;
    precise vec4 w = scale * vec4(values - offset);
    if (has_minimum(TYPE)) w = w + minimum;
    return w;
}

// The values of a neuron's row of down for outputs 4 quad to 4 quad + 3.
vec4 down_values(Layout rows_layout, Place at, uint neuron, uint quad) {
    return panel_values(neuron - first / PANEL * PANEL, quad);
}
#else
vec4 down_values(Layout rows_layout, Place at, uint neuron, uint quad) {
    vec4 values;
    LOAD_VALUES(values, weights, TYPE, rows_layout, neuron - first, at, quad & 7)
    return values;
}
#endif
