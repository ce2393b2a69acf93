// Shared by the shaders of the FFN op: rows, their experts, and tiles of both. hotcold/kernels/vulkan/ffn.py
// specifies the buffers that they read.
//
// A choice is one expert of one row: number `row * k + place`, with rows counted from the first row of a
// dispatch. Without experts each row has one choice. Values of neurons are stored by choice. Choices of one
// expert are gathered into tiles, which share the reads of its weights.
#include "batch.glsl"

// The rows: all of a step, its decode rows, or the rows after them.
const uint ALL = 0, DECODE = 1, PROMPT = 2;
layout(constant_id = 0) const bool EXPERTS = false;
layout(constant_id = 1) const uint TILE = 16;  // choices of a tile

layout(push_constant) uniform Push {
    uint dim;         // D
    uint most;        // neurons of the largest expert: the distance of two choices' values
    uint bit_words;   // 32-bit words of a choice's bits
    uint mask_words;  // of a row of the mask
    uint chosen;      // k
    uint experts;
    uint kind;        // of rows
    uint first_row;   // among these
    uint most_rows;
    uint most_tiles;
    uint leaves;      // maximum, of an expert's sum
    uint together;    // leaves whose sum is stored as one: a power of two
    uint room;        // such sums of a choice
    uint gate_bias;   // position of the biases in the table: 0 without
    uint up_bias;
    uint down_bias;
    float threshold;
    float limit;
    float alpha;
    uint rows;         // of the bound part of the weights
    uint first;        // the number of the first of these
    uint x_rows;       // capacity of the quantised input
    uint active_words;  // 32-bit words of a row of active-neuron bits
    uint counts_row;
};

// Each expert's four words of Expert; then biases.
layout(std430, binding = 1) readonly buffer TableBuffer { uint table[]; };
// The number of tiles; from word 4 on four words of each tile, then choices in the order of tiles.
layout(std430, binding = 2) buffer TileBuffer { uint tiles[]; };

struct Expert {
    uint begin, end;  // its neurons
    uint word;        // its first 32-bit word in a row of a mask
    uint outputs;     // its first row of down by output
};

Expert expert_of(uint e) {
    return Expert(table[4 * e], table[4 * e + 1], table[4 * e + 2], table[4 * e + 3]);
}
float table_float(uint at) { return uintBitsToFloat(table[at]); }

uint begin_of_rows() { return (kind == PROMPT ? N_DECODE : 0) + first_row; }
uint count_of_rows() {
    const uint end = kind == DECODE ? min(N_DECODE, N_TOKENS) : N_TOKENS, begin = begin_of_rows();
    return min(most_rows, end > begin ? end - begin : 0);
}

struct Tile {
    uint expert, first, count;
};

Tile tile_of(uint number) {
    if (EXPERTS) {
        if (number >= tiles[0]) return Tile(0, 0, 0);
        const uint at = 4 + 4 * number;
        return Tile(tiles[at], tiles[at + 1], tiles[at + 2]);
    }
    const uint first = TILE * number, rows = count_of_rows();
    return Tile(0, first, first < rows ? min(TILE, rows - first) : 0);
}

// The choice at a place in a tile, and its row of the step.
uint choice_of(Tile tile, uint place) {
    return EXPERTS ? tiles[4 + 4 * most_tiles + tile.first + place] : tile.first + place;
}
uint row_of(uint choice) { return begin_of_rows() + choice / chosen; }

// --- the order in which the neurons' outputs are added: see Reference.down_sum ---

uint leaves_of(Expert e) { return clamp((e.end - e.begin + 63) / 64 / 2, 1, leaves); }
// The first neuron of a leaf, counted from the expert's first.
uint leaf_begin(Expert e, uint leaf) {
    const uint neurons = e.end - e.begin;
    return min((neurons + 63) / 64 * leaf / leaves_of(e) * 64, neurons);
}
