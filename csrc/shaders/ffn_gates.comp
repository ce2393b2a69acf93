// Copies gates that were computed before to the place of the gate rows' results. For decode rows with
// skipping, lists the neurons that are active for any row of a tile. One workgroup per tile.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "ffn.glsl"
layout(local_size_x = 256) in;
layout(constant_id = 2) const bool LISTED = false;
layout(constant_id = 3) const bool MASKED = false;
layout(std430, binding = 3) readonly buffer MaskBuffer { uint mask[]; };
#include "ffn_lists.glsl"
layout(std430, binding = 6) readonly buffer GateBuffer { float gates[]; };  // [T, N]
layout(std430, binding = 7) writeonly buffer ValueBuffer { float values[]; };

void main() {
    const uint number = gl_WorkGroupID.x;
    const Tile tile = tile_of(number);
    const Expert e = expert_of(tile.expert);
    for (uint i = gl_LocalInvocationID.x; i < most && tile.count > 0; i += 256) {
        bool is_active = false;
        for (uint t = 0; t < tile.count; ++t) {
            const uint choice = choice_of(tile, t);
            const float gate = gates[row_of(choice) * most + i];
            values[choice * most + i] = gate;
            const bool named = !MASKED || (mask_word(row_of(choice), e, i / 32) >> i % 32 & 1) != 0;
            is_active = is_active || (named && gate > threshold);
        }
        if (LISTED && is_active) lists[list_at(1, number, atomicAdd(lists[most_tiles + number], 1))] = i;
    }
}
