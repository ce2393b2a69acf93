// Attention of rows to one split of 256 positions, for the query heads that share a kv head;
// attention_merge.comp merges the splits. A workgroup handles up to 4 queries at a time, the components of
// its vectors: heads of one row, or of ROWS neighbouring rows of one sequence. For scores an invocation is a
// position; for values it is two values of an output in a quarter of the split.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "activation.glsl"
#include "batch.glsl"
#include "cache.glsl"
#include "half.glsl"
#include "window.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 2) const uint ROWS = 1;
layout(constant_id = 3) const uint HEADS = 4;  // heads of a row at a time: ROWS * HEADS <= 4
layout(constant_id = 4) const uint SOFTCAP = 0;
layout(std430, binding = 1) readonly buffer Q { float q[]; };
layout(std430, binding = 2) readonly buffer KCache { uint k_cache[]; };
layout(std430, binding = 2) readonly buffer KCache4 { uvec4 k_cache4[]; };
layout(std430, binding = 3) readonly buffer VCache { uint v_cache[]; };
// [row, head, split, HEAD_DIM + 2]: sums of values, the largest score, the sum of exponentials
layout(std430, binding = 4) writeonly buffer Partials { float partials[]; };
layout(push_constant) uniform Push {
    uint first_row, end_row;  // of this pass
    uint heads, kv_heads, most_splits, window;  // argument of first_seen()
    float scale, softcap;
};

const uint SPLIT = 256, QUARTER = 64, PAIRS = (HEAD_DIM + 1) / 2;
const uint OCTETS = HEAD_DIM / 8;
const uint KEYS_AHEAD = OCTETS % 4 == 0 ? 4 : 1, VALUES_AHEAD = 8;  // loads before the first sum

shared vec4 queries[HEAD_DIM];
shared vec4 weights[SPLIT];
shared vec4 folded[SPLIT];
shared vec4 parts[2][SPLIT];
shared uint rows[SPLIT];  // of the caches

// A value of the caches by its 16-bit position, and by its row.
uint half_at(bool keys, uint at) {
    return (keys ? k_cache[at / 2] : v_cache[at / 2]) >> (at & 1) * 16 & 0xffffu;
}

float block_scale(bool keys, uint row, uint block) {
    return CACHE == CACHE_Q8_0 ? half_value(half_at(keys, 17 * (row * (HEAD_DIM / 32) + block))) : 1.0;
}

// Values 2 pair and 2 pair + 1 of a row; with an odd width the last pair has no second value.
vec2 pair_at(bool keys, uint row, uint pair, float scale) {
    if (CACHE == CACHE_Q8_0) {
        const uint codes = half_at(keys, 17 * (row * (HEAD_DIM / 32) + pair / 16) + 1 + pair % 16);
        const int first = int(codes << 24) >> 24, second = int(codes << 16) >> 24;
        precise vec2 values = vec2(first, second) * scale;
        return values;
    }
    const uint at = row * HEAD_DIM + 2 * pair, next = 2 * pair + 1 < HEAD_DIM ? at + 1 : at;
    if (CACHE == CACHE_F32) {
        if (keys) return uintBitsToFloat(uvec2(k_cache[at], k_cache[next]));
        return uintBitsToFloat(uvec2(v_cache[at], v_cache[next]));
    }
    if (HEAD_DIM % 2 == 0) {
        const uint word = keys ? k_cache[at / 2] : v_cache[at / 2];
        return vec2(half_value(word & 0xffffu), half_value(word >> 16));
    }
    return vec2(half_value(half_at(keys, at)), half_value(half_at(keys, next)));
}

vec2 halves_of(uint word) { return vec2(half_value(word & 0xffffu), half_value(word >> 16)); }

// Four signed bytes.
vec4 codes_of(uint word) { return vec4(ivec4(word << 24, word << 16, word << 8, word) >> 24); }

// Values 8 octet to 8 octet + 7 of a row of keys with a width that is a multiple of 8. Each invocation reads
// a different row: larger reads request a cache line fewer times.
void eight_keys(uint row, uint octet, out vec4 first, out vec4 second) {
    const uint at = row * (HEAD_DIM / 8) + octet;
    if (CACHE == CACHE_F32) {
        first = uintBitsToFloat(k_cache4[2 * at]);
        second = uintBitsToFloat(k_cache4[2 * at + 1]);
    }
    if (CACHE == CACHE_F16) {
        const uvec4 words = k_cache4[at];
        first = vec4(halves_of(words.x), halves_of(words.y));
        second = vec4(halves_of(words.z), halves_of(words.w));
    }
    if (CACHE == CACHE_Q8_0) {
        const float scale = block_scale(true, row, octet / 4);
        const uint place = 17 * (row * (HEAD_DIM / 32) + octet / 4) + 1 + octet % 4 * 4, word = place / 2;
        uvec2 codes = uvec2(k_cache[word], k_cache[word + 1]);
        if (place % 2 == 1) codes = codes >> 16 | uvec2(codes.y, k_cache[word + 2]) << 16;
        precise vec4 a = codes_of(codes.x) * scale, b = codes_of(codes.y) * scale;
        first = a;
        second = b;
    }
}

// Adds the products of values d to d + 3 of the queries and of a key to the scores.
vec4 plus_products(vec4 score, uint d, vec4 keys) {
    for (uint i = 0; i < 4; ++i) {
        precise vec4 product = queries[d + i] * keys[i];
        precise vec4 sum = score + product;
        score = sum;
    }
    return score;
}

// Dot products of the queries with a key.
vec4 dots(uint row) {
    vec4 score = vec4(0.0);
    if (HEAD_DIM % 8 == 0) {
        for (uint octet = 0; octet < OCTETS; octet += KEYS_AHEAD) {
            vec4 first[KEYS_AHEAD], second[KEYS_AHEAD];
            [[unroll]] for (uint i = 0; i < KEYS_AHEAD; ++i) eight_keys(row, octet + i, first[i], second[i]);
            [[unroll]] for (uint i = 0; i < KEYS_AHEAD; ++i) {
                score = plus_products(score, 8 * (octet + i), first[i]);
                score = plus_products(score, 8 * (octet + i) + 4, second[i]);
            }
        }
        return score;
    }
    for (uint pair = 0; pair < PAIRS; ++pair) {
        const vec2 key = pair_at(true, row, pair, 1.0);
        precise vec4 product = queries[2 * pair] * key.x;
        precise vec4 sum = score + product;
        score = sum;
        if (2 * pair + 1 < HEAD_DIM) {
            product = queries[2 * pair + 1] * key.y;
            sum = score + product;
            score = sum;
        }
    }
    return score;
}

vec4 exponentials(vec4 x) {
    return vec4(exponential(x.x), exponential(x.y), exponential(x.z), exponential(x.w));
}

// Returns for each query whether it attends to a position.
bvec4 sees(uvec4 first, uvec4 end, uint i) {
    return bvec4(uvec4(greaterThanEqual(uvec4(i), first)) & uvec4(lessThan(uvec4(i), end)));
}

// Sums, or maxima, over the workgroup as in tree.glsl, of four values at a time.
vec4 fold(vec4 value, bool largest) {
    const uint i = gl_LocalInvocationIndex;
    folded[i] = value;
    barrier();
    for (uint apart = SPLIT / 2; apart > 0; apart /= 2) {
        if (i < apart) {
            const vec4 a = folded[i], b = folded[i + apart];
            precise vec4 sum = a + b;
            folded[i] = largest ? mix(a, b, greaterThan(b, a)) : sum;
        }
        barrier();
    }
    const vec4 all = folded[0];
    barrier();
    return all;
}

uint first_of(uint row) { return first_seen(of_row(POSITIONS, row), window); }

// Sums of weights and values by quarters of the positions; a pair of the output at a time.
void sum_values(uvec4 first, uvec4 end, uint from, uint until, uvec4 to) {
    const uint i = gl_LocalInvocationIndex, lane = i % QUARTER, quarter = i / QUARTER * QUARTER;
    const uint begin = max(from, quarter), stop = min(until, quarter + QUARTER);
    for (uint pair = lane; pair - lane < PAIRS; pair += QUARTER) {
        precise vec4 one = vec4(0.0), other = vec4(0.0);
        for (uint from_j = begin; from_j < stop && pair < PAIRS; from_j += VALUES_AHEAD) {
            vec2 v[VALUES_AHEAD];
            [[unroll]] for (uint k = 0; k < VALUES_AHEAD; ++k) {
                const uint row = rows[min(from_j + k, stop - 1)];
                v[k] = pair_at(false, row, pair, block_scale(false, row, pair / 16));
            }
            [[unroll]] for (uint k = 0; k < VALUES_AHEAD; ++k) {
                const uint j = from_j + k;
                const bvec4 seen = j < stop ? sees(first, end, j) : bvec4(false);
                precise vec4 first_product = weights[j % SPLIT] * v[k].x;
                precise vec4 second_product = weights[j % SPLIT] * v[k].y;
                precise vec4 first_sum = one + first_product, second_sum = other + second_product;
                one = mix(one, first_sum, seen);
                other = mix(other, second_sum, seen);
            }
        }
        parts[0][i] = one;
        parts[1][i] = other;
        barrier();
        if (i < 2 * QUARTER && pair < PAIRS) {  // the first two quarters: one value of the pair each
            const uint which = i / QUARTER, value = 2 * pair + which;
            precise vec4 sum = parts[which][lane] + parts[which][lane + QUARTER];
            sum = sum + parts[which][lane + 2 * QUARTER];
            sum = sum + parts[which][lane + 3 * QUARTER];
            for (uint k = 0; k < 4; ++k)
                if (first[k] < end[k] && value < HEAD_DIM) partials[to[k] + value] = sum[k];
        }
        barrier();
    }
}

// Attends heads of rows [row, row + count), which have the same first split of one sequence. Positions count
// from the start of the split.
void attend(uint row, uint count, uint head, uint split, uint number) {
    const uint i = gl_LocalInvocationIndex, group = heads / kv_heads;
    const uint kv_head = gl_WorkGroupID.y / (gl_NumWorkGroups.y / kv_heads);
    uvec4 first = uvec4(0), end = uvec4(0), query = uvec4(0), to;
    uint from = SPLIT, until = 0;
    for (uint k = 0; k < ROWS * HEADS; ++k) {
        const uint of = row + k / HEADS, one = head + k % HEADS;
        if (k / HEADS >= count || one >= group) continue;
        query[k] = of * heads + kv_head * group + one;
        to[k] = ((query[k] - first_row * heads) * most_splits + number) * (HEAD_DIM + 2);
        first[k] = max(first_of(of), split * SPLIT) - split * SPLIT;
        end[k] = min(max(of_row(POSITIONS, of) + 1, split * SPLIT) - split * SPLIT, SPLIT);
        if (first[k] >= end[k]) continue;
        from = min(from, first[k]);
        until = max(until, end[k]);
    }
    if (from >= until) return;
    for (uint d = i; d < HEAD_DIM; d += SPLIT) {
        vec4 values = vec4(0.0);
        for (uint k = 0; k < ROWS * HEADS; ++k)
            if (first[k] < end[k]) values[k] = q[query[k] * HEAD_DIM + d];
        queries[d] = values;
    }
    if (i >= from && i < until) {
        const uint position = split * SPLIT + i;
        const uint at = batch[of_row(SEQUENCE, row) * PAGES_PER_SEQUENCE + batch[PAGES] + position / PAGE];
        rows[i] = (at * kv_heads + kv_head) * PAGE + position % PAGE;
    }
    barrier();
    precise vec4 score = vec4(0.0);
    if (i >= from && i < until) {
        score = dots(rows[i]) * scale;
        if (SOFTCAP == 1) {
            score = score / softcap;
            for (uint k = 0; k < ROWS * HEADS; ++k) score[k] = hyperbolic_tangent(score[k]);
            score = score * softcap;
        }
    }
    const bvec4 seen = sees(first, end, i);
    const vec4 largest = fold(mix(vec4(uintBitsToFloat(0xff800000u)), score, seen), true);
    precise vec4 above = score - largest;
    const vec4 weight = mix(vec4(0.0), exponentials(above), seen);
    weights[i] = weight;
    const vec4 sum = fold(weight, false);
    if (i < 4 && first[i] < end[i]) {
        partials[to[i] + HEAD_DIM] = largest[i];
        partials[to[i] + HEAD_DIM + 1] = sum[i];
    }
    sum_values(first, end, from, until, to);
}

// Several workgroups may share the heads of a kv head.
void main() {
    const uint sharing = gl_NumWorkGroups.y / kv_heads, own = gl_WorkGroupID.y % sharing;
    const uint begin = first_row + gl_WorkGroupID.z * ROWS, limit = min(end_row, N_TOKENS);
    for (uint row = begin, next; row < min(begin + ROWS, limit); row = next) {
        const uint split = first_of(row) / SPLIT;
        for (next = row + 1; next < min(begin + ROWS, limit); ++next)
            if (of_row(SEQUENCE, next) != of_row(SEQUENCE, row) || first_of(next) / SPLIT != split) break;
        for (uint head = own * HEADS; head < heads / kv_heads; head += sharing * HEADS)
            attend(row, next - row, head, split + gl_WorkGroupID.x, gl_WorkGroupID.x);
    }
}
