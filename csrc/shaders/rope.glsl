// The rotation of pairs of a head by angles from a table.
layout(constant_id = 3) const uint INTERLEAVED = 0;

// The two values of a pair in a head with `pairs` of them.
uvec2 pair_places(uint pair, uint pairs) {
    return INTERLEAVED == 1 ? uvec2(2 * pair, 2 * pair + 1) : uvec2(pair, pair + pairs);
}

vec2 rotated(vec2 values, float c, float s) {
    precise float ac = values.x * c, bs = values.y * s, as = values.x * s, bc = values.y * c;
    precise float first = ac - bs, second = as + bc;
    return vec2(first, second);
}
