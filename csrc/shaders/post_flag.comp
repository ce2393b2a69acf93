#version 450
#extension GL_GOOGLE_include_directive : require
// Tells the host that a layer's mailbox is full. A shader's store that the host polls is outside Vulkan's
// memory model: a link uses this only if a measurement has shown that it works.
#include "batch.glsl"
layout(local_size_x = 1) in;
layout(std430, set = 0, binding = 1) readonly buffer Answered { uint answered[]; };
layout(std430, set = 0, binding = 2) volatile buffer Posted { uint posted[]; };
layout(push_constant) uniform Layer { uint layer; };

void main() {
    if (N_TOKENS == 0) return;
    memoryBarrierBuffer();
    posted[layer] = STEP;
}
