// Dot products of weight rows with the rows of a tile of prompt rows: the same bits as ffn_rows.comp, for
// many rows and without masks.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "ffn.glsl"
#include "activation.glsl"
#include "ffn_stages.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 2) const uint TYPE = 0;
layout(constant_id = 3) const uint STAGE = GATE;
layout(constant_id = 4) const uint ACTIVATION = RELU;
layout(std430, binding = 3) readonly buffer WeightBuffer { uint weights[]; };
layout(std430, binding = 3) readonly buffer WeightBuffer4 { uvec4 weights4[]; };
layout(std430, binding = 4) readonly buffer CodeBuffer { uvec4 x4[]; };
layout(std430, binding = 4) readonly buffer FactorBuffer { uvec2 x_factors[]; };
layout(std430, binding = 4) readonly buffer InputBuffer { float x_values[]; };
layout(std430, binding = 4) readonly buffer InputBuffer4 { vec4 x_values4[]; };
layout(std430, binding = 5) buffer ValueBuffer { float values[]; };

Tile tile;
Expert expert;
uint first_row_of_expert;  // in the part that is bound

#define TILE_INPUTS TILE
#define INPUT_ROWS x_rows
uint weight_row(uint o) { return first_row_of_expert + o; }
uint input_row(uint j) {
    const uint choice = choice_of(tile, j);
    return STAGE == OUTPUT ? choice : row_of(choice);
}

void store(uint o, uint j, float total) {
    const uint at = choice_of(tile, j) * (STAGE == OUTPUT ? dim : most) + o;
    const uint bias = bias_of(STAGE);
    precise float v = total;
    if (bias != 0) v = v + table_float(bias + expert.begin + o);
    if (STAGE == UP) v = coefficient(ACTIVATION, values[at], v, threshold, limit, alpha);
    if (STAGE == ONLY_UP) v = activate(ACTIVATION, v, threshold);
    values[at] = v;
}

#include "gemm.glsl"

void main() {
    tile = tile_of(gl_WorkGroupID.x);  // tiles of the same weights are neighbours, as in gemm.comp
    if (tile.count == 0) return;
    expert = expert_of(tile.expert);
    const uint neurons = expert.end - expert.begin, columns = STAGE == OUTPUT ? neurons : dim;
    if (neurons == 0) return;
    const uint begin = STAGE == OUTPUT ? expert.outputs : expert.begin;
    const uint count = STAGE == OUTPUT ? dim : neurons;
    first_row_of_expert = begin - first;
    // The expert's neurons in this part.
    const uint start = max(begin, first) - begin, end = min(begin + count, first + rows);
    const uint first_output = start + gl_WorkGroupID.y * TILE_OUTPUTS;
    if (begin + first_output >= end) return;
    gemm_tile(layout_of(rows, columns), columns, first_output, end - begin, 0, tile.count);
}
