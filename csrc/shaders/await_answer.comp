#version 450
// Waits until the host says that a layer's answer lies there, but not for ever: no driver promises that the host is
// heard, and watchdogs end what takes seconds: of a layer, and of a step, whose layers lie in one submit. Lavapipe ends all loops of an invocation after 65,535 iterations.
layout(local_size_x = 1) in;
layout(std430, set = 0, binding = 0) buffer BatchBuffer { uint batch[]; };
layout(std430, set = 0, binding = 1) volatile readonly buffer Answered { uint answered[]; };
// By layer; the last word is how often this step's shaders have looked in vain.
layout(std430, set = 0, binding = 2) volatile buffer Status { uint status[]; };
layout(push_constant) uniform Layer { uint layer; };

// How often it looks, for a layer and in a step. Over PCI Express a look takes about a microsecond.
layout(constant_id = 0) const uint LOOKS = 40000;
layout(constant_id = 1) const uint LOOKS_OF_STEP = 400000;
const uint ANSWERED = 1, GAVE_UP = 2;

void main() {
    if (batch[0] == 0) return;
    uint step = batch[4];
    uint seen = GAVE_UP;
    uint total = status.length() - 1;
    uint before = status[total];
    uint looks = min(LOOKS, LOOKS_OF_STEP - min(before, LOOKS_OF_STEP));
    uint in_vain = 0;
    for (; in_vain < looks; ++in_vain) {
        if (answered[layer] == step) {
            seen = ANSWERED;
            break;
        }
    }
    memoryBarrierBuffer();
    status[total] = before + in_vain;
    status[layer] = seen;
    if (seen == ANSWERED) return;
    // No rows are left: what follows does nothing, and the host goes on from here.
    batch[0] = 0;
    batch[1] = 0;
    batch[2] = 0;
}
