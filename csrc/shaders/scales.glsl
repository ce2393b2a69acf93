// The scales of a quantised block, correctly rounded by integer divisions: a float division may err by 2.5
// units in the last place, differently on each device. Both take the bits of the largest magnitude, a finite
// number of at least 2^-100.

// amax / 127.
float scale_of(uint amax) {
    const uint m = amax & 0x7fffffu | 0x800000u, large = m << 7 >= 127u << 24 ? 1u : 0u, n = m << 7u - large;
    const uint quotient = n / 127u + (2u * (n % 127u) > 127u ? 1u : 0u);
    return uintBitsToFloat(((amax >> 23) - 7u + large << 23) + (quotient - 0x800000u));
}

// 127 / amax: the quotient of 127 * 2^41 in three steps.
float inverse_of(uint amax) {
    const uint m = amax & 0x7fffffu | 0x800000u;
    uint quotient = (127u << 25) / m, rest = (127u << 25) % m;
    for (int i = 0; i < 2; ++i) {
        rest <<= 8;
        quotient = quotient << 8 | rest / m;
        rest %= m;
    }
    const uint large = quotient >> 24;
    quotient = large == 1u ? (quotient >> 1) + (quotient & 1u) : quotient + (2u * rest > m ? 1u : 0u);
    return uintBitsToFloat((259u - (amax >> 23) + large << 23) + (quotient - 0x800000u));
}
