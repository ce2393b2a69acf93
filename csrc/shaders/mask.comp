#version 450
#extension GL_GOOGLE_include_directive : require
// Candidates of the decode rows: a bit for each neuron whose score reaches its threshold. A workgroup makes 8
// words of 32 bits. With experts, only the words of a row's chosen experts are written.
layout(local_size_x = 256) in;
#include "batch.glsl"

layout(std430, binding = 1) readonly buffer Scores { float scores[]; };
layout(std430, binding = 2) readonly buffer Thresholds { float thresholds[]; };
// For each word: its first neuron, the end of its expert's neurons, its expert.
layout(std430, binding = 3) readonly buffer Neurons { uint neurons[]; };
layout(std430, binding = 4) readonly buffer Ids { int ids[]; };
layout(std430, binding = 5) writeonly buffer Mask { uint mask[]; };

layout(push_constant) uniform Push {
    uint all;     // neurons of a row of scores
    uint words;   // of 32 bits, of a row of the mask
    uint chosen;  // experts of a row; 0: no experts
};

shared uint bits[256];

void main() {
    const uint i = gl_LocalInvocationID.x, t = gl_WorkGroupID.y, word = gl_WorkGroupID.x * 8 + i / 32;
    if (t >= N_DECODE) return;
    const bool within = word < words;
    uint bit = 0;
    if (within) {
        const uint neuron = neurons[3 * word] + i % 32;
        if (neuron < neurons[3 * word + 1] && scores[t * all + neuron] >= thresholds[neuron]) bit = 1;
    }
    bits[i] = bit << i % 32;
    barrier();
    if (!within || i % 32 != 0) return;
    bool written = chosen == 0;
    for (uint k = 0; k < chosen; ++k) written = written || ids[t * chosen + k] == int(neurons[3 * word + 2]);
    if (!written) return;
    uint made = 0;
    for (uint k = 0; k < 32; ++k) made |= bits[i + k];
    mask[t * words + word] = made;
}
