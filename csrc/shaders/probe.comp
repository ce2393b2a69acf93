// Does the operations that other shaders rely on, one at a time: hotcold/kernels/vulkan/probe.py compares the
// results with the required ones.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_spirv_intrinsics : require
#include "activation.glsl"
#include "half.glsl"
#include "scales.glsl"
#include "tree.glsl"

// As in blocks.glsl.
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6019, 6018], id = 4450)
int sdot(uint a, uint b, spirv_literal int packed4x8);

layout(local_size_x = 256) in;
layout(std430, binding = 0) readonly buffer Given { uint given[]; };
layout(std430, binding = 1) writeonly buffer Found { uint found[]; };
layout(std430, binding = 2) coherent buffer Changed { uint changed[]; };  // in the device's own memory
layout(push_constant) uniform Push { uint operation, from, to; };

// In the order of probe.py.
const uint PRODUCT_SUM = 0, SUM = 1, DOT = 2, ROUND = 3, HALF_VALUE = 4, HALF_OF = 5, SCALE = 6, INVERSE = 7;
const uint EXPONENTIAL = 8, TREE = 9, LARGEST = 10, BITS = 11, COMPARE = 12, QUOTIENT = 13, ROOT = 14;
const uint HARDWARE_HALF = 15;

uint word(uint i) { return given[from + 3 * gl_GlobalInvocationID.x + i]; }
float number(uint i) { return uintBitsToFloat(word(i)); }

// Sums over the workgroup if the workgroup's word has a bit.
float sums_where_chosen() {
    const uint chosen = given[from + 3 * 256 * gl_WorkGroupID.x + 1];
    precise float value = number(0), sum = 0.0;
    for (uint i = 0; i < 8; ++i) {
        if ((chosen >> i & 1u) == 0u) continue;
        sum = sum + group_sum(value);
        value = value * 0.75;
    }
    return sum;
}

// Two invocations change the halves of a word.
void change_bits() {
    const uint at = gl_GlobalInvocationID.x, mask = 0xffffu << 16 * (at & 1u);
    changed[at] = word(1);
    memoryBarrierBuffer();
    barrier();
    atomicAnd(changed[at & ~1u], ~mask);
    atomicOr(changed[at & ~1u], word(0) & mask);
    memoryBarrierBuffer();
    barrier();
    found[to + at] = changed[at];
}

void main() {
    if (operation == BITS) {
        change_bits();
        return;
    }
    uint y = 0;
    if (operation == TREE) y = floatBitsToUint(sums_where_chosen());
    if (operation == LARGEST) y = floatBitsToUint(group_max(number(0)));
    if (operation == PRODUCT_SUM) {
        precise float product = number(0) * number(1);
        precise float sum = product + number(2);
        y = floatBitsToUint(sum);
    }
    if (operation == SUM) {
        precise float sum = number(0) + number(1);
        sum = sum + number(2);
        y = floatBitsToUint(sum);
    }
    if (operation == DOT) y = floatBitsToUint(float(int(word(2)) * sdot(word(0), word(1), 0)));
    if (operation == ROUND) y = uint(int(roundEven(number(0))));
    if (operation == HALF_VALUE) y = floatBitsToUint(half_value(gl_GlobalInvocationID.x));
    if (operation == HARDWARE_HALF) y = floatBitsToUint(hardware_half_value(gl_GlobalInvocationID.x));
    if (operation == HALF_OF) y = half_of(word(0));
    if (operation == SCALE) y = floatBitsToUint(scale_of(word(0)));
    if (operation == INVERSE) y = floatBitsToUint(inverse_of(word(0)));
    if (operation == EXPONENTIAL) y = floatBitsToUint(exponential(number(0)));
    if (operation == COMPARE) y = uint(number(0) > number(1)) | uint(number(0) < number(1)) << 1;
    if (operation == QUOTIENT) {
        precise float quotient = number(0) / number(1);
        y = floatBitsToUint(quotient);
    }
    if (operation == ROOT) y = floatBitsToUint(sqrt(number(0)));
    found[to + gl_GlobalInvocationID.x] = y;
}
