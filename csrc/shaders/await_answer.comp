#version 450
// Waits until the host has written a layer's answer, but only for a bounded time: no driver guarantees that a
// shader sees host writes, and watchdogs end work that takes seconds. The bounds are for a layer and for a
// step, because a step's layers are in one submit. Lavapipe ends all loops of an invocation after 65,535
// iterations.
layout(local_size_x = 1) in;
layout(std430, set = 0, binding = 0) buffer BatchBuffer { uint batch[]; };
layout(std430, set = 0, binding = 1) volatile readonly buffer Answered { uint answered[]; };
// By layer; the last word counts the unsuccessful polls of this step's shaders.
layout(std430, set = 0, binding = 2) volatile buffer Status { uint status[]; };
layout(push_constant) uniform Layer { uint layer; };

// Maximum number of polls for a layer and for a step. Over PCI Express a poll takes about a microsecond.
layout(constant_id = 0) const uint LOOKS = 40000;
layout(constant_id = 1) const uint LOOKS_OF_STEP = 400000;
const uint ANSWERED = 1, GAVE_UP = 2;

void main() {
    if (batch[0] == 0) return;
    uint step = batch[4];
    uint outcome = GAVE_UP;
    uint total = status.length() - 1;
    uint before = status[total];
    uint looks = min(LOOKS, LOOKS_OF_STEP - min(before, LOOKS_OF_STEP));
    uint polls = 0;
    for (; polls < looks; ++polls) {
        if (answered[layer] == step) {
            outcome = ANSWERED;
            break;
        }
    }
    memoryBarrierBuffer();
    status[total] = before + polls;
    status[layer] = outcome;
    if (outcome == ANSWERED) return;
    // Without rows the following commands do nothing, and the host continues from here.
    batch[0] = 0;
    batch[1] = 0;
    batch[2] = 0;
}
