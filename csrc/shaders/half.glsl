// float16 with the same result on every device. Some drivers flush small values: there, integers compute a
// half's value, with 20 instructions in place of 1. Some fold a product into a conversion, which then rounds
// once and not twice, so integers always round to a half.

// True if the device gives the right value of every half (kernels/vulkan/probe.py).
layout(constant_id = 32) const bool HARDWARE_HALVES = false;

float hardware_half_value(uint h) { return unpackHalf2x16(h & 0xffffu).x; }

// The value of the low 16 bits.
float half_value(uint h) {
    if (HARDWARE_HALVES) return hardware_half_value(h);
    const uint magnitude = h & 0x7fffu, sign = (h & 0x8000u) << 16;
    if (magnitude < 0x400u) {
        precise float small = float(magnitude) * 5.96046448e-8;
        return uintBitsToFloat(floatBitsToUint(small) | sign);
    }
    return uintBitsToFloat((magnitude << 13) + (magnitude < 0x7c00u ? 0x38000000u : 0x70000000u) | sign);
}

// The half nearest to a float32, both as bits; ties to even.
uint half_of(uint bits) {
    const uint sign = bits >> 16 & 0x8000u, a = bits & 0x7fffffffu;
    if (a > 0x7f800000u) return sign | 0x7e00u;
    if (a >= 0x477ff000u) return sign | 0x7c00u;
    if (a >= 0x38800000u) return sign | (a - 0x38000000u + 0xfffu + (a >> 13 & 1u)) >> 13;
    if (a < 0x33000000u) return sign;  // at most half of the smallest
    const uint shift = 126u - (a >> 23), m = a & 0x7fffffu | 0x800000u;
    return sign | (m + (1u << shift - 1u) - 1u + (m >> shift & 1u)) >> shift;
}
