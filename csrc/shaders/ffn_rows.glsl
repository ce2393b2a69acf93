// Dot products of weight rows with the rows of a tile: gates, ups, and down by output if all of it is read.
//
// A workgroup takes NEURONS weight rows of a tile, and LANES invocations for each. An invocation sums the
// blocks of one chunk of a row; the chunks' sums are added in order. Neighbouring invocations take
// neighbouring rows, as in gemv.comp. With GATE_AND_UP it computes a gate and an up row of each neuron.
#include "ffn.glsl"
#include "activation.glsl"
#include "ffn_stages.glsl"

const uint SUMS = 0, OUT = 1, ADDED = 2;  // sums of choices; the rows of the op's output, or added to them

layout(local_size_x = 256) in;
layout(constant_id = 2) const uint TYPE = 0;
layout(constant_id = 3) const uint STAGE = GATE;
layout(constant_id = 4) const uint LISTED = 0;  // 1, 2: rows of the tile's first or second list
layout(constant_id = 5) const bool MASKED = false;
layout(constant_id = 6) const bool SKIP = false;
layout(constant_id = 7) const uint ACTIVATION = RELU;
layout(constant_id = 8) const uint LANES = 32;  // at least a row's chunks
layout(constant_id = 9) const bool BITS = true;  // down or a report reads the bits
layout(constant_id = 10) const uint RESULT = SUMS;  // where outputs go
layout(std430, binding = 3) readonly buffer MaskBuffer { uint mask[]; };
#include "ffn_lists.glsl"
layout(std430, binding = 6) readonly buffer WeightBuffer { uint weights[]; };
layout(std430, binding = 6) readonly buffer WeightBuffer4 { uvec4 weights4[]; };
layout(std430, binding = 7) readonly buffer CodeBuffer { uvec4 x4[]; };
layout(std430, binding = 7) readonly buffer FactorBuffer { uvec2 x_factors[]; };
layout(std430, binding = 7) readonly buffer InputBuffer { float x_values[]; };
layout(std430, binding = 7) readonly buffer InputBuffer4 { vec4 x_values4[]; };
layout(std430, binding = 8) buffer ValueBuffer { float values[]; };

const uint NEURONS = 256 / LANES;  // at most 32
uint input_rows[TILE];
uint inputs;
#define T TILE
#define INPUTS (TILE == 1 ? 1 : inputs)  // a constant lets compilers load ahead
#define INPUT_ROWS x_rows
#define ROWS NEURONS
uint input_row(uint t) { return input_rows[t]; }
#include "dot.glsl"
#ifdef GATE_AND_UP
layout(std430, binding = 9) readonly buffer GateBuffer { uint gate_weights[]; };
layout(std430, binding = 9) readonly buffer GateBuffer4 { uvec4 gate_weights4[]; };
#define CHUNK_DOTS gate_dots
#define WEIGHTS gate_weights
#define WEIGHTS4 gate_weights4
#include "chunk_dots.glsl"
#endif

const uint TOTALS = (TILE + LANES - 1) / LANES;  // most totals of an invocation

shared uint active_gates;  // a bit for each of these neurons
shared uint listed_at;     // the position of the first of them in the second list

// The number of an expert's row at a position among the computed rows.
uint row_at(uint tile, uint place) { return LISTED == 0 ? place : lists[list_at(LISTED - 1, tile, place)]; }

void keep_sums(float sums[TILE]) {
    [[unroll]] for (uint t = 0; t < TILE; ++t) partial[t * 256 + gl_LocalInvocationID.x] = sums[t];
    barrier();
}

float with_bias(uint bias, uint number, float total) {
    precise float v = total;
    if (bias != 0) v = v + table_float(bias + number);
    return v;
}

// Without experts a choice is a row.
void write_output(uint choice, uint i, float total) {
    precise float v = total;
    if (RESULT == SUMS) {
        values[choice * dim + i] = v;
        return;
    }
    const uint at = row_of(choice) * dim + i;
    v = with_bias(down_bias, i, v);
    if (RESULT == ADDED) v = values[at] + v;
    values[at] = v;
}

// `gate`: of the same neuron, if it was computed here.
void finish(Tile tile, Expert e, uint t, uint i, float gate, float total) {
    const uint choice = choice_of(tile, t), at = choice * most + i;
    if (STAGE == OUTPUT) {
        write_output(choice, i, total);
        return;
    }
    precise float v = with_bias(bias_of(STAGE), e.begin + i, total);
    const bool named = !MASKED || (mask_word(row_of(choice), e, i / 32) >> i % 32 & 1) != 0;
    if (STAGE == GATE) {
        if (SKIP && named && v > threshold) atomicOr(active_gates, 1u << gl_LocalInvocationID.x % NEURONS);
        values[at] = v;
        return;
    }
#ifdef GATE_AND_UP
    const float own_gate = with_bias(gate_bias, e.begin + i, gate);
#else
    const float own_gate = STAGE == UP ? values[at] : 0;
#endif
    v = STAGE == UP ? coefficient(ACTIVATION, own_gate, v, threshold, limit, alpha)
                    : activate(ACTIVATION, v, threshold);
    if (!named) v = 0;
    if (BITS && v != 0) atomicOr(bits[choice * bit_words + i / 32], 1u << i % 32);
    values[at] = v;
}

void main() {
    const uint own = gl_LocalInvocationID.x, number = gl_WorkGroupID.y, begin = gl_WorkGroupID.x * NEURONS;
    const Tile tile = tile_of(number);
    if (tile.count == 0) return;
    const Expert e = expert_of(tile.expert);
    const uint neurons = e.end - e.begin, every = STAGE != OUTPUT ? neurons : neurons > 0 ? dim : 0;
    const uint count = LISTED == 0 ? every : lists[LISTED == 1 ? number : most_tiles + number];
    if (begin >= count) return;
    fill_code_pairs(TYPE, own, 256);
    if (own == 0) active_gates = 0;

    inputs = tile.count;
    [[unroll]] for (uint t = 0; t < TILE; ++t) {  // constant positions, so that they are in registers
        const uint choice = choice_of(tile, min(t, inputs - 1));
        input_rows[t] = STAGE == OUTPUT ? choice : row_of(choice);
    }
    const uint columns = STAGE == OUTPUT ? neurons : dim, chunk = own / NEURONS;
    const uint i = row_at(number, min(begin + own % NEURONS, count - 1));
    const uint row = (STAGE == OUTPUT ? e.outputs : e.begin) + i - first;  // of the part that is bound
    const bool within = begin + own % NEURONS < count && row < rows;
    const Layout m = layout_of(rows, columns);
    float sums[TILE];
    [[unroll]] for (uint t = 0; t < TILE; ++t) sums[t] = 0;
    float gates[TOTALS];
    [[unroll]] for (uint k = 0; k < TOTALS; ++k) gates[k] = 0;
#ifdef GATE_AND_UP  // both rows are read before the chunks of one are added
    float gate_sums[TILE];
    [[unroll]] for (uint t = 0; t < TILE; ++t) gate_sums[t] = 0;
    if (within && chunk < m.chunks) gate_dots(m, columns, row, chunk, gate_sums);
#endif
    if (within && chunk < m.chunks) chunk_dots(m, columns, row, chunk, sums);
#ifdef GATE_AND_UP
    keep_sums(gate_sums);
    [[unroll]] for (uint k = 0; k < TOTALS; ++k)
        if (chunk + k * LANES < TILE) gates[k] = chunks_sum(m, own % NEURONS, chunk + k * LANES);
    barrier();
#endif
    keep_sums(sums);
    // One invocation per choice, or per LANES-th choice.
    [[unroll]] for (uint k = 0; k < TOTALS; ++k) {
        const uint t = chunk + k * LANES;
        if (within && t < tile.count) finish(tile, e, t, i, gates[k], chunks_sum(m, own % NEURONS, t));
    }
    if (STAGE != GATE || !SKIP) return;
    barrier();
    if (own == 0 && active_gates != 0) listed_at = atomicAdd(lists[most_tiles + number], bitCount(active_gates));
    barrier();
    if (own < NEURONS && (active_gates >> own & 1) != 0)
        lists[list_at(1, number, listed_at + bitCount(active_gates & (1u << own) - 1))] = i;
}
